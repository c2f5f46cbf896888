"""The building blocks of the sections of report.html."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, *parts: str) -> str:
    """Returns a box of the page with its heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], style: str = "") -> str:
    """Returns a table.

    Args:
        head: the column headings.
        rows: (CSS class of the row, cells) for each row; a cell is HTML: a `<td ...>`, or content to be
            wrapped in one. If a cell of the first row is left-aligned, so is the heading above it.
        style: the CSS class of the table.
    """
    rows = list(rows)
    textual = [cell.startswith('<td class="left') for cell in rows[0][1]] if rows else [False] * len(head)
    header = "".join(
        f'<th class="left">{escape(column)}</th>' if left else f"<th>{escape(column)}</th>"
        for column, left in zip(head, textual, strict=True)
    )
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in cells)
        + "</tr>\n"
        for kind, cells in rows
    )
    drawn = f'<table class="{style}"><thead><tr>{header}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="scroll">{drawn}</div>'


def chip(kind: str, text: str) -> str:
    """Returns a word on a background in the colour of `kind`: good, bad, warn, plain."""
    return f'<span class="chip {kind}">{escape(text)}</span>'


def chart(drawing: str, ticks: Sequence[str], ends: tuple[str, str], pins: str = "") -> str:
    """Returns a drawing of `qatkit.report.svg` with its labels.

    Args:
        drawing: the SVG, which stretches with the page.
        ticks: the labels of its left edge, the highest first.
        ends: the HTML below its left and its right end.
        pins: the HTML in front of the drawing (`pin`), whose size does not depend on the width of the page.
    """
    beside = "".join(f"<span>{tick}</span>" for tick in ticks)
    drawing = f'<div class="front">{drawing}{pins}</div>' if pins else drawing
    return (
        f'<div class="depth"><div class="ticks">{beside}</div>{drawing}</div>'
        f'<div class="ends">{ends[0]}{ends[1]}</div>'
    )


def pin(number: int, x: float, y: float, *, chosen: bool) -> str:
    """Returns a number on a drawing; x and y are shares of the drawing's width and height, from the lower left."""
    kind = "pin chosen" if chosen else "pin"
    return f'<span class="{kind}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%">{number}</span>'
