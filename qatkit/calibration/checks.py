"""Reports if a calibration set has too few images, none of some classes, or the same image again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.observers import HistogramObserver
from qatkit.quant.observers.range_methods import Ends

# The ranges after the fraction _SHARE of the images are compared with the final ones. A range has moved if one of its
# ends has moved by more than the fraction _MOVED of its length. A set is too small if more than the fraction
# _TOO_MANY of the ranges have moved.
_SHARE, _MOVED, _TOO_MANY = 0.4, 0.05, 0.1
_NAMED = 5

Batch = tuple[Tensor, Tensor]


class Watch:
    """Watches a calibration pass: `watch(batches)` yields the images of batches of (images, labels).

    Args:
        graph_module: the prepared graph that is calibrated.
        images: the number of images that will pass.
        classes: the names of the labels; empty if labels are not counted.
        samples: the name of what passes, in the plural.
    """

    def __init__(
        self, graph_module: fx.GraphModule, images: int, classes: Sequence[str], samples: str = "images"
    ) -> None:
        self.graph_module, self.images, self.classes, self.samples = graph_module, images, classes, samples
        self.seen, self.count = Counter[int](), 0
        self.before: dict[str, Ends] = {}
        self.at = 0
        self.first: list[Tensor] = []
        self.equal = True

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        for images, labels in batches:
            if not self.before and self.count >= _SHARE * self.images:
                self.before, self.at = ranges(self.graph_module), self.count
            self.count += len(labels)
            self.equal = self.equal and self._repeats_first(images)
            if self.classes:
                self.seen.update(labels.unique().tolist())
            yield images

    def notes(self) -> list[str]:
        """Returns notes on the calibration set, one line each; it must be called after the ranges were chosen."""
        lines = [self._movement() if self.before else self._unwatched(), self._missing(), self._repeated()]
        return [line for line in lines if line]

    def _repeats_first(self, images: Any) -> bool:
        """Returns whether every sample of a batch equals the first sample that passed."""
        leaves = [one for one in tree_leaves(images) if isinstance(one, Tensor)]
        self.first = self.first or [one[:1].clone() for one in leaves]
        return all(
            one.shape[1:] == first.shape[1:] and torch.equal(one, first.expand_as(one))
            for one, first in zip(leaves, self.first, strict=True)
        )

    def _repeated(self) -> str:
        if not self.equal or self.count < 2:
            return ""
        return f"calibration: all {self.count:,} {self.samples} are equal; check the data"

    def _movement(self) -> str:
        after = ranges(self.graph_module)
        moves = {name: movement(self.before[name], after[name]) for name in self.before.keys() & after.keys()}
        moved = [name for name, move in moves.items() if move > _MOVED]
        if len(moved) <= _TOO_MANY * len(moves):
            return ""
        worst = max(moved, key=moves.__getitem__)
        return (
            f"calibration: {len(moved)} of {len(moves)} ranges moved by more than {100 * _MOVED:.0f} % between"
            f" {self.at:,} and {self.count:,} {self.samples} ({worst}:"
            f" {100 * moves[worst]:.0f} %); raise calibration.images if there are more"
        )

    def _unwatched(self) -> str:
        if not ranges(self.graph_module):  # only weights are quantized
            return ""
        return (
            f"calibration: all {self.samples} ({self.count:,}) were in one batch, so it is not known whether more would"
            " move the ranges; set a smaller calibration.batch_size to find out"
        )

    def _missing(self) -> str:
        missing = [name for label, name in enumerate(self.classes) if not self.seen[label]]
        if not missing:
            return ""
        named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        have = "has" if len(missing) == 1 else "have"
        return (
            f"calibration: {len(missing)} of {len(self.classes)} classes {have} no {self.samples} in the calibration"
            f" set ({named})"
        )


def ranges(graph_module: fx.GraphModule) -> dict[str, Ends]:
    """Returns the range that each observer has found so far, by the site of its tensor."""
    found = {}
    for name, quantizer in fake_quantizers(graph_module).items():
        observer = quantizer.observer
        if observer is None or not observer.seen:
            continue
        if isinstance(observer, HistogramObserver):
            found[name] = observer.method.range_of(observer.histogram, quantizer.spec)
        else:
            found[name] = (observer.low.item(), observer.high.item())
    return found


def movement(before: Ends, after: Ends) -> float:
    """Returns the larger change of the two ends of a range, relative to the longer of the two ranges."""
    length = max(after[1] - after[0], before[1] - before[0])
    return max(abs(a - b) for a, b in zip(after, before, strict=True)) / length if length else 0.0
