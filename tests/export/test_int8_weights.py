"""Tests of int8 weights for operators that multiply in float: scales, outputs and file size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qatkit.export import ort_modes
from qatkit.jobs import quantize_file
from qatkit.quant.backends import FBGEMM

Array = NDArray[np.float32]
IMAGES = np.random.default_rng(5).normal(size=(64, 3, 8, 8)).astype(np.float32)


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def uneven(count: int) -> Array:
    return np.random.default_rng(9).permutation(np.geomspace(0.003, 3, count)).astype(np.float32)


def node(kind: str, inputs: str, output: str, **settings: Any) -> NodeProto:
    return helper.make_node(kind, inputs.split(), output.split(), f"{kind}_{output.split()[0]}", **settings)


def write(
    path: Path, nodes: list[NodeProto], weights: dict[str, Any], shape: list[Any] | None = None
) -> Path:
    """Writes a model from "input" [N, 3, 8, 8] to "output", which has the shape `shape` (None: unknown)."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


def sqnr(source: Path, target: Path, axis: int = 1) -> float:
    """Returns the SQNR in dB of the worst channel along `axis` of the output."""
    exact, found = (float_files.logits(path, IMAGES) for path in (source, target))
    others = tuple(one for one in range(exact.ndim) if one != axis)
    signal, noise = np.square(exact).sum(others), np.square(found - exact).sum(others)
    return float(10 * np.log10(signal / np.maximum(noise, 1e-30)).min())


def integers(path: Path) -> dict[str, NDArray[Any]]:
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}
    return {name: value for name, value in held.items() if value.dtype == np.int8 and value.ndim > 1}


def up(groups: int, outputs: int) -> Callable[[Path], Path]:
    """Returns the writer of a Conv and a ConvTranspose whose output channels differ 1,000-fold in range."""
    weight = drawn(12, outputs // groups, 4, 4)
    ranges = uneven(outputs).reshape(groups, outputs // groups)
    weight *= np.repeat(ranges, 12 // groups, axis=0)[:, :, None, None]
    nodes = [
        node("Conv", "input w", "c", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "c up", "output", group=groups, strides=[2, 2]),
    ]
    return lambda path: write(path, nodes, {"w": drawn(12, 3, 3, 3), "up": weight})


def gemm(transposed: int) -> Callable[[Path], Path]:
    weight = drawn(192, 24) * uneven(24)
    nodes = [node("Flatten", "input", "f"), node("Gemm", "f w", "output", transB=transposed)]
    return lambda path: write(path, nodes, {"w": weight.T.copy() if transposed else weight})


def stack(first: bool) -> Callable[[Path], Path]:
    """Returns the writer of a MatMul with 3 matrices on the right (on the left if `first`).

    Their columns (rows if `first`) differ in range.
    """
    weight = drawn(3, 8, 24) * uneven(72).reshape(3, 1, 24)
    turned = node("Transpose", "m", "t", perm=[0, 1, 2, 3] if first else [0, 1, 3, 2])
    nodes = [node("MatMul", "w input" if first else "input w", "m"), turned, node("Reshape", "t s", "output")]
    held = {"w": weight.transpose(0, 2, 1).copy() if first else weight, "s": np.array([0, 72, -1], np.int64)}
    return lambda path: write(path, nodes, held)


def behind(kind: str) -> Callable[[Path], Path]:
    """Returns the writer of a Conv whose weight passes through an operator that moves or casts values."""
    weight = drawn(16, 3, 3, 3) * uneven(16)[:, None, None, None]
    forms: dict[str, tuple[NDArray[Any], dict[str, Any]]] = {
        "Transpose": (weight.transpose(1, 2, 3, 0).copy(), {"perm": [3, 0, 1, 2]}),
        "Identity": (weight, {}),
        "Reshape": (weight.reshape(16, 27), {}),
        "Cast": (weight.astype(np.float64), {"to": TensorProto.FLOAT}),
    }
    held, settings = forms[kind]
    more = {"Reshape": {"s": np.array([16, 3, 3, 3], np.int64)}}.get(kind, {})
    moved = node(kind, " ".join(["w", *more]), "v", **settings)
    return lambda path: write(path, [moved, node("Conv", "input v", "output")], {"w": held, **more})


def constant(path: Path) -> Path:
    tensor = numpy_helper.from_array(drawn(16, 3, 3, 3) * uneven(16)[:, None, None, None], "w")
    return write(path, [node("Constant", "", "w", value=tensor), node("Conv", "input w", "output")], {})


CASES: dict[str, Callable[[Path], Path]] = {
    **{f"up, {g} groups, {n} channels": up(g, n) for g, n in [(1, 8), (12, 12), (12, 24), (4, 8), (2, 2), (3, 12)]},
    "Gemm by rows": gemm(1),
    "Gemm by columns": gemm(0),
    "matrices": stack(False),
    "matrices that come first": stack(True),
    **{f"Conv behind {kind}": behind(kind) for kind in ("Transpose", "Identity", "Reshape", "Cast")},
    "Conv behind Constant": constant,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_output_channel_is_near_float(case: str, tmp_path: Path) -> None:
    """Weights drawn from a normal distribution reach 38 dB with 8 bits and a scale per channel.

    With a per-tensor scale, the channels with small ranges would be below 0 dB.
    """
    source, target = CASES[case](tmp_path / "float.onnx"), tmp_path / "made.onnx"
    ort_modes.weight_only(source, target)
    assert sqnr(source, target) > 36
    floats = sum(numpy_helper.to_array(one).size for one in onnx.load(str(source)).graph.initializer)
    assert (
        sum(value.size for value in integers(target).values()) >= 0.9 * floats
        or case == "Conv behind Constant"
    )
    options = {"session.disable_quant_qdq": "1"}
    np.testing.assert_allclose(
        float_files.logits(target, IMAGES, entries=options), float_files.logits(target, IMAGES, optimize=False),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
SIZE = 48


def recurrent(path: Path, kind: str, *, both: bool) -> Path:
    """Writes a file of a recurrent operator over image rows and a Gemm.

    The rows of the recurrent weights differ in range.
    """
    directions, rows = 1 + both, GATES[kind] * SIZE
    ranges = uneven(rows)[None, :, None] + np.float32(0.05)
    weights = {
        "w": drawn(directions, rows, 24) * ranges / 2,
        "r": drawn(directions, rows, SIZE) * ranges / 8,
        "b": drawn(directions, 2 * rows) / 4,
        "fc": drawn(10, directions * SIZE),
        "shape": np.array([0, 8, -1], np.int64),
        "ends": np.array([0, -1], np.int64),
    }
    settings: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    nodes = [
        node("Transpose", "input", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t shape", "s"),
        node("Transpose", "s", "x", perm=[1, 0, 2]),
        helper.make_node(kind, ["x", "w", "r", "b"], ["", "last"], "rnn", hidden_size=SIZE,
                         direction="bidirectional" if both else "forward", **settings),
        node("Transpose", "last", "turned", perm=[1, 0, 2]),
        node("Reshape", "turned ends", "f"),
        node("Gemm", "f fc", "output", transB=1),
    ]  # fmt: skip
    return write(path, nodes, weights)


@pytest.mark.parametrize("mode", ["weight_only", "dynamic", "static"])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("kind", GATES)
def test_recurrent_weights_are_int8_by_row(kind: str, both: bool, mode: str, tmp_path: Path) -> None:
    source, target = recurrent(tmp_path / "float.onnx", kind, both=both), tmp_path / "made.onnx"
    if mode == "static":
        ort_modes.static(source, target, [IMAGES], FBGEMM)
    else:
        getattr(ort_modes, mode)(source, target)
    assert target.stat().st_size < 0.38 * source.stat().st_size
    assert sqnr(source, target) > 24
    graph = onnx.load(str(target)).graph
    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    makers = {one.output[0]: one for one in graph.node}
    layer = next(one for one in graph.node if one.op_type == kind)
    floats = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(source)).graph.initializer}
    for name, place in (("w", 1), ("r", 2)):
        product = makers[layer.input[place]]
        cast = makers[product.input[0]]
        assert (product.op_type, cast.op_type) == ("Mul", "Cast")
        scale = np.abs(floats[name]).max(2, keepdims=True) / np.float32(127)
        np.testing.assert_array_equal(held[product.input[1]], scale)
        np.testing.assert_array_equal(held[cast.input[0]], np.rint(floats[name] / scale).astype(np.int8))


@pytest.mark.parametrize("mode", ["weight_only", "dynamic", "static", "float16"])
def test_a_file_of_nothing_but_an_lstm_is_quantized(mode: str, tmp_path: Path) -> None:
    nodes = [
        node("Reshape", "input shape", "x"),
        helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], "rnn", hidden_size=10),
        node("Squeeze", "last axis", "output"),
    ]
    weights: dict[str, Any] = {
        "w": drawn(1, 40, 192) / 9,
        "r": drawn(1, 40, 10),
        "axis": np.array([0], np.int64),
    }
    weights |= {"shape": np.array([1, -1, 192], np.int64)}
    source = write(tmp_path / "float.onnx", nodes, weights, ["N", 10])
    config = float_files.settings(source, mode, tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    made = tmp_path / "run" / f"model.{mode}.onnx"
    assert made.stat().st_size < (0.6 if mode == "float16" else 0.4) * source.stat().st_size


def test_recurrent_weights_are_computed_at_load(tmp_path: Path) -> None:
    target = tmp_path / "made.onnx"
    ort_modes.weight_only(recurrent(tmp_path / "float.onnx", "LSTM", both=True), target)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    ort.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
    kinds = [one.op_type for one in onnx.load(str(tmp_path / "run.onnx")).graph.node]
    assert "LSTM" in kinds and not {"Cast", "Mul"}.intersection(kinds)


def test_weights_that_int8_would_enlarge_stay_float(tmp_path: Path) -> None:
    """A row of one int8 value and its scale takes 5 bytes, one more than the float itself."""
    nodes = [node("Conv", "input w", "c", group=3), node("Conv", "c v", "output")]
    weights = {"w": drawn(3, 1, 1, 1), "v": drawn(16, 3, 3, 3)}
    target = tmp_path / "made.onnx"
    ort_modes.weight_only(write(tmp_path / "float.onnx", nodes, weights), target)
    assert {value.shape for value in integers(target).values()} == {(16, 3, 3, 3)}
