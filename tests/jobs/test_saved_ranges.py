"""Tests of activation ranges that are saved for an ONNX file.

A second run restores them; with another file or other data, they are refused.
"""

from __future__ import annotations

from pathlib import Path

import float_files
import numpy as np
import pytest

from qatkit.config.schema import Config
from qatkit.jobs import quantize_file
from qatkit_verify.errors import ConfigError


def settings(source: Path, folder: Path, cache: Path) -> Config:
    """Returns the config of a static quantization with its ranges in `cache`."""
    config = float_files.settings(source, "static", folder)
    config.verify.max_drop = None
    config.calibration.cache = str(cache)
    return config


def test_a_given_file_takes_its_ranges_from_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, cache = float_files.by_hand(tmp_path / "file.onnx"), tmp_path / "ranges.safetensors"
    for name in ("first", "second"):
        assert quantize_file.quantize(settings(source, tmp_path / name, cache)) == 0
        said = capfd.readouterr()
        assert (f"ranges from {cache}" in said.out + said.err) == (name == "second")
    first, second = (tmp_path / name / "model.static.onnx" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    held = cache.read_bytes()

    other = settings(source, tmp_path / "images", cache)
    other.calibration.images //= 2
    with pytest.raises(
        ConfigError, match=r"^calibration.cache=.*: the file is from another model, data or settings"
    ) as refused:
        quantize_file.quantize(other)
    assert "calibration.images" in str(refused.value)

    draw = np.random.default_rng(1)
    weights = {"w": (16, 3, 3, 3), "b": (16,), "fc": (10, 16)}
    drawn = {name: draw.normal(size=shape) for name, shape in weights.items()}
    another = float_files.by_hand(tmp_path / "other.onnx", weights=drawn)
    with pytest.raises(ConfigError, match=r"^calibration.cache=.*\(model is [0-9a-f]{16}, not "):
        quantize_file.quantize(settings(another, tmp_path / "model", cache))
    assert cache.read_bytes() == held
