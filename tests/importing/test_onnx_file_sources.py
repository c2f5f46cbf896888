"""Tests of train.py with a float ONNX file and audio files or random samples, up to a verified bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from onnx import helper
from onnx_models import FLOAT, Array, save, sqnr
from sounds import wav

from qatkit_verify.bundle.manifest import read_manifest
from qatkit_verify.command import main

SETTINGS = (
    "recipe=onnx_ptq", "data.workers=0", "calibration=moving_average", "calibration.batch_size=8",
    "calibration.images=40", "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false",
    "export.bundle=true", "export.golden_images=3",
)  # fmt: skip


def _train(folder: Path, *settings: str) -> str:
    done = run_script("train.py", *SETTINGS, f"output_dir={folder / 'run'}", *settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def _file(path: Path, inputs: dict[str, tuple[int, Sequence[int | str]]]) -> Path:
    """Writes a model that cuts its input `wave` into frames of 64 values and applies two Convs.

    If `inputs` has `ids`, it adds the mean of the table rows that these select.
    """
    draw = np.random.default_rng(3)
    constants: dict[str, Array] = {
        "flat": np.array([-1, 1, 64], np.int64),
        "filters": draw.normal(0, 0.3, (8, 1, 16)).astype(np.float32),
        "mixed": draw.normal(0, 0.2, (4, 8, 3)).astype(np.float32),
        "table": draw.normal(0, 0.1, (20, 4)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Reshape", ["wave", "flat"], ["frames"], "/Reshape"),
        helper.make_node("Conv", ["frames", "filters"], ["bands"], "/bands/Conv", strides=[4]),
        helper.make_node("Relu", ["bands"], ["levels"], "/Relu"),
        helper.make_node("Conv", ["levels", "mixed"], ["mix"], "/mix/Conv"),
        helper.make_node("ReduceMean", ["mix"], ["mean"], "/Mean", axes=[2], keepdims=0),
    ]
    if "ids" in inputs:
        nodes += [
            helper.make_node("Gather", ["table", "ids"], ["embedded"], "/Gather"),
            helper.make_node("ReduceMean", ["embedded"], ["chosen"], "/Chosen", axes=[1], keepdims=0),
            helper.make_node("Add", ["mean", "chosen"], ["features"], "/Add"),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["mean"], ["features"], "/Identity"))
    return save(path, nodes, inputs, ["features"], constants)


def test_a_file_is_quantized_from_flac_and_wav_files(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile, which writes FLAC, is not installed")
    file = _file(tmp_path / "wave.onnx", {"wave": (FLOAT, ["n", 1, 64])})
    draw, root = np.random.default_rng(1), tmp_path / "data"
    root.mkdir()
    sounds = [draw.normal(0, 0.2, 700).clip(-1, 1) for _ in range(8)]
    for index, sound in enumerate(sounds):
        kind = "FLAC" if index % 3 else "WAV"
        soundfile.write(str(root / f"{index}.{kind.lower()}"), sound, 8000, "PCM_16", format=kind)
    said = _train(
        tmp_path, f"onnx={file}", "data=audio", f"data.root={root}", "data.rate=8000", "data.hop=32"
    )
    assert (
        "4 audio files (0.3 s) for calibration and training, 4 audio files (0.3 s) for verification; frames of 64"
        in said
    )
    read = [soundfile.read(str(path), dtype="float32")[0] for path in sorted(root.iterdir())[1::2]]
    frames = np.concatenate([np.lib.stride_tricks.sliding_window_view(one, 64)[::32] for one in read])
    feeds = {"wave": frames[:, None]}
    (exact,) = ort.InferenceSession(str(file)).run(None, feeds)
    (found,) = ort.InferenceSession(str(tmp_path / "run" / "model.int8.onnx")).run(None, feeds)
    assert sqnr(exact, found) > 25
    bundle = tmp_path / "run" / "bundle"
    assert main([str(bundle), "--runs", "3", "--threads", "1", "--min-speedup", "0"]) == 0
    golden = np.load(bundle / "golden.npz")
    cut = {one.tobytes() for one in frames}
    runs = [golden[name] for name in golden.files if name.endswith("/wave")]
    assert runs and all(one.tobytes() in cut for run in runs for one in run.reshape(-1, 64))
    assert not read_manifest(bundle).drawn_data and "drawn" not in (bundle / "manifest.json").read_text()


def test_a_wave_without_a_batch_axis_is_taken_one_by_one(tmp_path: Path) -> None:
    file = _file(tmp_path / "wave.onnx", {"wave": (FLOAT, ["samples"])})
    noise = np.random.default_rng(2).normal(0, 5000, (4, 1000)).astype(np.int16)
    for index, sound in enumerate(noise):
        wav(tmp_path / "data" / f"{index}.wav", sound)
    _train(tmp_path, f"onnx={file}", "data=audio", f"data.root={tmp_path / 'data'}", "data.frame=64",
           "calibration.images=16", "export.bundle=false")  # fmt: skip
    frame = (noise[1, :64] / 2**15).astype(np.float32)
    exact, found = (
        ort.InferenceSession(str(one)).run(None, {"wave": frame})[0]
        for one in (file, tmp_path / "run" / "model.int8.onnx")
    )
    assert found.shape == (1, 4) and sqnr(exact, found) > 20


def test_a_file_is_quantized_from_drawn_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes: dict[str, tuple[int, Sequence[int | str]]] = {
        "wave": (FLOAT, ["n", "samples"]),
        "ids": (onnx.TensorProto.INT64, ["n", "tokens"]),
    }
    file = _file(tmp_path / "two.onnx", shapes)
    said = _train(tmp_path, f"onnx={file}", "data=drawn", "data.sizes={samples:64,tokens:5}", "data.count=40",
                  "data.ranges={wave:[-1,1]}")  # fmt: skip
    told = (
        "note: the data were drawn at random (data=drawn), so the ranges do not fit real data and no figure"
    )
    assert told in said
    assert "wave float32 [1, 64] -1..1 (data.ranges); ids int64 [1, 5] 0..19 (rows of the table" in said
    bundle = tmp_path / "run" / "bundle"
    assert json.loads((bundle / "manifest.json").read_text())["drawn_data"] is True
    assert main([str(bundle), "--runs", "3", "--threads", "1", "--min-speedup", "0"]) == 0
    assert "made with random data, so its answers say nothing about real data" in capsys.readouterr().out
    assert (
        "Ranges come from at most 40 random samples, not from real data." in (bundle / "card.md").read_text()
    )
    assert "drawn at random" in (tmp_path / "run" / "report.html").read_text()
    golden = np.load(bundle / "golden.npz")
    ids = np.concatenate([golden[name] for name in golden.files if name.endswith("/ids")])
    assert ids.shape == (3, 5) and ids.min() >= 0 and ids.max() < 20
