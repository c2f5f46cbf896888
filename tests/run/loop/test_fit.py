"""Tests that a killed run continues by the same command with resume=auto and ends with the same bits.

Every run is its own process, killed with SIGKILL: no handler runs, nothing is flushed. The model drops
activations at random (Dropout, StochasticDepth) and is distilled from the float model that the run trains
first. So a wrong random state, batch order, learning rate, observer or teacher shows in the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from qatkit.run.loop.fit import _AtomicCheckpoints

ROOT = Path(__file__).parents[3]
IMAGES, BATCH = 1280, 16
STEPS = IMAGES // BATCH  # per epoch; every stage trains for one
# Checkpoints of the stages, in order: a killed run must have left those up to its stage.
CHECKPOINTS = ("float.ckpt", "last.ckpt", "control.ckpt")


class Small(nn.Module):
    """A small residual network with StochasticDepth and Dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.skip, self.drop = StochasticDepth(0.3, "row"), nn.Dropout(0.2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.skip(self.block(x)))
        return cast(Tensor, self.fc(self.drop(self.pool(x).flatten(1))))


def command(folder: Path, *more: str) -> list[str]:
    """Returns the command of every run in this module; only `folder` and `more` differ."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "trainer=cpu",
        f"output_dir={folder}",
        f"model.name={__name__}.Small",
        f"data.train_images={IMAGES}",
        f"data.batch_size={BATCH}",
        "data.image_size=8",
        "schedule.float_epochs=1",
        "schedule.epochs=1",
        "schedule.distill=0.5",
        "calibration.images=64",
        "trainer.checkpoint_every=4",
        "trainer.progress=false",
        "verify.latency_runs=3",
        "verify.max_drop=null",  # one epoch proves nothing about accuracy
        *more,
    ]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Starts train.py with stdout and stderr in one pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        command(folder, *more),
        cwd=folder.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a run that must succeed and returns its output."""
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    return said


def kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Sends SIGKILL as soon as `ready` returns True; fails if the run ends earlier."""
    deadline = time.monotonic() + 200
    while not ready():
        assert process.poll() is None, f"ended before it was killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def read(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(path, weights_only=True))


def flat(value: object, path: str = "") -> dict[str, object]:
    """Returns every leaf of nested dicts and lists, by its path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{path}/{i}").items()}
    return {path: value}


def differences(one: Path, other: Path) -> list[str]:
    """Returns the paths of model, optimizer and schedule values that differ between two checkpoints."""
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    left, right = ({k: read(p)[k] for k in parts} for p in (one, other))
    a, b = flat(left), flat(right)
    assert len(a) > 50
    return sorted(a.keys() ^ b.keys()) + [key for key in a.keys() & b.keys() if not same(a[key], b[key])]


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start(folder, "verify.control=true"))
    return folder


def check_resumed(folder: Path, uninterrupted: Path, killed_in: str) -> None:
    """Resumes the killed run in `folder`; checkpoints and INT8 file must equal the uninterrupted run's.

    killed_in: the checkpoint of the stage in which the run was killed.
    """
    left = [name for name in CHECKPOINTS if (folder / name).exists()]
    assert left == list(CHECKPOINTS[: CHECKPOINTS.index(killed_in) + 1])
    assert not (folder / "report.json").exists()

    said = finish(start(folder, "verify.control=true", "resume=auto"))

    assert f"resuming {folder}" in said
    for name in CHECKPOINTS:
        assert differences(uninterrupted / name, folder / name) == []
    assert sha256(folder / "model.int8.onnx") == sha256(uninterrupted / "model.int8.onnx")


@pytest.mark.slow  # whole runs, each in its own process; by default only test_signals ends one
@pytest.mark.parametrize("stage", ["last.ckpt", "float.ckpt", "control.ckpt"])
def test_killed_in_mid_epoch(stage: str, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "verify.control=true")
    kill_when(process, (folder / stage).is_file)
    assert 0 < read(folder / stage)["global_step"] < STEPS  # killed in mid-epoch
    assert differences(uninterrupted / stage, folder / stage) != []  # and before the end of the stage

    check_resumed(folder, uninterrupted, stage)


@pytest.mark.slow
def test_killed_again_and_again(uninterrupted: Path, tmp_path: Path) -> None:
    """Checks kills near the start, the middle and the end of the QAT epoch."""
    folder = tmp_path / "run"
    checkpoint = folder / "last.ckpt"

    def reached(step: int) -> Callable[[], bool]:
        return lambda: checkpoint.is_file() and read(checkpoint)["global_step"] >= step

    for step in (4, STEPS // 2, STEPS - 8):
        kill_when(start(folder, "verify.control=true", "resume=auto"), reached(step))
        assert read(checkpoint)["global_step"] < STEPS

    check_resumed(folder, uninterrupted, "last.ckpt")


@pytest.mark.slow
def test_killed_between_calibration_and_the_first_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "verify.control=true")
    assert process.stdout is not None
    for line in process.stdout:
        if "fine-tuning: QAT" in line:
            break
    kill_when(process, lambda: True)

    check_resumed(folder, uninterrupted, "float.ckpt")


@pytest.mark.slow
def test_killed_while_verifying(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kill_when(start(folder, "verify.control=true"), (folder / "model.int8.onnx").is_file)

    check_resumed(folder, uninterrupted, "control.ckpt")


def test_equal_checkpoints_have_equal_bytes(tmp_path: Path) -> None:
    """Checks that the temporary name of a checkpoint does not affect its bytes."""
    content = {"state_dict": {"w": torch.arange(6.0)}, "qatkit": {"num_classes": 3}}
    for name in ("one", "two"):
        _AtomicCheckpoints().save_checkpoint(content, tmp_path / name / "last.ckpt")
        assert os.listdir(tmp_path / name) == ["last.ckpt"]

    assert sha256(tmp_path / "one" / "last.ckpt") == sha256(tmp_path / "two" / "last.ckpt")
    assert torch.equal(read(tmp_path / "one" / "last.ckpt")["state_dict"]["w"], torch.arange(6.0))
