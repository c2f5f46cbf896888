"""A PNG file per quantized tensor: histograms of its float and quantized values, its range, and its steps.

The page shows the histograms of a few tensors, and its table of all tensors links to these files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qatkit.records.analysis import WEIGHT, Comparison, Histogram, TensorRow
from qatkit.records.run_files import PICTURES
from qatkit.report.analysis_text import decibels
from qatkit_verify.files import whole

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import BaseImageFont

FOLDER = "histograms"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 360, 20, 60, 60
_FLOAT, _QUANTIZED, _END, _STEP, _TEXT = "#8fa0b5", "#1f6feb", "#b3261e", "#57606a", "#1f2328"
_LEAST_GAP = 3.0  # smallest distance between two drawn steps in pixels
_LONGEST = 100  # number of characters of a site in a file name


def draw_histograms(folder: Path, found: Comparison) -> Comparison:
    """Writes a PNG file for each row with a histogram to a run's folder; returns `found` with the file names."""
    place = folder / PICTURES / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, row in enumerate(found.rows):
        if row.histogram is None:
            rows.append(row)
            continue
        site = re.sub(r"[^A-Za-z0-9_.-]+", "_", row.site)[:_LONGEST]
        name = f"{number:04}_{row.kind}_{site}.png"
        with whole(place / name) as temporary:
            _draw(Path(temporary), row, row.histogram)
        rows.append(replace(row, picture=f"{PICTURES}/{FOLDER}/{name}"))
    return replace(found, rows=rows)


def _draw(path: Path, row: TensorRow, found: Histogram) -> None:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    low, high = min(found.low, found.range_low), max(found.high, found.range_high)
    every = _every(found, low, high)
    _write(pen, 8, f"{row.kind} {row.site}", 16)
    _write(pen, 32, _about(row, found, every), 13)
    _bars(pen, found, low, high)
    for end in (found.range_low, found.range_high):
        x = _across(end, low, high)
        pen.line((x, _TOP, x, _HEIGHT - _BOTTOM), _END, 2)
    for value in steps(found, every):
        x = _across(value, low, high)
        pen.line((x, _HEIGHT - _BOTTOM + 2, x, _HEIGHT - _BOTTOM + 9), _STEP)
    pen.text((_LEFT, _HEIGHT - 42), f"{low:.4g}", _TEXT, _font(13))
    last = f"{high:.4g}"
    pen.text((_WIDTH - _LEFT - pen.textlength(last, _font(13)), _HEIGHT - 42), last, _TEXT, _font(13))
    _write(pen, _HEIGHT - 22, "counts on a logarithmic scale: filled float, line quantized", 13)
    image.save(path, "PNG", optimize=True)


def _about(row: TensorRow, found: Histogram, every: int) -> str:
    """Returns the figures of a tensor as text."""
    widest = " (largest of its scales)" if row.kind == WEIGHT else ""
    drawn = "" if every == 1 else f", one of {every} is drawn"
    sqnr = "equal to float" if row.own.sqnr is None else f"SQNR {decibels(row.own.sqnr)} dB"
    return (
        f"range {found.range_low:.4g} to {found.range_high:.4g}, steps of {found.step:.3g}{widest}{drawn};"
        f" {100 * row.clipped:.2g} % clipped, {100 * row.grid:.0f} % of the steps used, {sqnr}"
    )


def steps(found: Histogram, every: int = 1) -> list[float]:
    """Returns every `every`th value that the quantized tensor can have, from the lower end of its range.

    It is [] if the step is not positive.
    """
    if found.step <= 0:
        return []
    count = round((found.range_high - found.range_low) / found.step)
    return [found.range_low + i * found.step for i in range(0, count + 1, every)]


def _every(found: Histogram, low: float, high: float) -> int:
    """Returns the distance between drawn steps, a power of two, so that they can be distinguished."""
    if found.step <= 0 or high <= low:
        return 1
    gap = (_WIDTH - 2 * _LEFT) * found.step / (high - low)
    return 1 if gap >= _LEAST_GAP else 2 ** math.ceil(math.log2(_LEAST_GAP / gap))


def _bars(pen: ImageDraw, found: Histogram, low: float, high: float) -> None:
    """Draws the counts of the float values as filled bins and those of the quantized values as a line."""
    width = (found.high - found.low) / len(found.exact)
    top = math.log1p(max(*found.exact, *found.found, 1))
    floor = _HEIGHT - _BOTTOM

    def places(counts: Sequence[int]) -> list[tuple[float, float, float]]:
        ends = [_across(found.low + i * width, low, high) for i in range(len(counts) + 1)]
        heights = [floor - (floor - _TOP) * math.log1p(count) / top for count in counts]
        return [(left, right, y) for left, right, y in zip(ends, ends[1:], heights, strict=False)]

    for left, right, y in places(found.exact):
        pen.rectangle((left, y, right, floor), _FLOAT)
    outline = [(x, y) for left, right, y in places(found.found) for x in (left, right)]
    pen.line(outline, _QUANTIZED, 2)
    pen.line((_LEFT, floor, _WIDTH - _LEFT, floor), _TEXT)


def _across(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return _LEFT + (_WIDTH - 2 * _LEFT) * share


def _write(pen: ImageDraw, y: float, text: str, size: int) -> None:
    pen.text((_LEFT, y), text, _TEXT, _font(size))


def _font(size: int) -> BaseImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
