"""Measures the loss with only the weights quantized, with only the activations quantized, and with both.

A loss from the weights has other remedies (per-channel scales, equalization, learned rounding) than a loss from the
activations (other ranges, SmoothQuant, float for the worst tensors). Therefore it matters which side causes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qatkit.analysis.outputs import Exact, Sums
from qatkit.analysis.switches import switches
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.graph.phase import inference
from qatkit.progress import Batches, shown
from qatkit.records.analysis import (
    ACTIVATION,
    BY_ACTIVATIONS,
    BY_BOTH,
    BY_WEIGHTS,
    WEIGHT,
    ClassRow,
    Isolation,
    Outcome,
)
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import TaskNames

# The kinds of switches that are on, by the name of the side.
_SIDES: dict[str, tuple[str, ...]] = {
    "float": (),
    "weights": (WEIGHT,),
    "activations": (ACTIVATION,),
    "both": (WEIGHT, ACTIVATION),
}
# For independent noise, the losses of the two sides add up. A side with at least this share of the sum is named as
# the cause.
_MOST = 2 / 3


def isolation(
    graph_module: fx.GraphModule,
    batches: Batches,
    *,
    labelled: bool = True,
    classes: Sequence[str] = (),
    runtime: Callable[[Any], Any] | None = None,
    progress: bool = False,
    task: TaskNames = NAMES,
) -> Isolation:
    """Measures the loss of each side: of the weights, of the activations, and of both.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of (inputs, labels), read once.
        labelled: whether the labels are meaningful. If not, no accuracy is measured.
        classes: the names of the classes; the report uses numbers by default.
        runtime: a function that runs the exported file and returns its first output, for comparison with the
            simulation.
        progress: whether to show a progress bar.
        task: the terms of the task in which the advice is written, such as the name of its metric.

    Raises:
        ConfigError: there are no images.
    """
    walker, every = PreparedInterpreter(graph_module), switches(graph_module)
    sums = {name: Sums() for name in (*_SIDES, *(("int8",) if runtime else ()))}
    counts = _Classes()
    with inference(graph_module):
        for inputs, labels in shown(batches, "isolation", progress):
            known = labels if labelled else None
            exact: Exact | None = None
            for name, kinds in _SIDES.items():
                for switch in every:
                    switch.turn(switch.kind in kinds)
                outputs = walker.outputs(inputs)
                exact = exact or Exact(outputs, known)
                counts.add(name, exact.add(sums[name], outputs), known)
            if runtime is not None and exact is not None:
                counts.add("int8", exact.add(sums["int8"], _one(runtime(inputs), exact)), known)
    if not sums["float"].images:
        raise ConfigError("analysis.images", 0, "at least one sample to compare weights and activations")
    outcomes = {name: one.outcome() for name, one in sums.items()}
    last = "int8" if runtime is not None else "both"
    return Isolation(outcomes, counts.rows(last, classes), advice(outcomes, task))


def _one(output: Any, exact: Exact) -> list[Tensor]:
    """Returns the first output of the file, and float outputs in place of the others, which `runtime` lacks."""
    found = torch.as_tensor(output)
    return [found.to(exact.outputs[0].device), *exact.outputs[1:]]


class _Classes:
    """Counts of correct decisions by class, for every side."""

    def __init__(self) -> None:
        self._images: dict[int, int] = {}
        self._right: dict[str, dict[int, int]] = {}

    def add(self, side: str, decided: Tensor, labels: Any) -> None:
        """Counts the correct decisions [rows] of one batch; does nothing unless each row has an integer label."""
        truth = None if labels is None else torch.as_tensor(labels).reshape(-1).to(decided.device)
        if truth is None or truth.is_floating_point() or len(truth) != len(decided):
            return
        if side == "float":
            _count(self._images, truth)
        _count(self._right.setdefault(side, {}), truth[truth == decided])

    def rows(self, side: str, names: Sequence[str]) -> list[ClassRow]:
        """Returns each labelled class with its accuracy in float and on `side`, largest loss of accuracy first."""
        exact, found = self._right.get("float", {}), self._right.get(side, {})
        rows = [
            ClassRow(
                names[label] if 0 <= label < len(names) else str(label),
                count,
                100 * exact.get(label, 0) / count,
                100 * found.get(label, 0) / count,
            )
            for label, count in sorted(self._images.items())
            if label >= 0
        ]
        return sorted(rows, key=lambda row: row.lost, reverse=True)


def _count(into: dict[int, int], labels: Tensor) -> None:
    values, counts = labels.unique(return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        into[value] = into.get(value, 0) + count


def advice(outcomes: Mapping[str, Outcome], task: TaskNames = NAMES) -> str:
    """Returns one line: the loss of each side, and whether the weights, the activations or both cause most of it.

    If no output changes, the line says so instead of naming a cause.
    """
    weights, activations = outcomes["weights"], outcomes["activations"]
    told = "; ".join(
        f"only {name} quantized: {_lost(outcomes['float'], outcomes[name], task)}"
        for name in ("weights", "activations")
    )
    total = weights.loss + activations.loss
    if total == 0:
        return f"{told}; quantization changes no output"
    if weights.loss >= _MOST * total:
        side = BY_WEIGHTS
    elif activations.loss >= _MOST * total:
        side = BY_ACTIVATIONS
    else:
        side = BY_BOTH
    return f"{told}; {side}"


def _lost(exact: Outcome, found: Outcome, task: TaskNames) -> str:
    """Describes the loss relative to float: by the accuracy if it is known, otherwise by the changed decisions."""
    decibel = "outputs equal" if found.sqnr is None else f"{found.sqnr:.1f} dB"
    if exact.score is not None and found.score is not None:
        lost = exact.score - found.score
        verb = (
            f"{lost:.2f} points lost"
            if lost > 0
            else f"{-lost:.2f} points gained"
            if lost < 0
            else "no points lost"
        )
        return f"{verb} ({decibel})"
    return f"{100 * (1 - found.agreement):.2f} % of float's {task.decision} changed ({decibel})"
