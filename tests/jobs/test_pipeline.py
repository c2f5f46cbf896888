"""Tests of the whole chain on a few real images: what a run writes, and whether its report is correct.

The figures are measured again from the files and scikit-learn's digits, with NumPy and ONNX Runtime only: no
code of the preprocessing, the loaders or the verification is reused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import ROOT
from onnx import numpy_helper
from tiny_run import (
    BUNDLE,
    Net,
    calibrate_only,
    digits_test,
    logits,
    report_of,
    sha256,
    tiny,
    top,
    weights_of,
)

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.fuse import fuse
from qatkit.jobs import export_checkpoint, pipeline


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with float training, QAT and a control that is fine-tuned in float."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = tiny(folder)
    config.verify.control = True
    assert pipeline.train(config) == 0
    return folder


def test_the_bundle_is_complete_and_nothing_else_is_left(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == BUNDLE | {"float.ckpt", "control.ckpt"}


@pytest.mark.parametrize("name", ["float", "int8"])
def test_the_reported_accuracy_is_that_of_the_file(finished: Path, name: str) -> None:
    images, labels = digits_test()
    scores = logits(finished / f"model.{name}.onnx", images)
    reported = report_of(finished)["accuracy"][name]

    assert reported["images"] == 360
    assert reported["top1"] == pytest.approx(top(scores, labels, 1), abs=1e-9)
    assert reported["top5"] == pytest.approx(top(scores, labels, 5), abs=1e-9)
    assert reported["top1"] > 50  # it has learned: near chance (10 %), figures may agree by accident


def test_the_reported_sizes_and_digests_are_those_of_the_files(finished: Path) -> None:
    reported = report_of(finished)

    assert reported["sizes"] == {
        name: (finished / f"model.{name}.onnx").stat().st_size for name in ("float", "int8")
    }
    recorded = {entry["name"]: (entry["bytes"], entry["sha256"]) for entry in reported["files"]}
    assert recorded.keys() >= {"model.int8.onnx", "model.float.onnx", "model.json", "last.ckpt"}
    for name, figures in recorded.items():
        assert figures == ((finished / name).stat().st_size, sha256(finished / name))


def test_the_files_compute_what_was_trained(finished: Path) -> None:
    """Checks the float and control figures against their checkpoints, and INT8 against the control."""
    images, labels = digits_test()
    float_model = Net()
    state = weights_of(finished / "float.ckpt")
    float_model.load_state_dict({key.removeprefix("graph."): value for key, value in state.items()})
    with torch.no_grad():
        expected = float_model.eval()(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(logits(finished / "model.float.onnx", images), expected, atol=1e-4)

    control = fuse(Net().eval(), torch.from_numpy(images[:2])).graph
    state = {k.removeprefix("graph."): v for k, v in weights_of(finished / "control.ckpt").items()}
    control.load_state_dict({key: state[key] for key in control.state_dict()})
    with torch.no_grad():
        scores = control(torch.from_numpy(images)).numpy()
    reported = report_of(finished)["accuracy"]
    assert reported["control"]["top1"] == pytest.approx(top(scores, labels, 1), abs=1e-9)
    int8 = logits(finished / "model.int8.onnx", images)
    agreement = (int8.argmax(1) == scores.argmax(1)).mean()
    assert agreement > 0.9
    assert not np.allclose(int8, scores, atol=1e-6)


def test_the_control_is_trained_without_fake_quantization(finished: Path) -> None:
    """Checks that the control took as many steps as QAT and ended with other weights."""
    qat, control = finished / "last.ckpt", finished / "control.ckpt"
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (qat, control)]
    assert steps == [1437 // 32] * 2
    assert not torch.equal(weights_of(qat)["graph.conv1.weight"], weights_of(control)["graph.conv1.weight"])


def test_the_int8_file_holds_int8_weights_and_int32_biases(finished: Path) -> None:
    model = onnx.load(str(finished / "model.int8.onnx"))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 13)]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    dequantized = [tensors[n.input[0]] for n in model.graph.node if n.op_type == "DequantizeLinear"
                   and n.input[0] in tensors]  # fmt: skip
    kinds = sorted((onnx.TensorProto.DataType.Name(t.data_type), tuple(t.dims)) for t in dequantized)
    assert kinds == [
        ("INT32", (10,)),
        ("INT32", (16,)),
        ("INT32", (16,)),
        ("INT8", (10, 16)),
        ("INT8", (16, 4, 3, 3)),  # the kernels need 4 input channels: the last one is zeros
        ("INT8", (16, 16, 3, 3)),
    ]
    stem = next(numpy_helper.to_array(t) for t in dequantized if t.dims[1:2] == [4])
    assert stem[:, :3].any() and not stem[:, 3].any()
    floats = [t for t in tensors.values() if t.data_type == onnx.TensorProto.FLOAT]
    assert max(int(np.prod(t.dims)) for t in floats) <= 16  # only scales


def test_preprocessing_and_classes_travel_with_the_model(finished: Path) -> None:
    about = json.loads((finished / "model.json").read_text())

    assert about["classes"] == [str(digit) for digit in range(10)]
    assert about["preprocessing"]["image_size"] == 8
    assert about["preprocessing"]["mean"] == [0.5] * 3
    assert about["preprocessing"]["std"] == [0.5] * 3


def test_export_gives_the_same_bytes_again(finished: Path, tmp_path: Path) -> None:
    """Checks the command that a user types, in its own process."""
    command = [sys.executable, str(ROOT / "export.py"), f"checkpoint={finished / 'last.ckpt'}",
               f"output_dir={tmp_path / 'again'}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )

    assert done.returncode == 0, done.stderr
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(finished / "model.int8.onnx")
    assert sha256(finished / "model.int8.onnx") in done.stderr + done.stdout


def test_the_same_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    """Checks a complete second run without the control, which must not change the shipped files."""
    assert pipeline.train(tiny(tmp_path / "run")) == 0

    for name in ("model.int8.onnx", "model.float.onnx", "model.json"):
        assert sha256(tmp_path / "run" / name) == sha256(finished / name)


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"max_size_ratio": 0.001}, ["verify.max_size_ratio=0.001"]),
        (
            {"min_speedup": 1000.0, "max_size_ratio": 0.001},
            ["verify.max_size_ratio=0.001", "verify.min_speedup=1000.0"],
        ),
    ],
)
def test_falling_short_is_status_1_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bounds: dict[str, Any], named: list[str]
) -> None:
    config = calibrate_only(tmp_path / "run")
    config.verify = replace(config.verify, max_drop=None, min_agreement=None, audit=False, **bounds)

    assert pipeline.train(config) == 1

    shortfalls = report_of(tmp_path / "run")["shortfalls"]
    assert [line.split(":")[0] for line in shortfalls] == named
    said = "".join(capfd.readouterr())
    assert all(key in said for key in named)
    assert {path.name for path in (tmp_path / "run").iterdir()} == BUNDLE  # all files are kept as evidence


def test_a_checkpoint_of_unfrozen_observers_exports_equal_bytes(tmp_path: Path) -> None:
    """Checks that the export aligns the scales, which are not yet aligned in the checkpoint."""
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=1, float_epochs=1, freeze_observers=1.0))
    config.verify.max_drop = None
    pipeline.train(config)
    again = replace(
        config, checkpoint=str(tmp_path / "run" / "last.ckpt"), output_dir=str(tmp_path / "again")
    )
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(tmp_path / "run" / "model.int8.onnx")
