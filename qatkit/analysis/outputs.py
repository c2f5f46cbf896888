"""Measures how far outputs deviate from those of the float graph, by sums that can be stored and continued.

    row          the values, one per class, from which one decision is made. Outputs [N, classes] have a row per
                 image, [N, classes, H, W] per pixel, and [N, T, classes] per position. A single class (such as [N]
                 or [N, 1, H, W]) counts as two: one with the value 0, one with the value of the output.
    loss         Kullback-Leibler divergence KL(softmax(float) || softmax(found)) in nats per row
    SQNR         10 log10(sum float^2 / sum (float - found)^2) in dB for each output; the lowest one counts

Rows come from the first floating-point output. Labels that are not the index of a class (such as those for borders or
for unlabelled pixels) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.records.analysis import Outcome

Outputs = Sequence[Tensor]


@dataclass
class Sums:
    """The sums over the batches of one quantized graph or file.

    Attributes:
        images: the number of images.
        rows: the number of rows.
        same: the number of rows with the same decision as float.
        labelled: the number of rows with a label.
        right: the number of rows whose decision is their label.
        divergence: the sum of the divergences of all rows, in nats.
        entropy: the sum of the cross-entropies of the labelled rows, in nats.
        signal: the sum of squares of each float output.
        noise: the sum of squared errors of each output.
    """

    images: int = 0
    rows: int = 0
    same: int = 0
    labelled: int = 0
    right: int = 0
    divergence: float = 0.0
    entropy: float = 0.0
    signal: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the sums as plain values that a file can store; `Sums(**...)` reads them."""
        return asdict(self)

    def outcome(self) -> Outcome:
        """Returns the metrics, computed from the sums."""
        rows, known = max(1, self.rows), self.labelled > 0
        return Outcome(
            self.images,
            100 * self.right / self.labelled if known else None,
            self.same / rows,
            max(0.0, self.divergence / rows),
            self.entropy / self.labelled if known else None,
            self._sqnr(),
        )

    def _sqnr(self) -> float | None:
        pairs = zip(self.signal, self.noise, strict=True)
        return min((decibel(one, other) for one, other in pairs if other), default=None)


def decibel(signal: float, noise: float) -> float:
    """Returns the ratio of two energies in dB, at least -300; `noise` must be above 0."""
    return 10 * math.log10(signal / noise) if signal / noise > 1e-30 else -300.0


class Exact:
    """The float graph's outputs for one batch, with values that are needed repeatedly.

    Args:
        outputs: the outputs of the float graph.
        labels: one label per row, such as [N] or [N, H, W]; None if there are none. Labels that are not integers, or
            whose number differs from that of the rows, are ignored.

    Attributes:
        outputs: the floating-point outputs; if there are none, the first output as float64.
    """

    def __init__(self, outputs: Outputs, labels: Any = None) -> None:
        self._floats = self.outputs = _floats(outputs)
        rows = rows_of(self._floats[0])
        self._log, self._best = rows.log_softmax(1), rows.argmax(1)
        self._images = len(self._floats[0]) if self._floats[0].ndim else 1
        self._labels = _labels(labels, rows)

    def add(self, sums: Sums, outputs: Outputs) -> Tensor:
        """Compares outputs of a quantized graph or file for the same batch with float, and adds the result to `sums`.

        Returns:
            The decisions of the quantized graph or file, [rows].
        """
        found = _floats(outputs)
        rows = rows_of(found[0])
        log, best = rows.log_softmax(1), rows.argmax(1)
        sums.images += self._images
        sums.rows += len(rows)
        sums.same += int((best == self._best).sum())
        sums.divergence += float((self._log.exp() * (self._log - log)).sum())
        if self._labels is not None:
            here = self._labels >= 0
            sums.labelled += int(here.sum())
            sums.right += int((best == self._labels)[here].sum())
            sums.entropy += float(F.nll_loss(log[here], self._labels[here], reduction="sum"))
        sums.signal = _added(sums.signal, [float(x.double().square().sum()) for x in self._floats])
        noise = [
            float((x.double() - y.double()).square().sum()) for x, y in zip(self._floats, found, strict=True)
        ]
        sums.noise = _added(sums.noise, noise)
        return best


def _floats(outputs: Outputs) -> list[Tensor]:
    found = [one.detach() for one in outputs if one.is_floating_point()]
    return found or [outputs[0].detach().double()]


def rows_of(output: Tensor) -> Tensor:
    """Returns an output as float64 [rows, classes]; a single class becomes two, the first with the value 0."""
    values = output.double()
    if values.ndim < 2:
        values = values.reshape(-1, 1)
    elif values.ndim != 3:  # with three axes, the classes are the last one
        values = values.movedim(1, -1)
    values = values.reshape(-1, values.shape[-1])
    return torch.cat([torch.zeros_like(values), values], 1) if values.shape[1] == 1 else values


def _labels(labels: Any, rows: Tensor) -> Tensor | None:
    """Returns the labels [rows], negative for rows without a label.

    Returns None if labels are not integers, if their number is not that of the rows, or if no row has a label.
    """
    if labels is None:
        return None
    known = torch.as_tensor(labels, device=rows.device)
    if known.is_floating_point() or known.numel() != len(rows):
        return None
    flat = known.reshape(-1).long()
    flat = torch.where(flat < rows.shape[1], flat, -1)
    return flat if bool((flat >= 0).any()) else None


def _added(sums: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums or [0.0] * len(more), more, strict=True)]
