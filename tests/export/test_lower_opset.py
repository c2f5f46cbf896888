"""Tests of the rules that rewrite graphs of opset 18 for lower opsets without changing their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common
from opset_cases import CASES, GAMMA, IMAGE, NEEDS, REFUSED, RNG, SINCE, Case, floats, ints, op
from torch import Tensor
from torch.nn import functional as F

from qatkit.export.lower_opset import lower
from qatkit.export.ort_fusions import for_onnxruntime

Arrays = Mapping[str, NDArray[Any]]


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
    common.RemoveUnusedNodesPass()(model)  # as in an export
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


# PyTorch's results for forms that ONNX Runtime before 1.24, 1.27 or 1.29 computes wrongly or not at all.
BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "mean_noop": lambda x: x,
    "resize_axes_to": lambda x: F.interpolate(x, (9, 4), mode="bilinear"),
    "average_up_padded": lambda x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)), 3, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_keeps_the_values(name: str) -> None:
    case = CASES[name]
    before = model_of(case)
    after = lowered(before)
    x = 3 * floats(*case.shape)
    by_torch = BY_TORCH.get(name)
    wanted = run(before, x) if by_torch is None else [by_torch(torch.from_numpy(x)).numpy()]
    for expected, found in zip(wanted, run(after, x), strict=True):
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


def test_axis_is_dropped_for_scalar_scales_and_kept_for_channels() -> None:
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


@pytest.mark.parametrize("opset", range(13, 19))
@pytest.mark.parametrize("name", SINCE)
def test_forms_are_rewritten_only_below_the_opset_that_adds_them(name: str, opset: int) -> None:
    case = CASES[name]
    before, x = model_of(case), 3 * floats(*case.shape)
    after = lowered(before, opset)
    kept = list(after.graph.node) == list(before.graph.node)
    assert kept is (opset >= SINCE[name])
    for expected, found in zip(run(before, x), run(after, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_beyond_the_opset_is_refused_with_node_and_opset(name: str) -> None:
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
        said = rf"export\.opset={opset}: here/Op.*{reason}.* needs opset {NEEDS[name]} or higher$"
        with pytest.raises(ValueError, match=said):
            lower(ir.from_proto(proto), opset)
    model = ir.from_proto(proto)
    lower(model, NEEDS[name])
    assert [node.op_type for node in model.graph] == [node.op_type for node in case.nodes]


BATCH_FIRST = {"LSTM": (4, "y0,y1,y2"), "GRU": (3, "y0,y1"), "RNN": (1, "y0,y1")}


@pytest.mark.parametrize("kind", BATCH_FIRST)
def test_a_batch_first_layer_is_the_evaluators(kind: str) -> None:
    """ONNX Runtime has no kernel for layout 1, so onnx's reference evaluator gives the expected values."""
    gates, outputs = BATCH_FIRST[kind]
    shapes = {"w": (1, gates * 4, 7), "r": (1, gates * 4, 4), "b": (1, gates * 8), "h": (2, 1, 4)}
    node = op(kind, "x,w,r,b,,h", outputs, hidden_size=4, layout=1)
    before = model_of(
        Case([node], {name: 0.5 * floats(*shape) for name, shape in shapes.items()}, shape=(2, 5, 7))
    )
    x = floats(2, 5, 7)
    expected = ReferenceEvaluator(before).run(None, {"x": x})
    for found, wanted in zip(run(lowered(before), x), expected, strict=False):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_groups_are_normed_as_the_specification_says() -> None:
    """NumPy is the reference: ONNX Runtime has no kernel for opset 18's form, with a scale per group."""
    case = Case(
        [op("GroupNormalization", "x,g,b", num_groups=3)], {"g": floats(3), "b": floats(3)}, (2, 6, 5, 7)
    )
    x = floats(*case.shape)
    grouped = x.reshape(2, 3, -1).astype(float)
    normed = (grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)
    expected = (normed * case.constants["g"][:, None] + case.constants["b"][:, None]).reshape(x.shape)
    before = model_of(case)
    before.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, case.shape))
    np.testing.assert_allclose(run(lowered(before), x)[0], expected, rtol=1e-4, atol=1e-5)


def branching(*nodes: NodeProto) -> onnx.ModelProto:
    """Returns a model with an If: one branch runs `nodes`, from "x" to "z", the other one negates "x"."""
    made = onnx.ValueInfoProto(name="z")
    negative = onnx.ValueInfoProto(name="n")
    then = helper.make_graph(list(nodes), "then", [], [made])
    other = helper.make_graph([op("Neg", "x", "n")], "else", [], [negative])
    condition = [op("ReduceMax", "x", "m", keepdims=0), op("Greater", "m,limit", "c")]
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other, name="here/If")
    return model_of(Case([*condition, branch], {"limit": np.array(1, np.float32)}))


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_the_branches_of_an_if_are_lowered_too(factor: float) -> None:
    before = branching(op("Mish", "x", "h"), op("Trilu", "h", "z"))
    x = factor * np.abs(floats(*IMAGE)) / 3
    np.testing.assert_allclose(run(lowered(before), x)[0], run(before, x)[0], rtol=1e-5, atol=1e-5)


def test_what_a_branch_cannot_say_is_refused() -> None:
    before = branching(helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
                       helper.make_node("BitwiseXor", ["i", "i"], ["j"], name="here/Op"),
                       helper.make_node("Cast", ["j"], ["z"], to=TensorProto.FLOAT))  # fmt: skip
    with pytest.raises(ValueError, match=r"export\.opset=13: here/Op.* needs opset 18 or higher$"):
        lower(ir.from_proto(before), 13)
