"""Models with states: the steps of sequences become samples with the states that the float file computed.

    step 0 ── float file ─> state ── step 1 ── float file ─> state ── step 2 ...
    sample 0 = step 0 + start          sample 1 = step 1 + state

A sequence starts from the arrays in its first step that have the names of states; without them, states start
at zero. All later stages (calibration, algorithms, fine-tuning, the comparison of files) thus see ordinary
samples with all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qatkit.data.arrays import ArrayBatches, Port
from qatkit.data.checked import CheckedImages, checked_splits
from qatkit.data.sources import Splits
from qatkit.progress import shown
from qatkit.tasks import Task
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import calling
from qatkit_verify.free_run import KEY, FreeRun, StepSequence

KEPT = 2**29  # maximum number of bytes of a split's states in memory
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class States:
    """Outputs of a float file that are inputs of its next step.

    Attributes:
        outputs: for each state input, the output that feeds it.
        opened: a function that opens the file.
    """

    outputs: Mapping[str, str]
    opened: Callable[[], FreeRun]


class Rollout:
    """The steps of a split as samples; if the states of all steps exceed `KEPT` bytes, only every n-th step.

    Args:
        steps: the steps, whose items contain all inputs except the states.
        ports: the state inputs.
        run: the float file.
        begin: states from which the first sequence continues; None if it has its own start states.
        progress: whether a progress bar is shown.

    Attributes:
        targets: targets of the samples.
        lengths: number of steps of each sequence.
        starts: the start states of each sequence.
        every: n; every n-th step is a sample.
        last: the states after the last step.

    Raises:
        ConfigError: the dataset does not define which items form sequences, or the start of a state is unknown or
            differs in shape between sequences.
    """

    def __init__(
        self,
        steps: CheckedImages,
        ports: Sequence[Port],
        run: FreeRun,
        begin: Mapping[str, NDArray[Any]] | None = None,
        progress: bool = False,
    ) -> None:
        self.steps, self.ports = steps, ports
        self.lengths = _lengths(steps)
        self.starts, self.every = list[Arrays](), 1
        self._kept: Arrays = {}
        firsts = {end - length for length, end in zip(self.lengths, accumulate(self.lengths), strict=True)}
        for index, _ in shown(_Numbers(len(steps)), f"float states of {steps.part}", progress, "steps"):
            if index in firsts:
                run.begin(self._start(index) if begin is None or index else begin)
                self.starts.append(dict(run.state))
            self._keep(index, run.state)
            run.step(steps[index][0])
        self.last = dict(run.state)
        self.targets = steps.targets[:: self.every]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Any]:
        item, target = self.steps[index * self.every]
        kept = {name: torch.from_numpy(one[index]) for name, one in self._kept.items()}
        return {**item, **kept}, target

    def sequences(self, limit: int | None = None) -> Iterator[StepSequence]:
        """Yields the sequences, at most `limit` steps in all; None: all steps."""
        left = len(self.steps) if limit is None else limit
        for start, length, end in zip(self.starts, self.lengths, accumulate(self.lengths), strict=True):
            span = range(end - length, end)[:left]
            if not span:
                return
            yield StepSequence(start, (self.steps[index][0] for index in span))
            left -= len(span)

    def _start(self, index: int) -> Arrays:
        """Returns the start states of a sequence: arrays of its first step, or zeros."""
        _ = self.steps[index]  # checks that the item is a pair
        with calling("data.source", self.steps.source, self.steps.dataset):
            given: Any = self.steps.dataset[index][0]
        known = given if isinstance(given, Mapping) else {}
        checks, name = ArrayBatches(self.steps.source, tuple(self.ports)), f"{self.steps.part}[{index}]"
        return {
            port.name: checks.fitted(known[port.name], port, name).numpy()
            if port.name in known
            else _zeros(port, self.steps.source)
            for port in self.ports
        }

    def _keep(self, index: int, state: Mapping[str, NDArray[Any]]) -> None:
        """Stores the states at the beginning of a step, if the step is a sample.

        Raises:
            ConfigError: the shape of a state differs from that in the first sequence.
        """
        if not self._kept:
            steps, size = len(self.steps), sum(one.nbytes for one in state.values())
            self.every = max(1, math.ceil(steps * size / KEPT))
            samples = math.ceil(steps / self.every)
            self._kept = {name: np.empty((samples, *one.shape), one.dtype) for name, one in state.items()}
        if index % self.every:
            return
        for name, one in state.items():
            if one.shape != self._kept[name].shape[1:]:
                first = list(self._kept[name].shape[1:])
                told = (
                    f"the state '{name}' has the shape {first} in the first sequence and {list(one.shape)} in "
                    "another; all sequences must start with the same shape"
                )
                raise ConfigError("data.source", self.steps.source, reason=told)
            self._kept[name][index // self.every] = one


def rolled_out(
    splits: Splits, states: States, ports: Sequence[Port], source: str, task: Task, progress: bool
) -> Splits:
    """Returns splits whose items are samples with the states of the float file; each split is a `Rollout`.

    Args:
        splits: splits of a source whose items are steps.
        states: the states of the model.
        ports: all inputs of the model.
        source: dotted path of the source, for messages.
        task: the task of the targets.
        progress: whether progress bars are shown.

    Raises:
        ConfigError: items are images or do not form sequences, or as for `Rollout`.
    """
    if not getattr(splits, "arrays", False):
        told = f"data.source={source} gives images, but a model with states needs arrays; set data=arrays"
        raise ConfigError(KEY, _text(states.outputs), reason=told)
    own = [port for port in ports if port.name in states.outputs]
    others = tuple(port for port in ports if port.name not in states.outputs)
    parts = checked_splits(splits, source, task, ArrayBatches(source, others))
    run = states.opened()
    continues = getattr(splits.test, "continues", False)
    try:
        train = Rollout(parts[0], own, run, progress=progress)
        test = Rollout(parts[1], own, run, train.last if continues else None, progress)
    except ConfigError as error:
        reason = f"{error.problem}{splits.advice}"
        raise ConfigError(error.key, error.value, reason=reason) from error
    notes = (*splits.notes, *_notes(states, train, test, continues))
    return replace(splits, train=train, test=test, notes=notes)


def _notes(states: States, train: Rollout, test: Rollout, continues: bool) -> list[str]:
    how = "verification continues after them with" if continues else "verification uses"
    notes = [
        f"states fed back ({_text(states.outputs)}): calibration and training use {_counted(train)}, {how} "
        f"{_counted(test)}; each step gets the states that the float file computed for it"
    ]
    return notes + [
        f"one in {part.every} steps of {part.steps.part} is a sample, since the states of all steps would take more "
        f"than {KEPT >> 20} MB"
        for part in (train, test)
        if part.every > 1
    ]


def _counted(part: Rollout) -> str:
    steps, count = len(part.steps), len(part.lengths)
    return f"{steps:,} step{'s' if steps > 1 else ''} of {count} sequence{'s' if count > 1 else ''}"


def _text(states: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {output}" for name, output in states.items())


def _lengths(steps: CheckedImages) -> tuple[int, ...]:
    found = getattr(steps.dataset, "lengths", None)
    whole = isinstance(found, Sequence) and all(isinstance(one, int) and one > 0 for one in found)
    if not whole or sum(found or ()) != len(steps):
        told = f"with {KEY}, {steps.part}.lengths must list the number of steps of each sequence"
        raise ConfigError("data.source", steps.source, reason=f"{told}, {len(steps)} in all")
    return tuple(found or ())


def _zeros(port: Port, source: str) -> NDArray[Any]:
    """Returns a state of zeros. Its batch axis or, without one, its only dynamic axis has size 1.

    Raises:
        ConfigError: another axis is dynamic.
    """
    others = [axis for axis, size in enumerate(port.shape) if size is None and axis != port.axis]
    if len(others) > (port.axis is None):
        shape = ", ".join("any" if size is None else str(size) for size in port.shape)
        told = f"the size of the state '{port.name}' [{shape}] is unknown; add an array '{port.name}' to the first step"
        raise ConfigError("data.source", source, reason=f"{told} of each sequence")
    sizes = [1 if size is None or axis == port.axis else size for axis, size in enumerate(port.shape)]
    return np.zeros(sizes, port.dtype)


class _Numbers:
    """An iterable over (number, batch of one item), which `shown` requires."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, tuple[None]]]:
        return ((index, (None,)) for index in range(self.count))
