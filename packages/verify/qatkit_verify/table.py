"""Formats rows of cells as columns of text."""

from __future__ import annotations

from collections.abc import Sequence


def drawn(rows: Sequence[Sequence[str]], *, figures: bool = False) -> list[str]:
    """Returns rows of cells as lines, each column as wide as its widest cell.

    Args:
        rows: rows of the same length.
        figures: whether all columns except the first are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if figures and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
