"""PNG files with drawings of an analysis and of the Pareto front of mixed precisions; requires matplotlib.

The page has the same drawings as inline SVG (`qatkit.report.svg`) and needs no library.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.records.analysis import ACTIVATION, ONLY, Analysis, Comparison, SensitivityRow, TensorRow
from qatkit.records.precision import Precision
from qatkit.report.analysis_text import rows_of
from qatkit_verify.files import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"weight": "#8fa0b5", "activation": "#1f6feb"}
_BARS, _WIDE, _DPI = 20, 9.0, 120


def draw(folder: Path, found: Analysis) -> list[str]:
    """Writes the available drawings into `folder`, which is created; returns the names of the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    made: list[str] = []

    def save(name: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> None:
        made.append(_save(folder, name, inches, paint))

    folder.mkdir(exist_ok=True)
    rows = rows_of(found, ONLY)[:_BARS]
    if rows:
        save("sensitivity.png", (_WIDE, 1.2 + 0.28 * len(rows)), lambda figure: _bars(figure, rows))
    one = found.comparison
    if one is not None:
        save("sqnr.png", (_WIDE, 4.0), lambda figure: _depth(figure, one))
        shown = [row for row in one.rows if row.histogram is not None]
        if shown:
            lines = -(-len(shown) // 3)
            save("histograms.png", (_WIDE, 2.4 * lines), lambda figure: _histograms(figure, shown, lines))
    return made


def draw_front(folder: Path, front: Precision) -> list[str]:
    """Writes the drawing of a Pareto front of mixed precisions into `folder`; returns the names of the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    folder.mkdir(exist_ok=True)
    return [_save(folder, "precision.png", (_WIDE, 4.5), lambda figure: _front(figure, front))]


def _save(folder: Path, name: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=_DPI, layout="constrained")
    paint(figure)
    with whole(folder / name) as temporary:
        figure.savefig(temporary, format="png")
    return name


def _front(figure: Figure, front: Precision) -> None:
    axes = figure.subplots()
    known = [point for point in front.points if point.sqnr_db is not None]
    axes.plot([point.ms for point in known], [float(point.sqnr_db or 0) for point in known], ".-")
    for point in front.points:
        label, weight = f"{point.number}: {point.name}", "bold" if point.chosen else "normal"
        if point.sqnr_db is None:
            axes.axvline(point.ms, linestyle=":", color=_COLOURS["weight"])
            axes.annotate(
                label, (point.ms, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8
            )
        else:
            place = (point.ms, point.sqnr_db)
            axes.annotate(label, place, (5, -9), textcoords="offset points", fontsize=8, weight=weight)
    axes.set_xlabel("ms per run")
    axes.set_ylabel("SQNR of the outputs, dB")


def _bars(figure: Figure, rows: list[SensitivityRow]) -> None:
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row.loss for row in rows], color=[_COLOURS[row.kind] for row in rows])
    axes.set_yticks(places, [f"{row.kind} {row.site}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("KL to float with only this site quantized, nats")


def _depth(figure: Figure, one: Comparison) -> None:
    axes = figure.subplots()
    rows = [row for row in one.rows if row.kind == ACTIVATION]
    for label, values in {
        "only its own quantization": [row.own.sqnr for row in rows],
        "with everything before it": [None if row.simulated is None else row.simulated.sqnr for row in rows],
        "ONNX Runtime": [None if row.runtime is None else row.runtime.sqnr for row in rows],
    }.items():
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        if known:
            style = ":" if label == "ONNX Runtime" else "-"
            axes.plot(*zip(*known, strict=True), style, marker=".", label=label)
    axes.set_ylabel("SQNR, dB")
    axes.set_xticks(range(len(rows)), [row.site for row in rows], rotation=90, fontsize=6)
    axes.legend(fontsize=8)


def _histograms(figure: Figure, rows: list[TensorRow], lines: int) -> None:
    every: Any = figure.subplots(lines, 3, squeeze=False).flat
    for axes, row in zip(every, rows, strict=False):
        found = row.histogram
        assert found is not None
        edges = [
            found.low + i * (found.high - found.low) / len(found.exact) for i in range(len(found.exact) + 1)
        ]
        axes.stairs(found.exact, edges, fill=True, color=_COLOURS["weight"], label="float")
        axes.stairs(found.found, edges, color=_COLOURS["activation"], label="quantized")
        for end in (found.range_low, found.range_high):
            axes.axvline(end, color="#b3261e", linestyle="--", linewidth=1)
        axes.set_yscale("symlog")
        axes.set_title(f"{row.kind} {row.site}", fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in list(every)[len(rows) :]:
        axes.set_axis_off()
