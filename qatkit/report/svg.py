"""Drawings for the pages as inline SVG without scripts. They stretch with the page.

A drawing contains no text, since text would stretch too and be unreadable at a width of 400 pixels. Labels
are HTML around the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from qatkit.records.analysis import Histogram

_HEIGHT = 100.0
Line = Sequence[tuple[float, float | None]]  # (horizontal position from 0 to 1, value or None)


def bar(share: float, kind: str = "") -> str:
    """Returns a bar that fills `share` (0 to 1) of the drawing's width; `kind` is its CSS class."""
    width = 100 * min(1.0, max(0.0, share))
    return _drawing(
        "bar-svg", f'<rect class="{kind}" x="0" y="0" width="{width:.2f}" height="{_HEIGHT:.0f}"/>'
    )


def lines(
    series: Sequence[tuple[str, Line, Sequence[str]]], low: float, high: float, step: float, unit: str = "dB"
) -> str:
    """Returns points and the lines between them, over a grid of horizontal lines.

    Args:
        series: (CSS class, points, name of each point) for each line. A point is a horizontal position from
            0 to 1 and a value; points whose value is None are left out.
        low, high: the values of the lower and the upper edge.
        step: the distance between two grid lines.
        unit: the unit of the values.
    """
    count = round((high - low) / step)
    parts = [_path("grid", [(0.0, i / count), (1.0, i / count)]) for i in range(count + 1)]
    for kind, points, names in series:
        known = [
            (x, (y - low) / (high - low), y, n)
            for (x, y), n in zip(points, names, strict=True)
            if y is not None
        ]
        parts.append(_path(kind, [(x, y) for x, y, _, _ in known]))
        parts += [_dot(kind, x, y, f"{name}: {value:.1f} {unit}") for x, y, value, name in known]
    return _drawing("lines-svg", "".join(parts))


def points(dots: Sequence[tuple[str, tuple[float, float], str]], grid: int) -> str:
    """Returns dots over a grid of `grid` + 1 horizontal lines.

    Args:
        dots: (CSS class, (horizontal, vertical position from 0 to 1), name) for each dot.
        grid: the number of intervals between grid lines.
    """
    parts = [_path("grid", [(0.0, i / grid), (1.0, i / grid)]) for i in range(grid + 1)]
    parts += [_dot(kind, x, y, name) for kind, (x, y), name in dots]
    return _drawing("lines-svg", "".join(parts))


def histogram(found: Histogram) -> str:
    """Returns a histogram with a logarithmic scale of counts.

    Float values are filled, quantized values are a line, and the ends of the range are vertical lines.
    """
    low, high = min(found.low, found.range_low), max(found.high, found.range_high)
    top = math.log1p(max(*found.exact, *found.found, 1))
    span = high - low or 1.0
    width = (found.high - found.low) / len(found.exact)

    def steps(counts: Sequence[int]) -> list[tuple[float, float]]:
        outline = []
        for i, count in enumerate(counts):
            height = math.log1p(count) / top
            outline += [((found.low + (i + side) * width - low) / span, height) for side in (0, 1)]
        return outline

    exact, quantized = steps(found.exact), steps(found.found)
    area = [(exact[0][0], 0.0), *exact, (exact[-1][0], 0.0)]
    ends = [(end - low) / span for end in (found.range_low, found.range_high)]
    return _drawing(
        "histogram-svg",
        _path("area", area)
        + _path("found", quantized)
        + "".join(_path("end", [(x, 0.0), (x, 1.0)]) for x in ends),
    )


def _drawing(kind: str, content: str) -> str:
    return f'<svg class="{kind}" viewBox="0 0 100 {_HEIGHT:.0f}" preserveAspectRatio="none" role="img">{content}</svg>'


def _place(x: float, y: float) -> str:
    return f"{100 * min(1.0, max(0.0, x)):.2f} {_HEIGHT * (1 - min(1.0, max(0.0, y))):.2f}"


def _path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{kind}" d="M{" L".join(_place(x, y) for x, y in points)}"/>' if points else ""


def _dot(kind: str, x: float, y: float, name: str) -> str:
    """Returns a stroke of length zero with round ends, which stays a circle if the drawing stretches."""
    return f'<path class="dot {kind}" d="M{_place(x, y)} h0"><title>{escape(name)}</title></path>'
