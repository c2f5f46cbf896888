"""Tests of preparing a graph for ONNX Runtime's optimizer, which would otherwise change its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qatkit.export.ort_fusions import for_onnxruntime
from qatkit_verify.installed import version_numbers


def two_pairs(opset: int = 13) -> onnx.ModelProto:
    """Returns a convolution after two consecutive Q/DQ pairs with different scales."""
    rng = np.random.default_rng(0)
    constants = {
        "fine": np.float32(0.013), "coarse": np.float32(0.05), "zero": np.uint8(117), "other": np.uint8(128),
        "weight": rng.integers(-64, 65, (4, 3, 1, 1)).astype(np.int8), "step": np.float32(0.04),
        "middle": np.int8(0),
    }  # fmt: skip
    nodes = [
        ("QuantizeLinear", ["x", "fine", "zero"], "a"), ("DequantizeLinear", ["a", "fine", "zero"], "b"),
        ("QuantizeLinear", ["b", "coarse", "other"], "c"), ("DequantizeLinear", ["c", "coarse", "other"], "d"),
        ("DequantizeLinear", ["weight", "step", "middle"], "w"), ("Conv", ["d", "w"], "e"),
        ("QuantizeLinear", ["e", "coarse", "other"], "f"), ("DequantizeLinear", ["f", "coarse", "other"], "y"),
    ]  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes],
        "two_pairs",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 16, 16])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def in_ort(model: onnx.ModelProto, x: Any) -> Any:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_two_pairs_in_a_row_stay_two() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)
    original = two_pairs()
    expected = next(
        iter(ReferenceEvaluator(two_pairs(19)).run(None, {"x": x}))
    )  # the evaluator lacks opset 13
    assert _share(in_ort(original, x), expected) > 0.5  # ONNX Runtime merges the two pairs
    model = ir.from_proto(original)
    for_onnxruntime(model, 13)
    # The rest are ties, which the integer kernel and float sums round differently.
    assert _share(in_ort(ir.to_proto(model), x), expected) < 0.02


def _share(found: Any, expected: Any) -> float:
    return float((np.abs(found - expected) > 1e-6).mean())


def test_zeros_before_a_max_pool_are_numbers() -> None:
    """ONNX Runtime before 1.32 merges the Pad into the MaxPool, which ignores padding.

    Maxima at the border are then negative instead of zero.
    """
    graph = helper.make_graph(
        [
            helper.make_node("Pad", ["x", "amounts"], ["padded"]),
            helper.make_node("MaxPool", ["padded"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
        ],
        "padded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 15, 15])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 8, 8])],
        [numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "amounts")],
    )
    original = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    x = -np.random.default_rng(2).random((2, 3, 15, 15)).astype(np.float32)
    expected = next(iter(ReferenceEvaluator(original).run(None, {"x": x})))
    wrong_by_itself = version_numbers(ort.__version__) < (1, 32)
    assert (_share(in_ort(original, x), expected) > 0.1) == wrong_by_itself
    model = ir.from_proto(original)
    for_onnxruntime(model, 13)
    np.testing.assert_array_equal(in_ort(ir.to_proto(model), x), expected)
