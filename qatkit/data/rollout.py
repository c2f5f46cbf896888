"""Models with a state: the steps of sequences become samples that hold the float file's own states.

    step 0 ── float file ─> state ── step 1 ── float file ─> state ── step 2 ...
    sample 0 = step 0 + start          sample 1 = step 1 + state

A sequence starts from the arrays of the states' names in its first step, else from zeros. All later stages
(ranges, algorithms, fine-tuning, the comparison of files) thus see ordinary samples with every input.
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

KEPT = 2**29  # bytes of states in memory, of a split at most
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class States:
    """Outputs of a float file that are inputs of its next step.

    Attributes:
        outputs: by input, the output that it takes.
        opened: opens the file.
    """

    outputs: Mapping[str, str]
    opened: Callable[[], FreeRun]


class Rollout:
    """The steps of a split as samples; every n-th of them where the states of all would exceed `KEPT` bytes.

    Args:
        steps: whose items have every input but the states.
        ports: the states.
        run: the float file.
        begin: states in which the first sequence continues another one; None: it has its own start.
        progress: a bar is shown.

    Attributes:
        targets: targets of the samples.
        lengths: steps of each sequence.
        every: n, the steps per sample.
        last: the states after the last step.

    Raises:
        ConfigError: the dataset does not say which items are sequences, or a state has no known start.
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
        for index, _ in shown(_Numbers(len(steps)), f"float states, {steps.part}", progress, "steps"):
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
        """Yields the sequences, of at most `limit` steps in all."""
        left = len(self.steps) if limit is None else limit
        for start, length, end in zip(self.starts, self.lengths, accumulate(self.lengths), strict=True):
            span = range(end - length, end)[:left]
            if not span:
                return
            yield StepSequence(start, (self.steps[index][0] for index in span))
            left -= len(span)

    def _start(self, index: int) -> Arrays:
        """Returns the states that a sequence starts from: those of its first step, else zeros."""
        _ = self.steps[index]  # checked, so an item is a pair
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
        """Stores the states that a step begins with."""
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
                    f"'{name}' starts as {first} in the first sequence, and as {list(one.shape)} in another"
                )
                raise ConfigError("data.source", self.steps.source, reason=told)
            self._kept[name][index // self.every] = one


def rolled_out(
    splits: Splits, states: States, ports: Sequence[Port], source: str, task: Task, progress: bool
) -> Splits:
    """Returns splits whose items are samples with the float file's own states; each is a `Rollout`.

    Args:
        splits: splits of a source whose items are steps.
        ports: all inputs of the model.
        source: dotted path of the source, for messages.
        task: whose targets there are.
        progress: bars are shown.

    Raises:
        ConfigError: images, no sequences, or as `Rollout`.
    """
    if not getattr(splits, "arrays", False):
        told = f"data.source={source} gives images; a model with states takes arrays (data=arrays)"
        raise ConfigError(KEY, _text(states.outputs), reason=told)
    own = [port for port in ports if port.name in states.outputs]
    others = tuple(port for port in ports if port.name not in states.outputs)
    parts = checked_splits(splits, source, task, ArrayBatches(source, others))
    run = states.opened()
    train = Rollout(parts[0], own, run, progress=progress)
    goes_on = getattr(splits.test, "continues", False)
    test = Rollout(parts[1], own, run, train.last if goes_on else None, progress)
    notes = (*splits.notes, *_notes(states, train, test, goes_on))
    return replace(splits, train=train, test=test, notes=notes)


def _notes(states: States, train: Rollout, test: Rollout, goes_on: bool) -> list[str]:
    where = "verification goes on behind them with" if goes_on else "verification takes"
    notes = [
        f"states fed back ({_text(states.outputs)}): calibration and training take {_counted(train)}, {where} "
        f"{_counted(test)}, each step with the states that the float file had there"
    ]
    return notes + [
        f"states of every {part.every}th step of {part.steps.part} are samples: those of all steps are more than "
        f"{KEPT >> 20} MB"
        for part in (train, test)
        if part.every > 1
    ]


def _counted(part: Rollout) -> str:
    count = len(part.lengths)
    return f"{len(part.steps):,} steps of {count} sequence{'s' if count > 1 else ''}"


def _text(states: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {output}" for name, output in states.items())


def _lengths(steps: CheckedImages) -> tuple[int, ...]:
    found = getattr(steps.dataset, "lengths", None)
    whole = isinstance(found, Sequence) and all(isinstance(one, int) and one > 0 for one in found)
    if not whole or sum(found or ()) != len(steps):
        told = f"{steps.part}.lengths must hold the number of steps of each sequence, {len(steps)} in all"
        raise ConfigError("data.source", steps.source, reason=f"{told}, with {KEY}")
    return tuple(found or ())


def _zeros(port: Port, source: str) -> NDArray[Any]:
    """Returns a state of zeros; a single open axis, or the batch axis, has the size of one sample."""
    others = [axis for axis, size in enumerate(port.shape) if size is None and axis != port.axis]
    if len(others) > (port.axis is None):
        shape = ["any" if size is None else size for size in port.shape]
        told = f"the state '{port.name}' is {shape}".replace("'any'", "any")
        told += f", and nothing says how large it is; expected an array '{port.name}' in the first step of a sequence"
        raise ConfigError("data.source", source, reason=told)
    sizes = [1 if size is None or axis == port.axis else size for axis, size in enumerate(port.shape)]
    return np.zeros(sizes, port.dtype)


class _Numbers:
    """0, 1, ... as a bar counts them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, tuple[None]]]:
        return ((index, (None,)) for index in range(self.count))
