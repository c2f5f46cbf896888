"""Tests of the rows of docs/quark.md about NPUs, algorithms and choices; each row is run once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, drawn, run, save
from command_line import Launch, run_script
from quark_commands import Quark, commands
from quark_rows import activated, before, makers, nodes, pair_of, plain, runs

from qatkit.verify.sqnr import sqnr

_ALIGNED = """<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 3, 12, 12] x) => (float[batch, 14, 6, 6] y) {
  c1 = Conv (x, w, b)  c2 = Conv (x, v, b)
  p = MaxPool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (c1)
  q = AveragePool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (c2)  j = Concat <axis: int = 1> (p, q)
  t = Transpose <perm: ints = [0, 1, 3, 2]> (j)  low = Constant <value_ints: ints = [0]> ()
  high = Constant <value_ints: ints = [14]> ()  axis = Constant <value_ints: ints = [1]> ()
  s = Slice (t, low, high, axis)  k = Constant <value_ints: ints = [0, 0, 1, 1, 0, 0, 0, 0]> ()  g = Pad (s, k)
  e = Constant <value_ints: ints = [0, 14, 7, 7]> ()  h = Reshape (g, e)  c3 = Conv (h, u)  y = Conv (c3, f)
}"""
_WEIGHTS: Arrays = {
    "w": drawn(8, 3, 1, 1, seed=1), "v": drawn(8, 3, 1, 1, seed=2) * 4, "b": drawn(8, seed=3),
    "u": drawn(14, 14, 2, 2, seed=4) / 4, "f": drawn(14, 14, 1, 1, seed=5) / 4,
}  # fmt: skip


@pytest.fixture
def quark(request: pytest.FixtureRequest, launch: Launch, tmp_path: Path) -> Iterator[Quark]:
    yield from commands(request, launch, tmp_path)


def _power(scale: np.ndarray) -> float:
    """Returns the exponent of a scale that is a power of two."""
    exponent = np.log2(scale.astype(np.float64))
    assert (exponent % 1 == 0).all()
    return float(np.max(exponent))


def _result(model: onnx.ModelProto, node: onnx.NodeProto) -> float | None:
    """Returns the exponent of the scale of a node's result, after its activation; None if it stays float."""
    held = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    name = node.output[0]
    for _ in range(3):
        (reader, *_) = [one for one in model.graph.node if name in one.input] or [None]
        if reader is None:
            return None
        if reader.op_type == "QuantizeLinear":
            return _power(held[reader.input[1]])
        name = reader.output[0]
    return None


@runs("EnableNPUCnn", "NPULimitationCheck", "MaxLoopNum", "AdjustShiftCut", "AdjustShiftBias", "AdjustShiftRead",
      "AdjustShiftWrite", "AdjustHardSigmoid", "AdjustShiftSwish")  # fmt: skip
def test_shifts_are_within_their_bounds(quark: Quark, tmp_path: Path) -> None:
    model = quark.static(activated(tmp_path), "backend=npu_cnn")
    for kind in ("LeakyRelu", "PRelu", "Gelu"):
        assert before(model, kind) <= {"Conv", "InstanceNormalization"}
    for conv in nodes(model, "Conv"):
        x, weight, bias = (pair_of(model, conv, place) for place in range(3))
        assert weight[0].dtype == bias[0].dtype == np.int8
        product, out = _power(x[1]) + _power(weight[1]), _result(model, conv)
        assert out is not None and 0 <= out - product <= 16
        assert 0 <= _power(bias[1]) - product <= 15
    for add in nodes(model, "Add"):
        first, second = (_power(pair_of(model, add, place)[1]) for place in (0, 1))
        assert abs(first - second) <= 7
    (product,) = nodes(model, "Mul")
    first, second = (_power(pair_of(model, product, place)[1]) for place in (0, 1))
    out = _result(model, product)
    assert out is not None and 0 <= out - first - second <= 32
    (sigmoid,) = nodes(model, "HardSigmoid")
    assert _result(model, sigmoid) == -7 and -7 < _power(pair_of(model, sigmoid, 0)[1]) <= 0


@runs("AlignConcat", "AlignPool", "AlignPad", "AlignSlice", "AlignTranspose", "AlignReshape")
def test_operators_that_move_bytes_share_a_scale(quark: Quark, tmp_path: Path) -> None:
    model = quark.static(save(tmp_path / "aligned.onnx", _ALIGNED, _WEIGHTS), "backend=npu_cnn")
    (join,) = nodes(model, "Concat")
    shared = {float(pair_of(model, join, place)[1]) for place in (0, 1)}
    for kind in ("MaxPool", "AveragePool", "Transpose", "Slice", "Pad", "Reshape"):
        (node,) = nodes(model, kind)
        if makers(model)[node.input[0]].op_type == "DequantizeLinear":
            shared.add(float(pair_of(model, node, 0)[1]))
    last = nodes(model, "Conv")[2]
    assert shared == {float(pair_of(model, last, 0)[1])}


_STEPS = {
    "CLE": ("algorithm=equalize", "algorithm.equalize.rounds=50", "algorithm.equalize.tolerance=1e-3"),
    "BiasCorrection": ("algorithm=bias_correction", "algorithm.bias_correction.method=analytic"),
    "SmoothQuant": ("algorithm=smooth_quant", "algorithm.smooth_quant.strength=0.5"),
    "GPTQ": ("algorithm=gptq", "algorithm.gptq.damping=0.02"),
    "AdaRound": ("algorithm=adaround", "algorithm.adaround.steps=50", "algorithm.adaround.lr=0.05",
                 "algorithm.adaround.batch_size=8", "algorithm.adaround.images=16"),
    "AdaQuant": ("algorithm=block_reconstruction", "algorithm.block_reconstruction.steps=50",
                 "algorithm.block_reconstruction.bias_lr=1e-3", "algorithm.block_reconstruction.scale_lr=1e-4"),
}  # fmt: skip


@runs(*_STEPS, "AutoMixprecision", "QuantizationPreference")
def test_algorithms_change_what_they_should(quark: Quark, tmp_path: Path) -> None:
    source, float_types = plain(tmp_path), "calibration.mixed_scales=report"
    first = quark.static(source, float_types)
    x = drawn(64, 3, 12, 12, seed=30)
    (exact,), (rounded,) = run(source, {"x": x}), run(quark.file, {"x": x})
    for name, typed in _STEPS.items():
        model = quark.static(source, float_types, *typed)
        assert sqnr(exact, run(quark.file, {"x": x})[0]) > sqnr(exact, rounded) - 6, name
        weights, biases = ([pair_of(one, node, place)[0] for node in nodes(one, "Conv")] for one, place in
                           ((model, 1), (model, 2)))  # fmt: skip
        before_it = [[pair_of(first, node, place)[0] for node in nodes(first, "Conv")] for place in (1, 2)]
        same = [all(map(np.array_equal, *pair)) for pair in zip((weights, biases), before_it, strict=True)]
        assert not all(same), name
        assert same[0] == (name == "BiasCorrection"), name
    chosen = (
        "precision=auto",
        "target.max_drop=0.1",
        "calibration.images=64",
        "data.count=64",
        "precision.points=2",
    )
    quark.static(source, *chosen)
    report = json.loads((quark.file.parent / "report.json").read_text())
    assert report["precision"]["points"]


@runs("auto_search")
def test_a_search_tries_values_of_any_key(quark: Quark, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    typed = (
        "recipe=quickstart", "model.name=tiny_run.Net", "search=optuna", "search.trials=2",
        "search.space={calibration:[minmax,mse]}", "search.objectives=[accuracy]", "schedule=calibrate_only",
        "data.image_size=8", "data.workers=0", "calibration.images=64", "calibration.batch_size=32",
        "calibration.mixed_scales=report", "verify.parity_images=64", "verify.saturation_images=16", "verify.threads=1",
        "verify.latency_runs=2", "verify.examples=0", "verify.max_drop=null", "trainer=cpu",
        f"output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    quark.typed += typed
    done = run_script("train.py", *typed, cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parent)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "out").rglob("report.json"))) >= 2
