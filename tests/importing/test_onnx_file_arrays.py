"""Tests of train.py with a float ONNX file and samples from .npz files, which hold an array per input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from onnx import helper
from onnx_models import FLOAT, save, sqnr


def _two_inputs(path: Path) -> Path:
    """Writes a model from ids and a vector to probabilities."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"], "/embed/Gather"),
        helper.make_node("ReduceMean", ["embedded"], ["mean"], "/embed/Mean", axes=[1], keepdims=0),
        helper.make_node("MatMul", ["vector", "a"], ["projected"], "/vector/MatMul"),
        helper.make_node("Add", ["mean", "projected"], ["sum"], "/Add"),
        helper.make_node("Relu", ["sum"], ["relu"], "/Relu"),
        helper.make_node("MatMul", ["relu", "b"], ["logits"], "/head/MatMul"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], "/head/Softmax", axis=-1),
    ]
    shapes = {"table": (50, 32), "a": (16, 32), "b": (32, 4)}
    constants = {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    inputs = {"ids": (onnx.TensorProto.INT64, ["n", 6]), "vector": (FLOAT, ["n", 16])}
    return save(path, nodes, inputs, ["probabilities"], constants)


@pytest.mark.parametrize("recipe", ["onnx_ptq", "onnx_qat"])
def test_a_file_of_two_inputs_is_quantized_from_arrays(recipe: str, tmp_path: Path) -> None:
    file, root = _two_inputs(tmp_path / "two.onnx"), tmp_path / "data"
    root.mkdir()
    draw = np.random.default_rng(1)
    ids, vector = draw.integers(0, 50, (96, 6)), draw.normal(size=(96, 16)).astype(np.float32)
    np.savez(root / "all.npz", ids=ids, vector=vector)
    command = ["train.py", f"recipe={recipe}", f"onnx={file}", f"data.root={root}", "data.workers=0",
               f"output_dir={tmp_path / 'run'}", "calibration=moving_average", "calibration.batch_size=8",
               "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false",
               "trainer.accelerator=cpu"]  # fmt: skip
    done = run_script(*command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "same top-1 class" in done.stdout
    page = (tmp_path / "run" / "report.html").read_text().partition("</style>")[2]
    said = done.stdout + done.stderr + page
    assert "48 samples" in said and not re.findall(r".{30}(?<!\.)\bimages?\b.{30}", said)  # except in keys
    feeds = {"ids": ids[1::2], "vector": vector[1::2]}
    (exact,) = ort.InferenceSession(str(file)).run(None, feeds)
    (found,) = ort.InferenceSession(str(tmp_path / "run" / "model.int8.onnx")).run(None, feeds)
    assert (exact.argmax(1) == found.argmax(1)).mean() > 0.95 and sqnr(exact, found) > 25
    assert (tmp_path / "run" / "model.float.onnx").read_bytes() == file.read_bytes()
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    assert about["preprocessing"]["arrays"] == [
        {"name": "ids", "type": "int64", "shape": [None, 6], "batch_axis": 0},
        {"name": "vector", "type": "float32", "shape": [None, 16], "batch_axis": 0},
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ("train.py", "recipe=onnx_qat"),  # holds out one of the three
            [
                "data.batch_size=8: 2 is used instead, since there are 2 training samples",
                "calibration.batch_size=8: 2 is used instead, the number of training samples",
            ],
        ),
        (
            ("export.py", "mode=static", "data=arrays"),
            ["calibration.batch_size=8: 3 is used instead, the number of training samples"],
        ),
    ],
    ids=["train", "export"],
)
def test_few_samples_are_one_smaller_batch(
    command: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    file, root, draw = _two_inputs(tmp_path / "two.onnx"), tmp_path / "data", np.random.default_rng(1)
    root.mkdir()
    for index in range(6):  # three of them are for training and calibration
        ids, vector = draw.integers(0, 50, (1, 6)), draw.normal(size=(1, 16)).astype(np.float32)
        np.savez(root / f"{index}.npz", ids=ids, vector=vector)
    command = (*command, f"onnx={file}", f"data.root={root}", "data.workers=0", "verify.latency_runs=3",
               "verify.threads=1", "trainer.progress=false")  # fmt: skip
    done = run_script(*command, f"output_dir={tmp_path / 'run'}")
    assert (tmp_path / "run" / "report.json").is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert [one for one in notes if "_size=" in one] == expected
    assert all(one in done.stderr for one in expected)

    refused = run_script(*command, "calibration.batch_size=8", f"output_dir={tmp_path / 'other'}")
    assert refused.returncode == 2
    assert "error: calibration.batch_size=8: expected at most " in refused.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("recipe=onnx_ptq",), "onnx=null: expected a float ONNX file"),
        (
            ("onnx=x.onnx",),
            "onnx=x.onnx: expected null with model.name=resnet18; to train a float ONNX file, use",
        ),
        (("recipe=onnx_ptq", "onnx=x.onnx", "mode=static"), "mode=static: expected null with train.py"),
        (
            ("recipe=onnx_ptq", "onnx=x.onnx"),
            "data.root=...: the key is required; set it to the folder of .npz or .npy files",
        ),
    ],
)
def test_a_file_needs_its_recipe(settings: tuple[str, ...], message: str) -> None:
    done = run_script("train.py", *settings)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_file_of_open_sizes_is_audited_at_those_of_its_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    weights = {
        name: draw.normal(0, 0.2, (8, size, 3, 3)).astype(np.float32) for name, size in (("w", 3), ("v", 8))
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "/first/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "/Relu"),
        helper.make_node("Conv", ["r", "v"], ["map"], "/last/Conv", pads=[1, 1, 1, 1]),
    ]
    file = save(tmp_path / "map.onnx", nodes, {"x": (FLOAT, ["n", 3, "h", "w"])}, ["map"], weights)
    root = tmp_path / "data"
    root.mkdir()
    for index in range(8):
        np.savez(root / f"{index}.npz", x=draw.normal(size=(1, 3, 12, 20)).astype(np.float32))
    command = ["train.py", "recipe=onnx_ptq", f"onnx={file}", f"data.root={root}", "data.workers=0",
               f"output_dir={tmp_path / 'run'}", "calibration=moving_average", "calibration.batch_size=2",
               "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false"]  # fmt: skip
    done = run_script(*command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 of 2 Conv/Gemm/MatMul run in int8" in done.stdout
    session = ort.InferenceSession(str(tmp_path / "run" / "model.int8.onnx"))
    assert session.run(None, {"x": np.zeros((2, 3, 8, 9), np.float32)})[0].shape == (2, 8, 8, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("export.io=uint8",),
            "export.io=uint8: expected float32 with data.source=qatkit.data.arrays.arrays",
        ),
        (
            ("data.image_size=8",),
            "data.image_size=8: expected null with data.source=qatkit.data.arrays.arrays",
        ),
    ],
)
def test_what_is_for_pictures_alone_is_refused(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    file = _two_inputs(tmp_path / "two.onnx")
    np.savez(tmp_path / "all.npz", ids=np.zeros((70, 6), np.int64), vector=np.ones((70, 16), np.float32))
    done = run_script("train.py", "recipe=onnx_ptq", f"onnx={file}", f"data.root={tmp_path}", *settings)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
