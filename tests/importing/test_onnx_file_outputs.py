"""Tests of train.py with ONNX files that take one sample at a time, return integers or take ids as floats."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from onnx import helper
from onnx_models import FLOAT, Array, save, sqnr


def _file(path: Path, ending: list[onnx.NodeProto], outputs: list[str], classes: int = 4) -> Path:
    """Writes a model from [batch, 16] to logits [batch, classes], followed by the nodes of `ending`."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["hidden"], "/first/MatMul"),
        helper.make_node("Relu", ["hidden"], ["relu"], "/Relu"),
        helper.make_node("MatMul", ["relu", "b"], ["logits"], "/head/MatMul"),
        *ending,
    ]
    constants: dict[str, Array] = {
        "a": draw.normal(0, 0.25, (16, 64)).astype(np.float32),
        "b": draw.normal(0, 0.25, (64, classes)).astype(np.float32),
        "zero": np.array([0]),
        "two": np.array([2]),
        "flat": np.array([classes]),
    }
    return save(path, nodes, {"x": (FLOAT, ["batch", 16])}, outputs, constants)


def _run(file: Path, recipe: str = "onnx_ptq") -> tuple[subprocess.CompletedProcess[str], Array]:
    """Runs train.py and returns the finished process and the samples for verification."""
    root, draw = file.parent / "data", np.random.default_rng(1)
    root.mkdir()
    samples = draw.normal(size=(32, 1, 16)).astype(np.float32)
    for index, one in enumerate(samples):
        np.savez(root / f"{index:02}.npz", x=one)
    done = run_script(
        "train.py", f"recipe={recipe}", f"onnx={file}", f"data.root={root}", "data.workers=0",
        f"output_dir={file.parent / 'run'}", "calibration=moving_average", "calibration.batch_size=8",
        "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false", "trainer.accelerator=cpu",
        "verify.audit=false", "verify.min_float_agreement=0",
    )  # fmt: skip
    return done, samples[1::2]


def _both(file: Path, samples: Array) -> list[list[Array]]:
    """Returns the first output of the given file and of the INT8 file, sample by sample."""
    paths = (file, file.parent / "run" / "model.int8.onnx")
    sessions = [ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in paths]
    return [[one.run(None, {"x": x})[0] for x in samples] for one in sessions]


_SQUEEZE = helper.make_node("Squeeze", ["logits"], ["lone"], "/Squeeze")


@pytest.mark.parametrize(
    ("ending", "classes", "shape"),
    [
        ([_SQUEEZE, helper.make_node("Sigmoid", ["lone"], ["y"], "/Sigmoid")], 1, ()),
        ([_SQUEEZE, helper.make_node("Slice", ["lone", "zero", "two"], ["y"], "/Slice")], 4, (2,)),
        ([helper.make_node("Reshape", ["logits", "flat"], ["y"], "/Reshape")], 4, (4,)),
    ],
    ids=["squeezed", "sliced", "reshaped"],
)
def test_a_file_that_takes_one_sample_whatever_it_declares(
    ending: list[onnx.NodeProto], classes: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = _file(tmp_path / "lone.onnx", ending, ["y"], classes)
    done, samples = _run(file)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    exact, found = _both(file, samples)
    assert found[0].shape == shape and 20 < sqnr(np.stack(exact), np.stack(found)) < 80
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert "the model accepts only one sample at a time, whatever its file declares" in notes


_CLASSES = helper.make_node("ArgMax", ["logits"], ["y"], "/ArgMax", axis=1, keepdims=0)


@pytest.mark.parametrize("outputs", [["y"], ["y", "logits"]])
def test_whole_numbers_are_judged_by_their_equality(outputs: list[str], tmp_path: Path) -> None:
    file = _file(tmp_path / "classes.onnx", [_CLASSES], outputs)
    done, samples = _run(file)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    exact, found = map(np.stack, _both(file, samples))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["task"]["decision"] == "values"
    assert report["fidelity"]["int8"]["agreement"] == np.mean(exact == found) > 0.8


def test_whole_numbers_alone_are_not_trained_on(tmp_path: Path) -> None:
    done, _ = _run(_file(tmp_path / "classes.onnx", [_CLASSES], ["y"]), "onnx_qat")
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("error")]
    assert done.returncode == 2 and "expected 0 with a model whose outputs are all integers" in line


def test_floats_that_are_ids_stay_ids(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], "/Cast", to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["embedded"], "/Gather"),
        helper.make_node("MatMul", ["embedded", "a"], ["y"], "/MatMul"),
    ]
    constants = {name: draw.normal(size=(20, 20)).astype(np.float32) for name in ("table", "a")}
    file = save(tmp_path / "ids.onnx", nodes, {"x": (FLOAT, ["batch", 6])}, ["y"], constants)
    root = tmp_path / "data"
    root.mkdir()
    np.savez(root / "all.npz", x=draw.integers(0, 20, (32, 6)).astype(np.float32))
    done = run_script(
        "train.py", "recipe=onnx_ptq", f"onnx={file}", f"data.root={root}", "data.workers=0",
        f"output_dir={tmp_path / 'run'}", "verify.latency_runs=3", "trainer.progress=false",
        "verify.min_float_sqnr=25",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
