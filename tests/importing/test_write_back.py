"""Small graphs written back: what the file computes, which kernels run, and what of the file is another than before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, INT64, Array, save
from written import difference, for_sizes, same, write

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.quant.granularity import PerTensor
from qatkit_verify.errors import ConfigError

_RANDOM = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Each test draws the same numbers whatever ran before."""
    torch.manual_seed(5)
    _RANDOM.bit_generator.state = np.random.default_rng(5).bit_generator.state


def floats(*shape: int) -> Array:
    """Normal values, scaled as weights are."""
    values: Array = _RANDOM.normal(0, 1, shape) / max(1.0, float(np.sqrt(np.prod(shape[1:]))))
    return values.astype(np.float32)


def between(low: float, high: float, *shape: int) -> Array:
    """Even values."""
    return _RANDOM.uniform(low, high, shape).astype(np.float32)


class Net:
    """A graph in the making: nodes in order, constants by name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def add(self, operator: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        """The (first) output of a new node."""
        name = name or f"/{operator}_{len(self.nodes)}"
        made = [f"{name}_out{i or ''}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), made, name, **attributes))
        return made[0]

    def constant(self, value: Any) -> str:
        """The name of an initializer."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def conv(
        self, x: str, out: int, inputs: int, size: int = 3, *, bias: bool = True, **attributes: Any
    ) -> str:
        """A convolution that keeps the size."""
        given = [self.constant(floats(out, inputs, size, size))] + [self.constant(floats(out))] * bias
        attributes.setdefault("pads", [size // 2] * 4)
        return self.add("Conv", x, *given, **attributes)

    def norm(self, x: str, channels: int) -> str:
        """A BatchNormalization."""
        values = (
            between(0.5, 1.5, channels),
            floats(channels),
            floats(channels),
            between(0.5, 1.5, channels),
        )
        return self.add("BatchNormalization", x, *map(self.constant, values))

    def head(self, x: str, channels: int) -> str:
        """A global pool and a Gemm of 10 classes."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x))
        return self.add(
            "Gemm", flat, self.constant(floats(10, channels)), self.constant(floats(10)), transB=1
        )


@dataclass
class Case:
    """A graph and what is expected of its file.

    Attributes:
        build: makes the graph; returns the names of its outputs.
        inputs: shapes of float inputs.
        kernels: that ONNX Runtime runs, at least so many.
        gone, changed: nodes by operator and number.
        new: operators that were not there.
        opset: of the source.
        steps: how far outputs may be off; one where float sums come before a pair, and may round the other way.
    """

    build: Callable[[Net], tuple[str, ...]]
    kernels: Mapping[str, int]
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (2, 3, 16, 16)})
    gone: int = 0
    changed: int = 0
    new: Mapping[str, int] = field(default_factory=dict)
    opset: int = 17
    steps: float = 0.05


def residual(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.norm(net.conv("x", 16, 3, bias=False), 16))
    b = net.add("Relu", net.norm(net.conv(a, 16, 16), 16))
    c = net.norm(net.conv(b, 16, 16, bias=False), 16)
    return (net.head(net.add("Relu", net.add("Add", c, a)), 16),)


def depthwise(net: Net) -> tuple[str, ...]:
    six = net.constant(np.float32(6)), net.constant(np.float32(0))
    a = net.add("Clip", net.conv("x", 18, 3, strides=[2, 2]), six[1], six[0])
    b = net.add("Clip", net.conv(a, 18, 1, group=18), six[1], six[0])
    return (net.head(net.conv(b, 18, 18, 1), 18),)


def groups(net: Net) -> tuple[str, ...]:
    return (net.conv(net.conv("x", 16, 3), 24, 4, group=4),)


def gemms(net: Net) -> tuple[str, ...]:
    x = net.add("Relu", net.add("Gemm", "x", net.constant(floats(8, 12)), net.constant(floats(12))))
    x = net.add("Gemm", x, net.constant(floats(12, 12)), transB=1)
    x = net.add("Tanh", x)
    scaled = net.constant(floats(1, 6))
    return (net.add("Gemm", x, net.constant(floats(12, 6)), scaled, alpha=0.5, beta=2.0),)


def matmuls(net: Net) -> tuple[str, ...]:
    x = net.add("MatMul", "x", net.constant(floats(8, 12)))
    x = net.add("Tanh", net.add("Add", x, net.constant(floats(12))))
    return (net.add("MatMul", x, net.constant(floats(12, 6))),)


def concat(net: Net) -> tuple[str, ...]:
    parts = [net.add("Relu", net.conv("x", 8, 3, size)) for size in (1, 3, 5)]
    pool = net.add("MaxPool", parts[0], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return (net.head(net.conv(net.add("Concat", *parts, pool, axis=1), 16, 32), 16),)


def pools(net: Net) -> tuple[str, ...]:
    a = net.add("MaxPool", net.conv("x", 16, 3), kernel_shape=[2, 2], strides=[2, 2])
    b = net.add("AveragePool", net.conv(a, 16, 16), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    mean = net.add("ReduceMean", net.conv(b, 16, 16), axes=[2, 3], keepdims=0)
    return (net.add("Gemm", mean, net.constant(floats(16, 4))),)


def shared(net: Net) -> tuple[str, ...]:
    weight, bias = net.constant(floats(16, 16, 3, 3)), net.constant(floats(16))
    a = net.add("Relu", net.conv("x", 16, 3))
    b = net.add("Relu", net.add("Conv", a, weight, bias, pads=[1] * 4))
    return (net.head(net.add("Conv", b, weight, bias, pads=[1] * 4), 16),)


def two_ends(net: Net) -> tuple[str, ...]:
    a, b = net.conv("x", 16, 3), net.conv("y", 16, 3)
    both = net.add("Add", a, b)
    return net.conv(both, 4, 16), both


def uneven(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3, pads=[0, 0, 1, 1], strides=[2, 2]))
    return (net.conv(net.conv(a, 16, 16, pads=[2, 1, 0, 1]), 8, 16, pads=None, auto_pad="SAME_LOWER"),)


def silu(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    a = net.add("Mul", a, net.add("Sigmoid", a))
    b = net.conv(a, 16, 16)
    return (net.head(net.add("Add", a, net.add("Mul", b, net.add("Sigmoid", b))), 16),)


def hard_swish(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    ends = [net.constant(np.float32(one)) for one in (3, 0, 6, 6)]
    a = net.add("Div", net.add("Mul", a, net.add("Clip", net.add("Add", a, ends[0]), *ends[1:3])), ends[3])
    b = net.conv(a, 16, 16)
    gate = net.add("HardSigmoid", net.conv(net.add("GlobalAveragePool", b), 16, 16, 1), alpha=1 / 6)
    return (net.conv(net.add("HardSwish", net.add("Mul", b, gate)), 8, 16),)


def gelu(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    erf = net.add("Erf", net.add("Div", a, net.constant(np.float32(np.sqrt(2)))))
    product = net.add("Mul", a, net.add("Add", erf, net.constant(np.float32(1))))
    return (net.conv(net.add("Mul", product, net.constant(np.float32(0.5))), 16, 16),)


def dense_block(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    b = net.add("Concat", a, net.conv(a, 16, 16), axis=1)
    return (net.head(net.conv(net.add("Relu", net.norm(b, 32)), 16, 32), 16),)


def transposed(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3))
    weights = [net.constant(floats(16, 8, 2, 2)), net.constant(floats(8))]
    b = net.add("Relu", net.add("ConvTranspose", a, *weights, strides=[2, 2]))
    other = net.constant(floats(8, 8, 3, 3))
    c = net.add("ConvTranspose", b, other, strides=[2, 2], pads=[1, 1, 0, 0])
    return (net.add("Sigmoid", net.conv(c, 4, 8)),)


def moved(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3))
    flat = net.add("Reshape", a, net.constant(np.array([0, 16, 256])))
    rows = net.add("Transpose", flat, perm=[0, 2, 1])
    hidden = net.add("MatMul", rows, net.constant(floats(16, 24)))
    hidden = net.add("Add", hidden, net.constant(floats(24)))
    return (net.add("MatMul", net.add("Softmax", hidden, axis=-1), net.constant(floats(24, 5))),)


def several(net: Net) -> tuple[str, ...]:
    parts = [net.conv("x", 8, 3) for _ in range(3)]
    summed = net.conv(net.add("Sum", *parts), 8, 8)
    halves = net.add("Split", summed, axis=1, outputs=2)
    return (net.conv(net.add("Sub", halves, f"{halves}1"), 8, 4),)


def layer_scale(net: Net) -> tuple[str, ...]:
    x = net.add("MatMul", "x", net.constant(floats(8, 12)))
    x = net.add("Mul", x, net.constant(between(0.5, 2, 12)))
    x = net.add("Tanh", x)
    y = net.add("Transpose", net.add("MatMul", x, net.constant(floats(12, 6))), perm=[0, 2, 1])
    return (net.add("Mul", y, net.constant(between(0.5, 2, 6, 1))),)


def norm_behind_matmul(net: Net) -> tuple[str, ...]:
    x = net.norm(net.add("MatMul", "x", net.constant(floats(8, 12))), 12)
    return (net.add("MatMul", net.add("Relu", x), net.constant(floats(12, 6))),)


def fused_conv(net: Net) -> tuple[str, ...]:
    given = [net.constant(floats(16, 3, 3, 3)), net.constant(floats(16))]
    a = net.add("FusedConv", "x", *given, domain="com.microsoft", activation="Relu", pads=[1] * 4)
    return (net.conv(a, 8, 16),)


def layer_norm(net: Net) -> tuple[str, ...]:
    rows = net.conv("x", 16, 3)
    centered = net.add("Sub", rows, net.add("ReduceMean", rows, axes=[-1]))
    square = net.add("Pow", centered, net.constant(np.float32(2)))
    variance = net.add("Add", net.add("ReduceMean", square, axes=[-1]), net.constant(np.float32(1e-5)))
    normal = net.add("Div", centered, net.add("Sqrt", variance))
    y = net.add("Add", net.add("Mul", normal, net.constant(between(0.5, 1.5, 16))), net.constant(floats(16)))
    return (net.conv(y, 8, 16),)


def conditions(net: Net) -> tuple[str, ...]:
    a, b = net.conv("x", 8, 3), net.conv("x", 8, 3)
    mask = net.add("Greater", a, net.constant(np.float32(0)))
    c = net.add("Where", mask, a, b)
    d = net.add("Max", c, net.add("Neg", b))
    e = net.add("Pad", d, net.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])))
    return net.conv(net.add("Slice", e, *(net.constant(np.array([i])) for i in (1, 15, 2))), 8, 8), a


CASES = {
    "conv, norm, relu, residual": Case(residual, {"QLinearConv": 3, "QLinearAdd": 1, "QGemm": 1}, gone=3),
    "depthwise and Clip": Case(depthwise, {"QLinearConv": 3, "QGemm": 1}),
    "groups": Case(groups, {"QLinearConv": 2}),
    "Gemm": Case(gemms, {"QGemm": 3}, {"x": (4, 8)}, changed=1),
    "MatMul": Case(matmuls, {"MatMulIntegerToFloat": 2}, {"x": (4, 8)}, new={"Sum": 1}),
    "Concat": Case(concat, {"QLinearConv": 4, "QLinearConcat": 1}),
    "pools": Case(
        pools,
        {"QLinearConv": 3, "QLinearGlobalAveragePool": 1, "NhwcMaxPool": 1},
        gone=1,
        new={"Sum": 1, "GlobalAveragePool": 1, "Flatten": 1},
    ),
    "shared weights": Case(shared, {"QLinearConv": 3}),
    "two inputs, two outputs": Case(
        two_ends, {"QLinearConv": 3, "QLinearAdd": 1}, {"x": (1, 3, 8, 8), "y": (1, 3, 8, 8)}
    ),
    "uneven pads": Case(uneven, {"QLinearConv": 3}),
    "SiLU in parts": Case(silu, {"QLinearConv": 2, "QuickGelu": 2}, gone=4, new={"QuickGelu": 2}),
    "HardSwish in parts": Case(
        hard_swish,
        {"QLinearConv": 4, "QLinearMul": 3, "QLinearAdd": 3},
        gone=6,
        new={"Add": 3, "Mul": 2},
    ),
    "GELU in parts": Case(gelu, {"QLinearConv": 2, "Gelu": 1}, new={"Sum": 1}),
    "norm alone": Case(dense_block, {"QLinearConv": 4}, changed=1),
    "ConvTranspose": Case(
        transposed,
        {"QLinearConv": 4},
        gone=2,
        new={"Conv": 2, "DepthToSpace": 2, "Slice": 2},
    ),
    "MatMul behind moved axes": Case(moved, {"QLinearConv": 1, "MatMulIntegerToFloat": 2}, steps=1),
    "operators of several steps": Case(several, {"QLinearConv": 5}),
    "layer scale": Case(layer_scale, {"MatMulIntegerToFloat": 2}, {"x": (2, 5, 8)}, gone=2, steps=1),
    "norm behind a MatMul": Case(norm_behind_matmul, {"QGemm": 1}, {"x": (4, 8)}, gone=1, changed=1),
    "LayerNorm in parts": Case(
        layer_norm, {"QLinearConv": 2, "LayerNormalization": 1}, new={"Sum": 1}, steps=1
    ),
    "conditions": Case(conditions, {"QLinearConv": 3}),
    "opset 11": Case(residual, {"QLinearConv": 3, "QLinearAdd": 1, "QGemm": 1}, gone=3, opset=11),
}


def _saved(case: Case, folder: Path, **more: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    net = Net()
    ends = case.build(net)
    feeds = {name: torch.from_numpy(floats(*shape) * 3) for name, shape in case.inputs.items()}
    inputs: dict[str, Any] = {name: (FLOAT, ["n", *shape[1:]]) for name, shape in case.inputs.items()}
    path = folder / "float.onnx"
    return save(path, net.nodes, inputs, list(ends), net.constants, opset=case.opset, **more), feeds


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_file_gives_what_its_module_gives(case: Case, tmp_path: Path) -> None:
    source, feeds = _saved(case, tmp_path)
    written = write(source, feeds)
    same(written, feeds, steps=case.steps)
    same(written, {name: torch.randn_like(value[:1]) for name, value in feeds.items()}, steps=case.steps)
    found = difference(source, written.path)
    assert (len(found.gone), len(found.changed)) == (case.gone, case.changed)
    assert found.new == case.new
    kernels = written.optimized()
    assert {name: kernels[name] for name in case.kernels} == dict(case.kernels)
    assert not {"Conv", "FusedConv", "FusedGemm", "Gemm"} & set(kernels)


def test_clip_that_ends_below_the_range_goes(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["depthwise and Clip"], tmp_path)
    wide = {name: value * 50 for name, value in feeds.items()}
    written = write(source, wide)
    assert not difference(source, written.path).gone
    names = {"/Conv_0_quant": "scale", "/Conv_0": "output_scale", "/Conv_2": "input_scale"}
    for name, scale in names.items():
        module: Any = written.converted.get_submodule(name)
        setattr(module, scale, getattr(module, scale) * 1.02)
        if scale == "input_scale":
            module.bias_scale = module.bias_scale * 1.02
    write_back(written.model, written.converted, written.path)
    assert difference(source, written.path).gone == {"/Clip_1"}
    same(written, wide)
    assert written.optimized()["QLinearConv"] == 3


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK, TENSORRT], ids=lambda one: one.name)
def test_every_backend(backend: Backend, tmp_path: Path) -> None:
    source, feeds = _saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, backend=backend)
    same(written, feeds, optimized=backend is FBGEMM)
    assert len(difference(source, written.path).gone) == 3


def test_scales_per_tensor_need_no_opset_13(tmp_path: Path) -> None:
    source, feeds = _saved(replace(CASES["groups"], opset=11), tmp_path)
    backend = replace(FBGEMM, weight=replace(FBGEMM.weight, granularity=PerTensor()))
    written = write(source, feeds, backend=backend)
    same(written, feeds)
    assert onnx.load(str(written.path)).opset_import[0].version == 11


def test_float_by_override_keeps_its_node(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, overrides={"/Conv_3": OverrideConfig(float=True)})
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_silu_in_int8_by_override(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["SiLU in parts"], tmp_path)
    written = write(source, feeds, overrides={"op/silu": OverrideConfig(int8=True)})
    same(written, feeds)
    kernels = written.optimized()
    assert (kernels["QLinearSigmoid"], kernels["QLinearMul"]) == (2, 2)


def test_batch_norm_that_trains(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, schedule=ScheduleConfig(batch_norm="train"))
    same(written, feeds)
    assert len(difference(source, written.path).gone) == 3


def test_branch_without_weights_may_read_a_pair(tmp_path: Path) -> None:
    """An If as TorchScript writes it for `x.squeeze(3)`."""
    net = Net()
    pooled = net.add("ReduceMean", net.add("Relu", net.conv("x", 16, 3)), axes=[3])
    wide = net.add("Equal", net.add("Gather", net.add("Shape", pooled), net.constant(3)), net.constant(1))
    branches = {}
    for name, operator in (("then_branch", "Squeeze"), ("else_branch", "Identity")):
        inputs = [pooled, "axes"] if operator == "Squeeze" else [pooled]
        node = helper.make_node(operator, inputs, [f"{name}_out"], f"{name}/{operator}")
        branches[name] = helper.make_graph(
            [node], name, [], [helper.make_empty_tensor_value_info(f"{name}_out")]
        )
    net.constants["axes"] = np.array([3])
    chosen = net.add("If", wide, name="choice", **branches)
    y = net.add("Conv", chosen, net.constant(floats(8, 16, 3)), name="last")
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants)
    model = onnx.load(str(source))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, FLOAT, ["n", 8, 6]))
    onnx.save(model, str(source))
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert [node.op_type for node in onnx.load(str(written.path)).graph.node].count("If") == 1


def test_branch_that_the_input_chooses_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", FLOAT, (4, 3, 1, 1), floats(12))
    branches = {
        name: helper.make_graph(
            [helper.make_node("Conv", ["x", "w"], [name], f"{name}/Conv")],
            name, [], [helper.make_empty_tensor_value_info(name)], [weight],
        )
        for name in ("then_branch", "else_branch")
    }  # fmt: skip
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "three"], ["height"]),
        helper.make_node("Greater", ["height", "eight"], ["is_large"]),
        helper.make_node("If", ["is_large"], ["y"], "choice", **branches),
    ]
    constants = {"three": np.array(3), "eight": np.array(8)}
    source = save(tmp_path / "float.onnx", nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, ["y"], constants)
    reason = r"node 'else_branch/Conv' has other weights in a branch of 'choice', which the input chooses"
    with pytest.raises(ConfigError, match=reason):
        write(source, {"x": torch.randn(2, 3, 8, 8)})
    assert not (tmp_path / "float_int8.onnx").exists()


def test_any_height_and_width(tmp_path: Path) -> None:
    net = Net()
    a = net.add("Relu", net.conv("x", 16, 3, strides=[2, 2]))
    size = net.add("Slice", net.add("Shape", a), *(net.constant(np.array([i])) for i in (2, 4)))
    b = net.conv(net.add("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 16, 16)
    target = net.add("Concat", net.constant(np.array([1, 16])), size, axis=0)
    up = net.add(
        "Resize", b, "", "", target, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    y = net.conv(net.add("Concat", a, up, axis=1), 4, 32)
    inputs = {"x": (FLOAT, [1, 3, "height", "width"])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [y], net.constants)
    written = write(source, {"x": torch.randn(1, 3, 32, 32)})
    sizes = onnx.load(str(written.path)).graph.input[0].type.tensor_type.shape.dim[2:]
    assert [one.dim_param for one in sizes] == ["height", "width"]
    for height, width in ((32, 32), (48, 64), (16, 80)):
        feeds = {"x": torch.randn(1, 3, height, width)}
        same(written, feeds, converted=for_sizes(written, feeds))
    assert written.optimized()["QLinearConv"] == 3


def test_names_of_a_quantizer_stay_with_their_owners(tmp_path: Path) -> None:
    net = Net()
    a = net.add("Conv", "x", net.constant(floats(16, 3, 3, 3)), name="x_QuantizeLinear")
    net.nodes[-1].output[0] = "x_QuantizeLinear_Output"
    net.constants["x_scale"] = floats(16, 16, 3, 3)
    a = net.add("Conv", "x_QuantizeLinear_Output", "x_scale", name="x_DequantizeLinear")
    inputs = {"x": (FLOAT, ["n", 3, 16, 16])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [a], net.constants)
    feeds = {"x": torch.randn(2, 3, 16, 16)}
    written = write(source, feeds)
    same(written, feeds)
    found = difference(source, written.path)
    assert (found.gone, found.new, found.changed) == (set(), Counter(), set())


def test_metadata_and_doc_strings_stay(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["groups"], tmp_path, doc_string="of the model", producer_name="someone")
    model = onnx.load(str(source))
    model.metadata_props.add(key="classes", value="cat,dog")
    model.graph.node[0].doc_string, model.graph.doc_string, model.model_version = (
        "of a node",
        "of the graph",
        7,
    )
    onnx.save(model, str(source))
    written = write(source, feeds)
    difference(source, written.path)
    assert [(p.key, p.value) for p in onnx.load(str(written.path)).metadata_props] == [("classes", "cat,dog")]


def test_opset_is_raised_only_where_pairs_need_it(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["groups"], tmp_path)
    for opset, wanted in ((11, 13), (13, 13), (15, 15)):
        model = onnx.load(str(source))
        model.opset_import[0].version = opset
        onnx.save(model, str(source))
        written = onnx.load(str(write(source, feeds).path))
        assert [one.version for one in written.opset_import if not one.domain] == [wanted]


def test_functions_of_the_file_are_inlined(tmp_path: Path) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"], "inner")]
    local = helper.make_function("local", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    net = Net()
    a = net.conv("x", 16, 3)
    net.nodes.append(helper.make_node("Act", [a], ["activated"], "act", domain="local"))
    y = net.conv("activated", 8, 16)
    source = save(
        tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants,
        functions=[local], imports=[helper.make_opsetid("local", 1)],
    )  # fmt: skip
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_lstm_has_int8_weights(tmp_path: Path) -> None:
    net = Net()
    states = [net.constant(floats(1, 4 * 16, size)) for size in (8, 16)]
    steps = net.add("LSTM", "x", *states, net.constant(floats(1, 128)), hidden_size=16, outputs=3)
    rows = net.add("Squeeze", steps, net.constant(np.array([1])))
    y = net.add("MatMul", rows, net.constant(floats(16, 4)))
    inputs = {"x": (FLOAT, [5, "n", 8])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [y, f"{steps}1"], net.constants)
    feeds = {"x": torch.randn(5, 2, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert difference(source, written.path).new == {"Cast": 2, "Mul": 2}
    whole = [
        one
        for one in onnx.load(str(written.path)).graph.initializer
        if one.data_type == onnx.TensorProto.INT8
    ]
    assert sorted(tuple(one.dims) for one in whole if len(one.dims) > 2) == [(1, 64, 8), (1, 64, 16)]


def test_embedding_looks_bytes_up(tmp_path: Path) -> None:
    net = Net()
    rows = net.add("Gather", net.constant(floats(20, 16)), "ids")
    y = net.add("MatMul", net.add("ReduceMean", rows, axes=[1], keepdims=0), net.constant(floats(16, 4)))
    source = save(tmp_path / "float.onnx", net.nodes, {"ids": (INT64, ["n", 6])}, [y, rows], net.constants)
    feeds = {"ids": torch.randint(0, 20, (3, 6))}
    written = write(source, feeds)
    same(written, feeds)
    assert difference(source, written.path).new == {"Gather": 1, "Cast": 1, "Mul": 1}


def test_quantized_output_behind_an_identity(tmp_path: Path) -> None:
    net = Net()
    a = net.conv("x", 16, 3)
    b = net.add("Identity", a)
    c = net.conv(b, 8, 16)
    source = save(
        tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [b, c, a], net.constants
    )
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_taken_branch_takes_the_place_of_its_if(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", FLOAT, (4, 3, 1, 1), floats(12))
    then = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["inner"], "inner/Conv")], "then", [],
        [helper.make_empty_tensor_value_info("inner")], [weight],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["negative"])],
        "else",
        [],
        [helper.make_empty_tensor_value_info("negative")],
    )
    nodes = [
        helper.make_node("Equal", ["rate", "wanted"], ["is_wanted"]),
        helper.make_node("If", ["is_wanted"], ["y"], "choice", then_branch=then, else_branch=other),
    ]
    inputs = {"x": (FLOAT, ["n", 3, 8, 8]), "rate": (INT64, [])}
    source = save(tmp_path / "float.onnx", nodes, inputs, ["y"], {"wanted": np.array(16000)})
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds, fixed={"rate": 16000})
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 1
    assert [one.name for one in onnx.load(str(written.path)).graph.input] == ["x"]


def test_trained_floats_are_written(tmp_path: Path) -> None:
    net = Net()
    slope = net.constant(between(0.1, 0.3, 16, 1, 1))
    y = net.conv(net.add("PRelu", net.conv("x", 16, 3), slope), 8, 16)
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants)
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    with torch.no_grad():
        written.converted.get_submodule("/PRelu_1").weight.mul_(1.5)  # type: ignore[operator]
    write_back(written.model, written.converted, written.path)
    same(written, feeds)


def test_graph_of_another_file_is_refused(tmp_path: Path) -> None:
    source, feeds = _saved(CASES["groups"], tmp_path)
    written = write(source, feeds)
    (tmp_path / "other").mkdir()
    other, _ = _saved(CASES["Gemm"], tmp_path / "other")
    with pytest.raises(ConfigError, match="of the converted graph is part of no node of the file"):
        write_back(import_onnx(other), written.converted, tmp_path / "y.onnx")
    assert not (tmp_path / "y.onnx").exists()
