"""Tests of reading model.json back, and of finding the checkpoint of the last stage."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import last_checkpoint, model_json, write_model_json

PREPROCESSING = {
    "channels": 3,
    "image_size": 32,
    "resize": 36,
    "mean": [0.5, 0.5, 0.25],
    "std": [0.5, 0.5, 0.125],
    "interpolation": "bicubic",
    "upright": True,
}


def test_model_json_reads_back(tmp_path: Path) -> None:
    write_model_json(tmp_path, model_json(PREPROCESSING, ("cat", "dog")) | {"output": {"dtype": "uint8"}})

    assert os.listdir(tmp_path) == ["model.json"]
    text = (tmp_path / "model.json").read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {
        "preprocessing": PREPROCESSING,
        "classes": ["cat", "dog"],
        "output": {"dtype": "uint8"},
    }
    assert preprocessing_beside(tmp_path / "model.int8.onnx") == PREPROCESSING


def test_one_of_before_pictures_were_turned_reads_back(tmp_path: Path) -> None:
    older = {key: value for key, value in PREPROCESSING.items() if key != "upright"}
    write_model_json(tmp_path, model_json(older, ()))
    assert preprocessing_beside(tmp_path / "model.onnx") == older


def test_a_file_alone_has_nothing_beside_it(tmp_path: Path) -> None:
    assert preprocessing_beside(tmp_path / "model.onnx") is None


def test_the_last_stage_is_the_one_that_trains_last(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for name in ("float.ckpt", "last.ckpt", "control.ckpt"):
        (tmp_path / name).write_text("")
        assert last_checkpoint(tmp_path) == tmp_path / name
