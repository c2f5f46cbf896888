"""Tests of weights in the files of each export mode: they match the float file's, or are reported by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from qatkit.export import ort_modes
from qatkit.export.for_ort_tools import prepared
from qatkit.export.levelled_filters import levelled, scaled_back
from qatkit.export.write_mode_file import exact_weights, wrong_weights
from qatkit.quant.backends import FBGEMM
from qatkit.verify.graph_view import constant

MODES = ("dynamic", "static", "float16", "weight_only")
HEAD = [
    helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
    helper.make_node("Flatten", ["p"], ["f"], "flatten"),
    helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
]


def uneven(*shape: int) -> NDArray[np.float64]:
    """Returns normally distributed filters whose standard deviations rise from 0.02 to 50."""
    values = np.random.default_rng(0).normal(size=shape)
    return values * np.geomspace(0.02, 50, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


def held(model: ir.Model, name: str) -> NDArray[Any]:
    values = constant(model.graph.initializers[name])
    assert values is not None
    return values


def after(path: Path, node: NodeProto, *more: NodeProto) -> Path:
    """Writes a file with two Convs and, between them, `node` and `more`, which compute "g" from "c"."""
    nodes = [
        helper.make_node("Conv", ["input", "w0", "b"], ["c"], "first", pads=[1, 1, 1, 1]),
        node,
        *more,
        helper.make_node("Conv", ["g", "w1"], ["r"], "second", pads=[1, 1, 1, 1]),
        *HEAD,
    ]
    draw = np.random.default_rng(1)
    weights = {
        "w0": draw.normal(size=(16, 3, 3, 3)),
        "b": draw.normal(size=16),
        "w1": uneven(16, 16, 3, 3),
        "fc": draw.normal(size=(10, 16)),
    }
    float_files.by_hand(path, nodes=nodes, weights=weights)
    model = onnx.load(str(path))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, str(path))
    return path


BEFORE = {
    "Gelu": [helper.make_node("Gelu", ["c"], ["g"], "gelu", domain="com.microsoft")],
    "QuickGelu": [helper.make_node("QuickGelu", ["c"], ["g"], "gelu", domain="com.microsoft", alpha=1.7)],
    "Gelu and Relu": [
        helper.make_node("Gelu", ["c"], ["e"], "gelu", domain="com.microsoft"),
        helper.make_node("Relu", ["e"], ["g"], "relu"),
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BEFORE)
def test_a_conv_after_an_operator_without_types(kind: str, mode: str, tmp_path: Path) -> None:
    source, target = after(tmp_path / "float.onnx", *BEFORE[kind]), tmp_path / "made.onnx"
    images = float_files.digits()[0][:200]
    if mode == "static":
        ort_modes.static(source, target, np.split(images, 4), FBGEMM)
    else:
        getattr(ort_modes, mode)(source, target)
    exact, found = float_files.logits(source, images), float_files.logits(target, images)
    error = np.square(found - exact).sum()
    assert 10 * np.log10(np.square(exact).sum() / error) > 25
    stored = [numpy_helper.to_array(one) for one in onnx.load(str(target)).graph.initializer]
    small = np.float16 if mode == "float16" else np.int8
    assert {value.dtype for value in stored if value.ndim == 4 and value.size > 16} == {np.dtype(small)}


def test_a_conv_that_the_tool_leaves_float_keeps_its_weights(tmp_path: Path) -> None:
    model = prepared(after(tmp_path / "float.onnx", *BEFORE["Gelu"]))
    exact = exact_weights(model)
    changed = levelled(model)
    assert set(changed) == {"w0", "w1"}
    assert (np.abs(held(model, "w1")).max((1, 2, 3)) == 1).all()
    scaled_back(model, changed)
    for name in changed:
        np.testing.assert_array_equal(held(model, name), exact[name].values)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_weight_is_named_with_its_operator(mode: str, tmp_path: Path) -> None:
    """One value of each weight in turn is changed by a few steps of its scale or by 1 %."""
    source, target = float_files.trained(), tmp_path / "made.onnx"
    if mode == "static":
        ort_modes.static(source, target, [float_files.digits()[0][:64]], FBGEMM)
    else:
        getattr(ort_modes, mode)(source, target)
    exact = exact_weights(prepared(source))
    made = ir.load(str(target))
    found = 0
    for name, one in exact.items():
        value = made.graph.initializers.get(f"{name}_quantized") or made.graph.initializers[name]
        right = value.const_value
        assert right is not None
        wrong = right.numpy().copy()
        step = np.asarray(3, wrong.dtype) if wrong.dtype.kind == "i" else wrong.flat[0] / np.float32(100)
        wrong.flat[0] = wrong.flat[0] + (-step if wrong.flat[0] > 0 else step)
        value.const_value = ir.tensor(wrong, name=value.name)
        (reason,) = wrong_weights(made, exact).values()
        assert reason.startswith(f"the weight '{name}' of '{one.node}' would be ")
        value.const_value = right
        assert wrong_weights(made, exact) == {}
        found += 1
    assert found == 5


def test_a_weight_that_went_missing_is_named(tmp_path: Path) -> None:
    exact = exact_weights(prepared(float_files.trained()))
    empty = prepared(float_files.by_hand(tmp_path / "other.onnx"))
    reasons = wrong_weights(empty, exact)
    assert set(reasons) == set(exact)
    assert all(
        reason.startswith(f"the file would lack the weight '{one}' of ") for one, reason in reasons.items()
    )
