"""Tests that a run killed at any time, by any signal, again and again, continues and ends with the same bits.

The times are drawn uniformly over the duration of the uninterrupted command, from the start of its process.
So imports, the first export, training, calibration, the choice of an algorithm, export, verification and the
report are hit in proportion to their durations. In each folder, a run is killed up to five times, continues
each time by the same command (train.py: with resume=auto) and finally runs to its end.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from command_line import FRESH, ROOT
from tiny_run import sha256
from torch import Tensor

TINY = ("trainer=cpu", "trainer.progress=false", "trainer.checkpoint_every=7", "model.name=tiny_run.Net",
        "data.image_size=8", "data.workers=0", "data.train_images=512", "data.test_images=64", "calibration.images=64",
        "calibration.batch_size=16", "verify.latency_runs=2", "verify.max_drop=null", "verify.threads=1")  # fmt: skip
QAT = ("schedule.float_epochs=2", "schedule.epochs=2", "verify.control=true")
SCHEDULE = (
    *("schedule.float_epochs=1", "schedule.epochs=2", "schedule.ema=0.9", "schedule.batch_norm=train"),
    *("schedule.batch_norm_images=64", "schedule.distill=0.5", "schedule.distill_features=[pool]"),
    *("verify.every=1", "verify.held_out=100", "verify.control=true"),
)
PTQ = (
    "schedule.float_epochs=1",
    "schedule.epochs=0",
    "calibration=auto",
    "algorithm=auto",
    "algorithm.block_reconstruction.steps=20",
    "target.max_drop=0",
)
LEARNED = ("schedule.float_epochs=1", "schedule.epochs=0", "algorithm=block_reconstruction", "analysis=full",
           "algorithm.block_reconstruction.images=32", "algorithm.block_reconstruction.steps=40")  # fmt: skip
ONNX = ("data.test_images=64", "data.image_size=8", "verify.latency_runs=2", "verify.max_drop=null",
        "verify.threads=1", "verify.min_agreement=null")  # fmt: skip
LIFE = 5  # kills per folder, unless its run ends earlier


@dataclass(frozen=True)
class Case:
    """A command and the numbers of its kills by SIGKILL, SIGINT and SIGTERM."""

    name: str
    typed: tuple[str, ...]
    kills: tuple[int, ...]
    script: str = "train.py"


def of_file(mode: str, *kills: int) -> Case:
    """Returns the case in which export.py quantizes the float file of the first case; kills: as in `Case`."""
    return Case(mode, ("onnx={qat}/model.float.onnx", f"mode={mode}", *ONNX), kills, "export.py")


CASES = [
    Case("qat", (*TINY, *QAT), (16, 3, 3)),
    Case("schedule", (*TINY, *SCHEDULE), (6, 1, 1)),
    Case("ptq", (*TINY, *PTQ), (12, 2, 2)),
    Case("learned", (*TINY, *LEARNED), (6, 1, 1)),
    Case(
        "train_dynamic",
        (*TINY, "export.mode=dynamic", "schedule.float_epochs=2", "schedule.epochs=0"),
        (4, 1, 1),
    ),
    Case("checkpoint", ("checkpoint={qat}/last.ckpt",), (3, 1, 0), "export.py"),
    of_file("static", 3, 1, 1),
    of_file("dynamic", 2, 0, 1),
    of_file("float16", 2, 1, 0),
    of_file("weight_only", 2, 0, 1),
]


def started(case: Case, folder: Path, qat: Path) -> subprocess.Popen[str]:
    typed = [one.format(qat=qat) for one in case.typed] + [f"output_dir={folder}"]
    resume = ["resume=auto"] if case.script == "train.py" else []
    folder.parent.joinpath("tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [*FRESH, sys.executable, str(ROOT / case.script), *typed, *resume],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "tests"),
            "TMPDIR": str(folder.parent / "tmp"),
        },
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(case: Case, folder: Path, qat: Path) -> float:
    """Runs a command to its end and returns the seconds that it took."""
    start = time.monotonic()
    process = started(case, folder, qat)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    return time.monotonic() - start


def killed(case: Case, folder: Path, qat: Path, after: float, number: int) -> bool:
    """Starts or resumes a run and kills it after `after` seconds; returns False if it finished anyway."""
    process = started(case, folder, qat)
    try:
        said = process.communicate(timeout=after)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
        assert process.returncode in (-number, 128 + number, 0), said
        if process.returncode == 128 + number:  # by the handler
            assert "Traceback" not in said and "interrupted" in said.splitlines()[-1]
        return process.returncode != 0
    assert process.returncode == 0, said
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Returns folder and duration of the uninterrupted run of each case that a test has needed so far.

    "" has the folder that contains them all.
    """
    return {"": (tmp_path_factory.mktemp("whole"), 0.0)}


def uninterrupted(case: Case, whole: dict[str, tuple[Path, float]]) -> tuple[Path, float]:
    if case.name not in whole:
        folder = whole[""][0] / case.name
        whole[case.name] = folder, finished(case, folder, whole[""][0] / "qat")
    return whole[case.name]


def lives() -> Iterator[Any]:
    """Yields each case with up to `LIFE` of its signals, in random order, until all have been yielded."""
    for case in CASES:
        sent = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
        numbers = [number for number, count in zip(sent, case.kills, strict=True) for _ in range(count)]
        random.Random(case.name).shuffle(numbers)
        for start in range(0, len(numbers), LIFE):
            yield pytest.param(case, numbers[start : start + LIFE], id=f"{case.name} {start // LIFE}")


@pytest.mark.slow  # 78 kills and the resumed runs, 10 minutes of one core
@pytest.mark.parametrize(("case", "numbers"), list(lives()))
def test_every_kill_goes_on_to_the_same_bits(
    case: Case, numbers: list[int], whole: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    uninterrupted(CASES[0], whole)
    reference, seconds = uninterrupted(case, whole)
    qat, draw, left = whole["qat"][0], random.Random(f"{case.name} {numbers}"), list(numbers)
    for folder in (tmp_path / f"run {life}" for life in itertools.count()):
        done = folder / "report.json"  # exists if a kill came after the last of the work
        while left and not done.exists() and killed(case, folder, qat, draw.uniform(0, seconds), left[-1]):
            left.pop()
        if not done.exists():
            finished(case, folder, qat)
        compare(reference, folder)
        if not left:
            break


def compare(reference: Path, folder: Path) -> None:
    """Checks that two folders have the same files, bit-identical but for times, paths and measurements."""
    names = {path.name for path in reference.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    for name in names - {"report.json", "report.html", "config.yaml", "pictures", "sensitivity.json"}:
        if name.endswith(".ckpt"):
            ours, theirs = leaves(folder / name, folder), leaves(reference / name, reference)
            assert ours.keys() == theirs.keys() and len(ours) > 50
            assert [key for key in ours if not same(ours[key], theirs[key])] == []
        else:
            assert sha256(folder / name) == sha256(reference / name), name


# The number of epochs that Lightning has begun, which is wrong if a run resumes at the end of an epoch.
# Nothing reads it: steps bound a training, and the order of images depends on the epochs completed, which are
# compared.
_BEGUN = re.compile(r"/loops/fit_loop/epoch_progress/(total|current)/(ready|started)")


def leaves(path: Path, folder: Path) -> dict[str, object]:
    """Returns every value of a checkpoint by its path, without times, begun epochs and the run's folder."""
    found: dict[str, object] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key != "seconds":
                    walk(inner, f"{place}/{key}".replace(str(folder), ""))
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                walk(inner, f"{place}/{index}")
        elif not _BEGUN.fullmatch(place):
            found[place] = value.replace(str(folder), "") if isinstance(value, str) else value

    walk(cast("dict[str, Any]", torch.load(path, weights_only=True)), "")
    return found


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
