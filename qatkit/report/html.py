"""What the sections of report.html are built of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, *parts: str) -> str:
    """A box of the page with its heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], style: str = "") -> str:
    """`rows` are (class of the row, cells); a cell is finished HTML: a `<td ...>` or text to be wrapped."""
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
    """A word on a ground of the colour of `kind`: good, bad, warn, plain."""
    return f'<span class="chip {kind}">{escape(text)}</span>'
