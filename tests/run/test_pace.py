"""Tests of estimated times on a busy machine, with times as they were measured beside busy programs.

A step of ResNet18 then took 0.08 to 0.1 processor seconds in one thread and 0.5 to 3 with two, which wait for each
other in busy loops. Steps of 64 images took 9.3 seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_run import tiny

from qatkit.data import DataModule
from qatkit.jobs import pipeline
from qatkit.run import pace as module
from qatkit.run.pace import Pace
from qatkit.run.timing import Span, Timing, undisturbed

WAIT = 3.5  # elapsed seconds per processor second
ALONE = (0.09, 0.002)  # processor seconds of a step in one thread, and of each sample
TOGETHER = (
    Span(7.1, 2.0),
    Span(5.4, 1.5),
    Span(11.2, 3.2),
)  # the same steps with two threads, one after the other


class Counted(torch.nn.Module):
    """A classifier that remembers the size of its last batch, for all copies together."""

    samples: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.samples = len(x)
        found: torch.Tensor = self.last(x.flatten(1))
        return found


class Busy:
    """Replaces `timed` by the times of a busy machine; those with several threads are taken in turn."""

    def __init__(self, *together: Span) -> None:
        self._together = itertools.cycle(together)

    def __call__(self, run: Callable[[], Any], device: torch.device | None = None) -> Span:
        run()
        if torch.get_num_threads() > 1:
            return next(self._together)
        work = ALONE[0] + ALONE[1] * Counted.samples
        return Span(WAIT * work, work)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with undisturbed():
        torch.set_num_threads(2)
        yield


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataModule]:
    with pipeline.begun(tiny(tmp_path / "run")) as (_, found, _):
        yield found


def busy(data: DataModule, monkeypatch: pytest.MonkeyPatch, *together: Span) -> Pace:
    monkeypatch.setattr(module, "timed", Busy(*together))
    return Pace(tiny(Path()), data, Counted(), None, {})


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_noise_of_two_sizes_does_not_grow_with_the_batch(
    turn: int, data: DataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = busy(data, monkeypatch, *TOGETHER[turn:], *TOGETHER[:turn]).float_step
    assert 9.3 / 2.5 < 64 * step.each + step.once < 9.3 * 2.5


@pytest.mark.usefixtures("two_threads")
def test_other_programs_make_the_estimates_rough(data: DataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = busy(data, monkeypatch, *TOGETHER)
    assert not pace.crowded  # nothing was measured
    _ = pace.float_step
    assert pace.crowded


@pytest.mark.usefixtures("two_threads")
def test_a_gap_while_a_file_is_timed_is_left_out(data: DataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = busy(data, monkeypatch, *TOGETHER)
    pace.files = {"int8": Span(wall=0.9, work=0.02), "unoptimized": Span(wall=0.01, work=0.02)}
    _ = pace.float_step
    assert pace.file("int8") == pytest.approx(WAIT * 0.02)
    assert pace.file("unoptimized") == 0.01


def test_threads_that_share_the_work_make_a_step_shorter() -> None:
    timing = Timing.of_two(less=0.04, few=2, more=0.10, samples=8, elapsed=0.05)  # on an idle machine
    each, once = timing.parts(wait=1.0)
    assert (each, once) == pytest.approx((0.005, 0.01))


def test_waiting_of_threads_counts_once_per_call() -> None:
    timing = Timing.of_two(less=0.084, few=2, more=0.096, samples=8, elapsed=8.0)
    each, once = timing.parts(wait=4.0)
    assert (each, once) == pytest.approx((4 * 0.002, 8 - 8 * 4 * 0.002))


@pytest.mark.parametrize(("less", "more", "each"), [(0.5, 0.1, 0.0), (0.0, 0.8, 0.1)])
def test_a_noisy_difference_keeps_both_parts_positive(less: float, more: float, each: float) -> None:
    timing = Timing.of_two(less, 2, more, 8, elapsed=more)
    assert timing.each == pytest.approx(each) and timing.once >= 0
    assert timing.parts(1.0).once >= 0


def test_measurements_keep_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    with undisturbed():
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before


def test_estimates_begin_no_epoch(data: DataModule) -> None:
    """A checkpoint stores the position in the epoch, which a training with several processes would refuse."""
    assert sum(Pace(tiny(Path()), data, Counted(), None, {}).float_step) > 0
    assert "epoch" not in data.state_dict()
