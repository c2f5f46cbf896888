"""Datasets whose items are the steps of sequences, and the division of sequences between the two splits.

several sequences   every other one calibrates and trains, the others verify
a single one        the first half calibrates and trains; the second half, which continues it, verifies
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol


class Items(Protocol):
    """A dataset whose items are (arrays by name, target)."""

    @property
    def targets(self) -> Sequence[int]:
        """The target of each item."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...


class Part:
    """A dataset of some items of another dataset.

    Args:
        whole: the dataset.
        indices: indices of the items, in order.
        lengths: number of items of each sequence, in order; empty if items are not steps.
        continues: whether the first sequence continues the last one of the training split.
    """

    def __init__(
        self, whole: Items, indices: Sequence[int], lengths: Sequence[int] = (), *, continues: bool = False
    ) -> None:
        self.whole, self.indices = whole, indices
        self.lengths, self.continues = tuple(lengths), continues
        self.targets = [whole.targets[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.whole[self.indices[index]]


def shared_out(whole: Items, lengths: Sequence[int]) -> tuple[Part, Part]:
    """Returns the training part and the test part of a dataset of consecutive sequences.

    Args:
        whole: the dataset, with at least two items.
        lengths: number of items of each sequence, in order.
    """
    if len(lengths) == 1:
        half = (lengths[0] + 1) // 2
        rest = range(half, lengths[0])
        return Part(whole, range(half), [half]), Part(whole, rest, [len(rest)], continues=True)
    spans = [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
    train, test = (
        Part(whole, [index for span in spans[start::2] for index in span], lengths[start::2])
        for start in (0, 1)
    )
    return train, test
