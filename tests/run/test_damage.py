"""Tests that a file with one flipped bit is refused by name, when a run resumes or an export reads it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import calibrate_only, tiny

from qatkit.config.schema import Config, DataConfig, VerifyConfig
from qatkit.jobs import export_checkpoint, pipeline, quantize_file
from qatkit_verify.errors import ConfigError

BITS = 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with float training, fine-tuning and a cache of ranges."""
    folder = tmp_path_factory.mktemp("damage")
    config = tiny(folder / "run")
    config.calibration.cache = str(folder / "ranges.safetensors")
    assert pipeline.train(config) == 0
    return folder


def _resumed(folder: Path) -> Config:
    config = tiny(folder / "run")
    return replace(config, resume=str(folder / "run" / "last.ckpt"))


def resume(folder: Path) -> None:
    pipeline.train(_resumed(folder))


def export(folder: Path) -> None:
    config = replace(
        tiny(folder / "run"), checkpoint=str(folder / "run" / "last.ckpt"), output_dir=str(folder / "new")
    )
    export_checkpoint.export(config)


def calibrated(folder: Path) -> None:
    config = calibrate_only(folder / "new")
    config.model.checkpoint = str(folder / "run" / "float.ckpt")
    config.calibration.cache = str(folder / "ranges.safetensors")
    pipeline.train(config)


def quantized(folder: Path) -> None:
    data = DataConfig(image_size=8, workers=0)
    verify, onnx = VerifyConfig(latency_runs=3, threads=1), str(folder / "run" / "model.float.onnx")
    quantize_file.quantize(
        Config(onnx=onnx, mode="dynamic", data=data, output_dir=str(folder / "new"), verify=verify)
    )


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("run/last.ckpt", resume),
        ("run/last.ckpt", export),
        ("run/float.ckpt", resume),
        pytest.param("ranges.safetensors", calibrated, marks=pytest.mark.slow),
        ("run/model.float.onnx", quantized),
    ],
    ids=["resumed", "exported", "float model resumed", "cache", "float file"],
)
def test_a_flipped_bit_is_refused_with_the_files_name(
    name: str, use: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "run" / "report.json").rename(folder / "report.json") if use is resume else None
    path = folder / name
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), BITS).tolist():
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ConfigError, match=path.name):
            use(folder)
        assert not (folder / "new").exists()
