"""The whole chain on real images, small: what a run leaves behind, and whether its report tells the truth.

Figures are measured again here from the files and from scikit-learn's digits alone, with numpy and ONNX
Runtime; nothing of the preprocessing, the loaders or the verification is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from qatkit import pipeline
from qatkit.config import (
    BackendConfig,
    CalibrationConfig,
    Config,
    DataConfig,
    ExportConfig,
    ModelConfig,
    OverrideConfig,
    ScheduleConfig,
    TrainerConfig,
    VerifyConfig,
)
from qatkit.graph.fuse import fuse
from qatkit.module import QATModule

ROOT = Path(__file__).parents[1]
BUNDLE = {
    "model.int8.onnx",
    "model.float.onnx",
    "model.json",
    "ranges.json",
    "report.json",
    "report.html",
    "config.yaml",
    "last.ckpt",
}
SEED = 0


class Net(nn.Module):
    """Three convolutions, a residual, a classifier: 2,000 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        return cast(Tensor, self.fc(self.pool(x).flatten(1)))


def tiny(folder: Path, **changes: Any) -> Config:
    """A run of seconds: digits at their own 8 x 8 pixels, one float epoch, one QAT epoch."""
    config = Config(
        name="tiny",
        seed=SEED,
        output_dir=str(folder),
        model=ModelConfig(name=f"{__name__}.Net"),
        data=DataConfig(image_size=8, batch_size=32, workers=0),
        calibration=CalibrationConfig(images=64),
        schedule=ScheduleConfig(epochs=1, float_epochs=4, lr=1e-3),
        trainer=TrainerConfig(accelerator="cpu", progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, max_drop=5.0),
    )
    return replace(config, **changes)


def digits_test() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The test images as the model sees them, [360, 3, 8, 8] in -1..1, and their labels."""
    bunch = load_digits()
    test = train_test_split(
        np.arange(len(bunch.images)), test_size=0.2, stratify=bunch.target, random_state=SEED
    )[1]
    pixels = np.round(bunch.images[test] * (255 / 16)) / 255
    grey = ((pixels - 0.5) / 0.5).astype(np.float32)
    return np.repeat(grey[:, None], 3, axis=1), bunch.target[test]


def logits(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return cast("NDArray[np.float32]", session.run(None, {"input": images})[0])


def top(scores: NDArray[np.float32], labels: NDArray[np.int64], k: int) -> float:
    """Percent of images whose label is among the `k` highest scores."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float(100 * (best == labels[:, None]).any(axis=1).mean())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def report_of(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / "report.json").read_text()))


def weights_of(path: Path) -> dict[str, Tensor]:
    return cast("dict[str, Tensor]", torch.load(path, weights_only=True)["state_dict"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a float training, QAT and a float control."""
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
    assert reported["top1"] > 50  # it has learned: a chance level of 10 could agree by accident


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
    """The float file is the float checkpoint; the control is its own checkpoint; the INT8 one is near both."""
    images, labels = digits_test()
    float_model = Net()
    state = weights_of(finished / "float.ckpt")
    float_model.load_state_dict({key.removeprefix("graph."): value for key, value in state.items()})
    with torch.no_grad():
        expected = float_model.eval()(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(logits(finished / "model.float.onnx", images), expected, atol=1e-4)

    control = fuse(Net().eval()).graph
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
    """The same number of steps from the same weights, but another result."""
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
        ("INT8", (16, 3, 3, 3)),
        ("INT8", (16, 16, 3, 3)),
    ]
    floats = [t for t in tensors.values() if t.data_type == onnx.TensorProto.FLOAT]
    assert max(int(np.prod(t.dims)) for t in floats) <= 16  # scales alone


def test_preprocessing_and_classes_travel_with_the_model(finished: Path) -> None:
    about = json.loads((finished / "model.json").read_text())

    assert about["classes"] == [str(digit) for digit in range(10)]
    assert about["preprocessing"]["image_size"] == 8
    assert about["preprocessing"]["mean"] == [0.5] * 3
    assert about["preprocessing"]["std"] == [0.5] * 3


def test_export_gives_the_same_bytes_again(finished: Path, tmp_path: Path) -> None:
    """In a process of its own, by the command that a user types."""
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
    """Training and all; the control changes nothing of what is shipped."""
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
    assert {path.name for path in (tmp_path / "run").iterdir()} == BUNDLE  # the evidence is all there


def calibrate_only(folder: Path) -> Config:
    """No training at all: the weights are random, but the chain is the same."""
    config = tiny(folder, schedule=ScheduleConfig(epochs=0))
    config.verify.max_drop = None
    return config


def test_without_epochs_the_weights_are_the_float_ones(tmp_path: Path) -> None:
    assert pipeline.train(calibrate_only(tmp_path / "run")) == 0

    folder = tmp_path / "run"
    state = weights_of(folder / "last.ckpt")
    initializers = {t.name: t for t in onnx.load(str(folder / "model.float.onnx")).graph.initializer}
    weights = [onnx.numpy_helper.to_array(t) for t in initializers.values() if len(t.dims) == 4]
    assert len(weights) == 2
    for name in ("graph.conv1.weight", "graph.conv2.weight"):
        assert any(w.shape == tuple(state[name].shape) and np.array_equal(w, state[name]) for w in weights)
    images, _ = digits_test()
    expected, got = (logits(folder / f"model.{name}.onnx", images) for name in ("float", "int8"))
    spread = expected.max() - expected.min()
    assert 0 < np.abs(got - expected).max() < 0.05 * spread


def test_a_table_for_tensorrt_joins_the_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = replace(calibrate_only(folder), export=ExportConfig(tensorrt_table="8601"))
    assert pipeline.train(config) == 0
    lines = (folder / "tensorrt.table").read_text().splitlines()
    assert lines[0] == "TRT-8601-EntropyCalibration2" and lines[1].startswith("input: ")
    tensors = {o for node in onnx.load(str(folder / "model.float.onnx")).graph.node for o in node.output}
    assert {line.split(": ")[0] for line in lines[1:]} <= tensors | {"input"}
    assert len(lines) > len(json.loads((folder / "ranges.json").read_text()))
    assert "tensorrt.table" in {record["name"] for record in report_of(folder)["files"]}


def test_qnnpack_gives_signed_activations(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend = BackendConfig(target="qatkit.backends.QNNPACK")

    assert pipeline.train(config) == 0

    graph = onnx.load(str(tmp_path / "run" / "model.int8.onnx")).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    points = [tensors[node.input[2]].data_type for node in graph.node if node.op_type == "QuantizeLinear"]
    assert set(points) == {onnx.TensorProto.INT8}
    assert len(points) >= 5
    reported = report_of(tmp_path / "run")
    assert reported["session_options"] == {"session.qdqisint8allowed": "1"}
    assert reported["audit"]["ok"]


@pytest.mark.parametrize(
    ("pattern", "site", "weight"), [("op/linear", "fc", (10, 16)), ("conv2", "conv2", (16, 16, 3, 3))]
)
def test_an_override_leaves_an_operator_float(
    tmp_path: Path, pattern: str, site: str, weight: tuple[int, ...]
) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend = BackendConfig(overrides={pattern: OverrideConfig(float=True)})

    assert pipeline.train(config) == 0

    graph = onnx.load(str(tmp_path / "run" / "model.int8.onnx")).graph
    kinds = {tuple(sorted(t.dims)): t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert kinds.pop(tuple(sorted(weight))) == onnx.TensorProto.FLOAT
    assert set(kinds.values()) == {onnx.TensorProto.INT8}
    skipped = dict(report_of(tmp_path / "run")["skipped"])
    assert skipped[site] == f"float by override '{pattern}'"


class NeverCalibrates(QATModule):
    """A second run must not need it."""

    def calibrate(self, batches: Iterable[Tensor]) -> int:
        raise AssertionError("an image was looked at")


def test_a_tournament_is_reported_and_its_cache_spares_the_next_run_every_image(tmp_path: Path) -> None:
    chosen = CalibrationConfig(
        observer="qatkit.observers.MSEObserver",
        images=64,
        search="tournament",
        cache=str(tmp_path / "ranges.safetensors"),
    )
    first, second = (
        tiny(
            tmp_path / name,
            calibration=chosen,
            model=ModelConfig(name=f"{__name__}.Net"),
            schedule=ScheduleConfig(epochs=0),
            verify=VerifyConfig(latency_runs=3, threads=1, max_drop=None),
        )
        for name in ("first", "second")
    )
    torch.manual_seed(SEED)  # the float weights are drawn
    assert pipeline.train(first) == 0
    assert pipeline.train(second, NeverCalibrates) == 0
    reports = [report_of(tmp_path / name) for name in ("first", "second")]
    assert reports[0]["calibration"] == reports[1]["calibration"]
    (winner,) = [row for row in reports[0]["calibration"] if row["chosen"]]
    (plain,) = [row for row in reports[0]["calibration"] if row["method"] == "min-max"]
    assert winner["images"] == 16 and winner["top1"] >= plain["top1"]
    assert sha256(tmp_path / "first" / "model.int8.onnx") == sha256(tmp_path / "second" / "model.int8.onnx")
    assert winner["method"] in (tmp_path / "second" / "report.html").read_text()


class OneFarOut(Net):
    """Of 2,304 weights in 1/12, one of 0.6."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        with torch.no_grad():
            self.conv2.weight[0, 0, 0, 0] = 0.6


def test_clipped_weights_are_trained_shipped_and_exported_again(tmp_path: Path) -> None:
    """calibration.weights=mse, where it pays: one scale for the whole of a 7-bit weight, one value far out."""
    chosen = CalibrationConfig(images=64, weights="mse")
    backend = BackendConfig(
        reduce_range=True, overrides={"*": OverrideConfig(weight_granularity="per_tensor")}
    )
    run = tiny(
        tmp_path / "run",
        model=ModelConfig(name=f"{__name__}.OneFarOut"),
        calibration=chosen,
        backend=backend,
        schedule=ScheduleConfig(epochs=1, float_epochs=0, lr=1e-3),
    )
    assert pipeline.train(run) == 0
    stored = weights_of(tmp_path / "run" / "last.ckpt")
    assert stored["graph.conv2.weight_fake_quant.clip"] == pytest.approx(0.96)
    parity = report_of(tmp_path / "run")["parity"]
    assert parity["unoptimized"]["agreement"] == parity["optimized"]["agreement"] == 1.0
    again = replace(run, output_dir=str(tmp_path / "again"), checkpoint=str(tmp_path / "run" / "last.ckpt"))
    assert pipeline.export(again) == 0
    first, second = (sha256(tmp_path / folder / "model.int8.onnx") for folder in ("run", "again"))
    assert first == second


def test_noise_instead_of_images_is_said_aloud(tmp_path: Path) -> None:
    config = tiny(
        tmp_path / "run",
        calibration=CalibrationConfig(images=64, random=True),
        schedule=ScheduleConfig(epochs=0),
        verify=VerifyConfig(latency_runs=3, threads=1, max_drop=None),
    )
    with pytest.warns(UserWarning, match="calibrated on random noise"):
        assert pipeline.train(config) == 0
    (note,) = report_of(tmp_path / "run")["notes"]
    assert "random noise" in note and note in (tmp_path / "run" / "report.html").read_text()
