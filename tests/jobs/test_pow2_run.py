"""Tests of runs with `backend.scale_type` (pow2, float16, int16), and of what is refused with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_run import digits_test, logits, report_of, tiny, top

from qatkit.config.schema import BackendConfig, OverrideConfig
from qatkit.jobs import pipeline
from qatkit_verify.errors import ConfigError


def test_a_trained_file_has_powers_of_two_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", backend=BackendConfig(scale_type="pow2"))
    config.export.bundle = False
    assert pipeline.train(config) == 0
    reported, file = report_of(tmp_path / "run"), tmp_path / "run" / "model.int8.onnx"
    images, labels = digits_test()
    assert reported["accuracy"]["int8"]["top1"] == pytest.approx(
        top(logits(file, images), labels, 1), abs=1e-9
    )
    assert reported["parity"]["optimized"]["max_steps"] < 0.1
    graph = onnx.load(file).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    pairs = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(pairs) > 8
    assert all((np.frexp(constants[n.input[1]])[0] == 0.5).all() for n in pairs)


@pytest.mark.parametrize("kind", ["float16", "int16"])
def test_learned_scales_are_of_their_type(kind: str, tmp_path: Path) -> None:
    """Checks all scales except those of int32 biases, which are products of two scales."""
    config = tiny(tmp_path / "run", backend=BackendConfig(scale_type=kind))
    config.quantizer.activation = "qatkit.quant.learned.lsq.LSQFakeQuantize"
    config.quantizer.weight = "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
    config.export.bundle = False
    assert pipeline.train(config) == 0
    reported, file = report_of(tmp_path / "run"), tmp_path / "run" / "model.int8.onnx"
    images, labels = digits_test()
    assert reported["accuracy"]["int8"]["top1"] == pytest.approx(
        top(logits(file, images), labels, 1), abs=1e-9
    )
    assert reported["parity"]["optimized"]["max_steps"] < 0.1
    graph = onnx.load(file).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    found = []
    for node in graph.node:
        held = constants.get(node.input[0])
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and (
            held is None or held.dtype != np.int32
        ):
            found.append(constants[node.input[1]].astype(np.float64).reshape(-1))
    scales = np.concatenate(found)
    assert len(found) > 8 and len(set(scales)) > 8
    if kind == "float16":
        assert (scales.astype(np.float16) == scales).all()
    else:
        whole = np.frexp(scales)[0] * 2**15
        assert (whole == np.round(whole)).all()


@pytest.mark.parametrize("name", ["LSQFakeQuantize", "LSQWeightFakeQuantize"])
def test_learned_scales_are_refused(name: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", backend=BackendConfig(scale_type="pow2"))
    key = "weight" if "Weight" in name else "activation"
    setattr(config.quantizer, key, path := f"qatkit.quant.learned.lsq.{name}")
    with pytest.raises(ConfigError) as refused:
        pipeline.train(config)
    allowed = "expected a class that supports backend.scale_type=pow2"
    assert str(refused.value) == f"quantizer.{key}={path}: {allowed}"
    assert not (tmp_path / "run").exists()


def test_scales_that_can_be_no_powers_are_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", backend=BackendConfig(scale_type="pow2"))
    config.backend.overrides = {"fc": OverrideConfig(weight_scale_dtype="uint8")}
    with pytest.raises(
        ConfigError, match=r"^backend.overrides.fc.weight_scale_dtype=uint8: expected float32 or"
    ):
        pipeline.train(config)
    config.backend.overrides, config.export.io = {}, "uint8"
    with pytest.raises(ConfigError, match=r"^export.io=uint8: expected float32 with backend.scale_type=pow2"):
        pipeline.train(config)


def test_number_formats_are_refused(tmp_path: Path) -> None:
    target = "qatkit.quant.backends.SIMULATED"
    config = tiny(tmp_path / "run", backend=BackendConfig(target=target, scale_type="pow2"))
    with pytest.raises(ConfigError, match=r"^backend.scale_type=pow2: expected null with backend=simulated"):
        pipeline.train(config)
