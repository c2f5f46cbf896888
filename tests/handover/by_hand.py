"""A bundle as its format says, put together by NumPy and ONNX Runtime from a run of seconds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tiny_run import calibrate_only

from qatkit.data.preprocessing import Preprocessing
from qatkit.handover.javascript import write_javascript
from qatkit.run import pipeline

IMAGES = 6


def digits_run(folder: Path) -> Path:
    """A finished run on digits of 8 x 8 pixels that the model sees at 16 x 16."""
    config = calibrate_only(folder)
    config.data.image_size = 16
    config.verify.parity_images = 32
    pipeline.train(config)
    return folder


def bundle_of(run: Path, folder: Path) -> Path:
    """model.onnx, float.onnx, preprocess.json, labels.txt, golden.npz and javascript/, without a manifest."""
    folder.mkdir()
    for name, source in (("model.onnx", "model.int8.onnx"), ("float.onnx", "model.float.onnx")):
        (folder / name).write_bytes((run / source).read_bytes())
    about = json.loads((run / "model.json").read_text())
    (folder / "labels.txt").write_text("".join(f"digit {one}\n" for one in about["classes"]))
    write_javascript(folder)
    sessions = {way: _session(folder / "model.onnx", way) for way in ("off", "on")}
    (taken,), (given,) = sessions["on"].get_inputs(), sessions["on"].get_outputs()
    prepare = {"format": 1, **about["preprocessing"]} | {
        "input": {"name": taken.name, "dtype": "float32", "shape": ["N", *taken.shape[1:]]},
        "output": {"name": given.name, "dtype": "float32", "shape": ["N", *given.shape[1:]]},
    }
    (folder / "preprocess.json").write_text(json.dumps(prepare))
    _write_golden(folder, sessions, prepare)
    return folder


def write_manifest(folder: Path) -> None:
    """manifest.json of every file that is there."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [
        {"name": name, "size": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
        for name in names
    ]
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "name": "digits", "files": files}))


def golden_digits() -> list[NDArray[np.uint8]]:
    """Pictures in colour, since a browser and Pillow then read the same bytes: uint8 [8, 8, 3]."""
    grey = np.round(load_digits().images[:IMAGES] * (255 / 16)).astype(np.uint8)
    return [np.repeat(image[..., None], 3, axis=2) for image in grey]


def _write_golden(folder: Path, sessions: dict[str, Any], prepare: dict[str, Any]) -> None:
    wanted = {key: prepare[key] for key in ("image_size", "resize", "mean", "std", "interpolation")}
    pictures = golden_digits()
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in pictures]
    batch = Preprocessing.from_dict(wanted).eval_batch(tensors).numpy()
    taken, given = prepare["input"]["name"], prepare["output"]["name"]
    found = {way: session.run([given], {taken: batch})[0] for way, session in sessions.items()}
    arrays = {f"pixels_{i}": image for i, image in enumerate(pictures)}
    arrays |= {f"input:{taken}": batch} | {f"{way}:{given}": scores for way, scores in found.items()}
    arrays |= {f"step:{given}": np.float64(np.ptp(found["on"]) / 255), "tolerance": np.float64(1.0)}
    np.savez(folder / "golden.npz", allow_pickle=False, **arrays)


def _session(path: Path, way: str) -> Any:
    options = ort.SessionOptions()
    if way == "off":
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
