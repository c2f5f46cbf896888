"""Tests of symmetric activations: zero points and scales in the files of modules and of given ONNX files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import pytest
from chain import Residual, noise, run_ort, run_torch, settle, ship, steps_off
from numpy.typing import NDArray
from onnx import numpy_helper
from tiny_run import tiny

from qatkit.config.schema import BackendConfig, Config, OverrideConfig
from qatkit.jobs import pipeline, quantize_file
from qatkit.run.backend import backend_of
from qatkit_verify.errors import ConfigError

# For each activation type: the zero points of signed tensors and of those after a ReLU, and the number of
# steps from zero to the largest value.
TYPES = {
    "uint8": ({128, 0}, 127),
    "int8": ({0}, 127),
    "uint16": ({32768, 0}, 32767),
    "int16": ({0}, 32767),
}


def quantizers(path: Path) -> dict[str, tuple[float, NDArray[Any]]]:
    """Returns the scale and zero point of each QuantizeLinear, by the name of its input."""
    graph = onnx.load(path).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    return {
        node.input[0]: (float(constants[node.input[1]]), constants[node.input[2]])
        for node in graph.node
        if node.op_type == "QuantizeLinear"
    }


@pytest.mark.parametrize("dtype", TYPES)
def test_zero_points_lie_in_the_middle(dtype: str) -> None:
    backend = backend_of(Config(backend=BackendConfig(activation_dtype=dtype, activation_symmetric=True)))
    model, images = settle(Residual(), 3, 12, 12), noise(8, 3, 12, 12)
    made = ship(model, images, f"symmetric_{dtype}", backend)
    found = quantizers(made.path)
    zeros, steps = TYPES[dtype]
    assert {int(zero) for _, zero in found.values()} == zeros
    assert {str(zero.dtype) for _, zero in found.values()} == {dtype}
    assert found["input"][0] == pytest.approx(float(images.abs().max()) / steps, rel=1e-6)
    answer = run_ort(made.path, images)
    assert steps_off(run_torch(model, images), answer) < 4
    np.testing.assert_allclose(answer, run_torch(made.converted, images), atol=1e-4)


def test_a_given_file_gets_symmetric_activations(tmp_path: Path) -> None:
    source, folder = float_files.by_hand(tmp_path / "file.onnx"), tmp_path / "run"
    config = float_files.settings(source, "static", folder)
    config.verify.max_drop = None
    config.backend = replace(
        config.backend,
        target="qatkit.quant.backends.QNNPACK",
        activation_symmetric=True,
    )
    assert quantize_file.quantize(config) == 0
    found = quantizers(folder / "model.static.onnx")
    assert len(found) > 3 and {(int(zero), str(zero.dtype)) for _, zero in found.values()} == {(0, "int8")}
    images = float_files.digits()[2]
    exact, int8 = (float_files.logits(path, images) for path in (source, folder / "model.static.onnx"))
    assert np.abs(int8 - exact).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            BackendConfig(target="qatkit.quant.backends.TENSORRT", activation_symmetric=False),
            "backend.activation_symmetric=false: expected null or true with",
        ),
        (
            BackendConfig(
                target="qatkit.quant.backends.TENSORRT",
                overrides={"fc": OverrideConfig(activation_symmetric=False)},
            ),
            "backend.overrides.fc.activation_symmetric=false: expected null or true with",
        ),
        (
            BackendConfig(target="qatkit.quant.backends.WEIGHT_ONLY", activation_symmetric=True),
            "backend.activation_symmetric=true: expected null with this backend, whose activations are float",
        ),
        (
            BackendConfig(target="qatkit.quant.backends.SIMULATED", activation_symmetric=True),
            "backend.activation_symmetric=true: expected null with backend=simulated",
        ),
    ],
)
def test_symmetry_that_a_target_lacks_is_refused(
    settings: BackendConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline.train(tiny(tmp_path / "run", backend=settings))
    assert str(refused.value).startswith(message)
    assert not (tmp_path / "run").exists()
