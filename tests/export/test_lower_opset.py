"""Lowering, rule by rule: ONNX Runtime's output before and after, for hand-built graphs of opset 18."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from qatkit.export.lower_opset import lower
from qatkit.export.ort_fusions import for_onnxruntime

Arrays = Mapping[str, NDArray[Any]]
RNG = np.random.default_rng(0)
IMAGE: tuple[int, ...] = (2, 3, 5, 7)


class Case(NamedTuple):
    """Nodes from "x" to "y", their constants, and what the lowered graph must or must not hold."""

    nodes: list[NodeProto]
    constants: Arrays = MappingProxyType({})
    shape: tuple[int, ...] = IMAGE
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    outputs: int = 1


def op(kind: str, inputs: str = "x", outputs: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs.split(","), outputs.split(","), **attributes)


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def floats(*shape: int) -> NDArray[np.float32]:
    return RNG.normal(size=shape).astype(np.float32)


def model_of(case: Case, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    outputs = [name for node in case.nodes for name in node.output if name.startswith("y")]
    graph = helper.make_graph(
        case.nodes,
        "case",
        [helper.make_tensor_value_info("x", kind, case.shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in case.constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True)


def lowered(proto: onnx.ModelProto, opset: int = 13) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    for_onnxruntime(model, opset)
    lower(model, opset)
    common.RemoveUnusedNodesPass()(model)  # what a rewrite took out of use, as export does
    after = ir.to_proto(model)
    del after.graph.value_info[:]
    onnx.checker.check_model(after, full_check=True)
    assert [(o.domain, o.version) for o in after.opset_import] == [("", opset)]
    return after


def run(proto: onnx.ModelProto, x: NDArray[Any], optimized: Path | None = None) -> list[NDArray[Any]]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    if optimized is None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = str(optimized)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(v) for v in session.run(None, {"x": x})]


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def gelu(swap: bool = False, half_last: bool = False) -> list[NodeProto]:
    """x·(½·(1 + erf(x/√2))) as torch's exporter writes it, its operands swapped on demand."""
    inner = "one_plus,half" if half_last else "half,one_plus"
    return [
        op("Div", "x,root", "scaled"), op("Erf", "scaled", "erf"), op("Add", "erf,one", "one_plus"),
        op("Mul", inner, "inner"), op("Mul", "inner,x" if swap else "x,inner", "y"),
    ]  # fmt: skip


GELU = {
    "root": np.array(math.sqrt(2), np.float32),
    "one": np.array(1, np.float32),
    "half": np.array(0.5, np.float32),
}
GAMMA, BETA = {"g": floats(7)}, {"g": floats(7), "b": floats(7)}
CASES: dict[str, Case] = {
    "layer_norm": Case(
        [op("LayerNormalization", "x,g,b", epsilon=1e-3)], BETA, lacks=("LayerNormalization",)
    ),
    "layer_norm_no_bias": Case([op("LayerNormalization", "x,g")], GAMMA, lacks=("LayerNormalization",)),
    "layer_norm_axis": Case([op("LayerNormalization", "x,g,b", axis=2)], {"g": floats(5, 7), "b": floats(5, 7)}),
    "layer_norm_negative_axis": Case([op("LayerNormalization", "x,g", axis=-3)], {"g": floats(3, 5, 7)}),
    "split_uneven": Case([op("Split", "x", "y0,y1,y2", axis=3, num_outputs=3)]),
    "split_even": Case([op("Split", "x", "y0,y1,y2", axis=1, num_outputs=3)]),
    "split_negative_axis": Case([op("Split", "x", "y0,y1", axis=-1, num_outputs=2)]),
    "split_sizes": Case([op("Split", "x,s", "y0,y1", axis=3)], {"s": ints(2, 5)}),
    "pad_axes": Case([op("Pad", "x,p,v,a")], {"p": ints(1, 2, 3, 0), "v": np.array(2, np.float32), "a": ints(3, 1)}),
    "pad_negative_axes": Case([op("Pad", "x,p,,a")], {"p": ints(1, 2, 0, 1), "a": ints(-1, -2)}),
    "pad_reflect_axes": Case([op("Pad", "x,p,,a", mode="reflect")], {"p": ints(1, 2, 3, 1), "a": ints(2, 3)}),
    "pad_plain": Case([op("Pad", "x,p")], {"p": ints(0, 0, 1, 2, 0, 0, 3, 4)}),
    "shape_start": Case([op("Shape", "x", "y", start=1)], has=("Slice",)),
    "shape_start_end": Case([op("Shape", "x", "y", start=1, end=3)], has=("Slice",)),
    "shape_negative": Case([op("Shape", "x", "y", start=-3, end=-1)], has=("Slice",)),
    "shape_end": Case([op("Shape", "x", "y", end=2)], has=("Slice",)),
    "shape_plain": Case([op("Shape", "x", "y")], lacks=("Slice",)),
    "hard_swish": Case([op("HardSwish")], lacks=("HardSwish",), has=("HardSigmoid",)),
    "reshape_allowzero": Case([op("Reshape", "x,s", allowzero=1)], {"s": ints(6, -1)}),
    "reshape_zero_copies": Case([op("Reshape", "x,s")], {"s": ints(0, -1)}),
    "global_pool": Case([op("ReduceMean", "x,a")], {"a": ints(2, 3)}, has=("GlobalAveragePool",)),
    "global_pool_negative": Case([op("ReduceMean", "x,a")], {"a": ints(-1, -2)}, has=("GlobalAveragePool",)),
    "mean_of_one_axis": Case([op("ReduceMean", "x,a")], {"a": ints(2)}, lacks=("GlobalAveragePool",)),
    "mean_without_keepdims": Case(
        [op("ReduceMean", "x,a", keepdims=0)], {"a": ints(2, 3)}, lacks=("GlobalAveragePool",)
    ),
    "mean_of_channels": Case([op("ReduceMean", "x,a")], {"a": ints(1, 2)}, lacks=("GlobalAveragePool",)),
    "mean_of_tokens": Case([op("ReduceMean", "x,a")], {"a": ints(1)}, shape=(2, 5, 8)),
    "mean_of_all": Case([op("ReduceMean", "x")]),
    "mean_of_empty_axes": Case([op("ReduceMean", "x,a")], {"a": ints()}),
    "mean_noop": Case([op("ReduceMean", "x", noop_with_empty_axes=1)]),
    "batch_norm": Case(
        [op("BatchNormalization", "x,g,b,m,v", training_mode=0)],
        {"g": floats(3), "b": floats(3), "m": floats(3), "v": np.abs(floats(3)) + 0.5},
    ),
    "scatter_nd": Case(
        [op("ScatterND", "x,i,u", reduction="none")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}
    ),
    "resize": Case(
        [op("Resize", "x,,s", mode="nearest", antialias=0, keep_aspect_ratio_policy="stretch")],
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "gelu": Case(gelu(), GELU),
    "gelu_swapped": Case(gelu(swap=True, half_last=True), GELU),
    "products_that_are_no_gelu": Case(
        [op("Mul", "x,half", "h"), op("Mul", "h,x", "m"), op("Mul", "x,m")], {"half": GELU["half"]}
    ),
}  # fmt: skip
CASES |= {
    f"reduce_{kind.lower()}": Case([op(f"Reduce{kind}", "p,a")], {"a": ints(1, 3)})
    for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "LogSum", "SumSquare", "Sum")
}
for _name, _case in list(CASES.items()):
    if _name.startswith("reduce_"):  # a logarithm of a sum wants positive numbers
        _case.nodes.insert(0, op("Abs", "x", "p"))


@pytest.mark.parametrize("name", CASES)
def test_rule_keeps_the_values(name: str) -> None:
    case = CASES[name]
    before = model_of(case)
    after = lowered(before)
    x = 3 * floats(*case.shape)
    for expected, found in zip(run(before, x), run(after, x), strict=True):
        assert expected.shape == found.shape and expected.dtype == found.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert set(case.has) <= set(kinds(after))
    assert not set(case.lacks) & set(kinds(after))


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("name", ["layer_norm"])
def test_layer_norm_is_fused_again(name: str, opset: int, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "optimized.onnx"
    after = lowered(model_of(case), opset)
    x = floats(*case.shape)
    found = run(after, x, path)[0]
    np.testing.assert_allclose(found, run(model_of(case), x)[0], rtol=1e-4, atol=1e-5)
    assert kinds(onnx.load(str(path))) == ["LayerNormalization"]


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("name", ["gelu", "gelu_swapped"])
def test_gelu_is_fused_only_in_the_order_it_is_brought_to(name: str, opset: int, tmp_path: Path) -> None:
    before, path = model_of(CASES[name]), tmp_path / "optimized.onnx"
    x = floats(*IMAGE)
    run(before, x, path)
    assert "Gelu" not in kinds(onnx.load(str(path)))
    found = run(lowered(before, opset), x, path)[0]
    assert kinds(onnx.load(str(path))) == ["Gelu"]
    exact = np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x.astype(float))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("opset", [18, 21])
def test_from_18_on_only_the_rules_of_the_runtime_apply(opset: int) -> None:
    nodes = [op("LayerNormalization", "x,g", "n"), op("ReduceMean", "n,a")]
    after = lowered(model_of(Case(nodes, {**GAMMA, "a": ints(2, 3)})), opset)
    assert kinds(after) == ["LayerNormalization", "GlobalAveragePool"]


def test_axis_of_a_rank_0_scale_is_left_out_and_that_of_channels_kept() -> None:
    constants: dict[str, NDArray[Any]] = {
        "s": np.array(0.1, np.float32), "z": np.array(3, np.uint8),
        "w": RNG.integers(-127, 128, (3, 4)).astype(np.int8), "ws": np.abs(floats(3)), "wz": np.zeros(3, np.int8),
    }  # fmt: skip
    nodes = [
        op("QuantizeLinear", "x,s,z", "q", axis=1), op("DequantizeLinear", "q,s,z", "d", axis=0),
        op("DequantizeLinear", "w,ws,wz", "dw", axis=0), op("MatMul", "d,dw"),
    ]  # fmt: skip
    before = model_of(Case(nodes, constants, shape=(2, 3)))
    after = lowered(before)
    axes = [[a.i for a in node.attribute if a.name == "axis"] for node in after.graph.node]
    assert axes == [[], [], [0], []]
    x = floats(2, 3)
    np.testing.assert_array_equal(run(after, x)[0], run(before, x)[0])


# The first opset in which the case's own form is legal, by the changelog of the ONNX specification.
SINCE: dict[str, int] = {
    "layer_norm": 17, "layer_norm_axis": 17, "hard_swish": 14, "shape_start": 15, "shape_end": 15,
    "reshape_allowzero": 14, "scatter_nd": 16, "split_even": 18, "pad_axes": 18,
    "mean_of_one_axis": 18, "mean_noop": 18, "resize": 18,
    **{name: 18 for name in CASES if name.startswith("reduce_") and name != "reduce_sum"},
    "reduce_sum": 13, "split_sizes": 13, "pad_plain": 13, "reshape_zero_copies": 13,
}  # fmt: skip


@pytest.mark.parametrize("opset", range(13, 19))
@pytest.mark.parametrize("name", SINCE)
def test_a_form_is_rewritten_below_the_opset_that_brought_it_and_kept_from_there_on(
    name: str, opset: int
) -> None:
    case = CASES[name]
    before, x = model_of(case), 3 * floats(*case.shape)
    after = lowered(before, opset)
    kept = list(after.graph.node) == list(before.graph.node)
    assert kept is (opset >= SINCE[name])
    for expected, found in zip(run(before, x), run(after, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Case, str]] = {
    "reduce_unknown_axes": (
        Case([op("Shape", "x", "a"), op("ReduceMax", "x,a", "y")]), "reduces over axes that are not constant"
    ),
    "split_unknown_length": (Case([op("Split", "x", "y0,y1", axis=0, num_outputs=2)]), "axis of unknown length"),
    "scatter_add": (
        Case([op("ScatterND", "x,i,u", reduction="add")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}),
        "reduces while it scatters",
    ),
    "scatter_max": (
        Case([op("ScatterND", "x,i,u", reduction="max")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}),
        "takes the max while it scatters",
    ),
    "trilu": (Case([op("Trilu")]), "has no form there: this Trilu"),
    "grid_sample": (Case([op("GridSample", "x,g")], {"g": floats(2, 5, 7, 2)}), "has no form there: this GridSample"),
    "group_norm": (
        Case([op("GroupNormalization", "x,g,g", num_groups=3)], {"g": floats(3)}), "this GroupNormalization"
    ),
    "pool_ceil": (Case([op("LpPool", kernel_shape=[2, 2], ceil_mode=1)]), "this LpPool"),
    "resize_antialias": (
        Case([op("Resize", "x,,s", mode="linear", antialias=1)], {"s": np.array([1, 1, 0.5, 0.5], np.float32)}),
        "antialias",
    ),
    "pad_unknown": (Case([op("Shape", "x", "p"), op("Pad", "x,p,,a", "y")], {"a": ints(2, 3)}), "not constant"),
    "reshape_empty": (Case([op("Reshape", "x,s", allowzero=1)], {"s": ints(0, 4)}, shape=(0, 7)), "empty tensor"),
}  # fmt: skip


# Each of `REFUSED`, and operators that no rule knows, with the lowest opset that has the form.
NEEDS: dict[str, int] = {
    "reduce_unknown_axes": 18, "split_unknown_length": 18, "scatter_add": 16, "scatter_max": 18, "resize_antialias": 18,
    "pad_unknown": 18, "reshape_empty": 14, "trilu": 14, "grid_sample": 16, "group_norm": 18, "pool_ceil": 18,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_opset_cannot_say_is_refused_with_the_node_and_the_opset_that_can(name: str) -> None:
    case, reason = REFUSED[name]
    case.nodes[-1].name = "here/Op"
    graph = helper.make_graph(
        case.nodes,
        "case",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *case.shape[1:]])],
        [onnx.ValueInfoProto(name=name) for name in case.nodes[-1].output],
        [numpy_helper.from_array(value, name) for name, value in case.constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    for opset in range(13, NEEDS[name]):
        said = rf"export\.opset={opset}: here/Op .*{reason}.* needs opset {NEEDS[name]}$"
        with pytest.raises(ValueError, match=said):
            lower(ir.from_proto(proto), opset)
    model = ir.from_proto(proto)
    lower(model, NEEDS[name])
    assert [node.op_type for node in model.graph] == [node.op_type for node in case.nodes]
