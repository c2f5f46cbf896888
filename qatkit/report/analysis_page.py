"""The section of report.html about an analysis: tables, and the drawings of `qatkit.report.svg`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from qatkit.records.analysis import ACTIVATION, ONLY, Analysis, Comparison, SensitivityRow, TensorRow
from qatkit.records.results import Results
from qatkit.report import svg
from qatkit.report.analysis_text import (
    SIDES,
    advice_line,
    class_text,
    decibels,
    rows_of,
    side_cells,
    side_columns,
    site_cells,
    site_columns,
    tensor_lines,
    titles,
    without_labels,
    worst_classes,
)
from qatkit.report.html import chart, section, table
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames

_BARS = 12  # number of sites with a bar; the others are only in the table
_STEP = 10.0  # distance between two grid lines in dB


def analysis_section(results: Results) -> str:
    """Returns the section with all requested analyses; "" if there are none."""
    found = results.analysis
    if found is None:
        return ""
    judged = without_labels(results)
    return section(
        "Effects of quantization",
        "" if found.labelled else f'<p class="soft">{escape(judged[:1].upper() + judged[1:])}.</p>',
        _isolation(results, found),
        _sensitivity(found, results.task),
        _tensors(found, results.task),
        "".join(f'<p class="soft">{escape(note)}</p>' for note in found.notes),
    )


def _isolation(results: Results, found: Analysis) -> str:
    one = found.isolation
    if one is None:
        return ""
    rows = [
        (
            "main" if key == "int8" else "",
            list(map(escape, side_cells(label, one.outcomes[key], found.labelled))),
        )
        for key, label in SIDES
        if key in one.outcomes
    ]
    classes = ", ".join(map(class_text, worst_classes(one.classes, 10)))
    return (
        f"<h3>Loss by weights and by activations, on {counted(one.outcomes['float'].images, results.task.sample)}</h3>"
        + table(side_columns(found.labelled, results.task), rows)
        + f"<p>{escape(advice_line(results))}.</p>"
        + (f"<p>Classes that lose most: {escape(classes)}.</p>" if classes else "")
    )


def _sensitivity(found: Analysis, task: TaskNames) -> str:
    parts = []
    for direction, title in titles(found).items():
        rows = rows_of(found, direction)
        if not rows:
            continue
        cells = [("", [_name(row), *map(escape, site_cells(row, found.labelled)[1:])]) for row in rows]
        every = table(site_columns(found.labelled, task), cells, "dense")
        drawn = _bars(rows[:_BARS]) if direction == ONLY else ""
        heading = f"Sensitivity: {title}"
        parts.append(
            f"<h3>{escape(heading)}</h3>{drawn}<details><summary>All {len(rows)}</summary>{every}</details>"
        )
    return "".join(parts)


def _name(row: SensitivityRow | TensorRow) -> str:
    return f'<td class="name">{_titled(row)}</td>'


def _titled(row: SensitivityRow | TensorRow) -> str:
    """Returns the kind and the name of a weight or activation, linked to its histogram file, if any."""
    title = f"{escape(row.kind)} <code>{escape(row.site)}</code>"
    picture = row.picture if isinstance(row, TensorRow) else ""
    return f'<a href="{escape(quote(picture))}">{title}</a>' if picture else title


def _bars(rows: Sequence[SensitivityRow]) -> str:
    """Returns a bar for the loss by each weight or activation, on a common scale."""
    largest = max(row.loss for row in rows) or 1.0
    items = "".join(
        f'<div><span>{escape(row.kind)} <code>{escape(row.site)}</code></span><span class="value">{row.loss:.2e}</span>'
        f"{svg.bar(row.loss / largest, row.kind)}</div>"
        for row in rows
    )
    legend = _legend(("weight", "weight"), ("activation", "activation"))
    return f'<p class="soft small">KL to float, nats. {legend}</p><div class="site-bars">{items}</div>'


def _legend(*kinds: tuple[str, str]) -> str:
    return " ".join(
        f'<span class="legend"><span class="key {kind}"></span>{escape(label)}</span>'
        for kind, label in kinds
    )


def _tensors(found: Analysis, task: TaskNames) -> str:
    one = found.comparison
    if one is None:
        return ""
    told = "".join(f"<li>{escape(line)}</li>" for line in tensor_lines(found))
    return (
        f"<h3>Tensor by tensor, on {counted(one.images, task.sample)}</h3><ul>{told}</ul>"
        f"{_depth(one)}{_histograms(one)}<details><summary>Every tensor</summary>{_tensor_table(one)}</details>"
    )


def _depth(one: Comparison) -> str:
    """Returns a drawing of the SQNR of every activation in graph order.

    One line shows it with only the activation itself quantized, the other with everything before it
    quantized.
    """
    rows = [row for row in one.rows if row.kind == ACTIVATION and row.simulated is not None]
    if len(rows) < 2:
        return ""
    own = [row.own.sqnr for row in rows]
    through = [row.simulated.sqnr for row in rows if row.simulated is not None]
    known = [value for value in (*own, *through) if value is not None] or [0.0]
    low = _STEP * math.floor(min(0.0, *known) / _STEP)
    high = _STEP * math.ceil((max(known) + 1) / _STEP)
    across = [i / (len(rows) - 1) for i in range(len(rows))]
    names = [row.site for row in rows]
    drawn = svg.lines(
        [
            ("own", list(zip(across, own, strict=True)), names),
            ("through", list(zip(across, through, strict=True)), names),
        ],
        low,
        high,
        _STEP,
    )
    count = round((high - low) / _STEP)
    ticks = [f"{low + _STEP * i:.0f}" for i in range(count, -1, -1)]
    ends = (f"<code>{escape(names[0])}</code>", f"<code>{escape(names[-1])}</code>")
    legend = _legend(("own", "only its own quantization"), ("through", "with everything before it"))
    return (
        f"<h3>SQNR of the activations through the depth, dB</h3><p class='soft small'>{legend}</p>"
        + chart(drawn, ticks, ends)
    )


def _histograms(one: Comparison) -> str:
    shown = [row for row in one.rows if row.histogram is not None]
    items = "".join(_histogram(row) for row in shown)
    if not items:
        return ""
    legend = _legend(("area", "float"), ("found", "quantized"), ("end", "ends of the range"))
    return (
        f"<h3>Values and ranges</h3><p class='soft small'>Counts on a logarithmic scale. {legend}</p>"
        f'<div class="histograms">{items}</div>'
    )


def _histogram(row: TensorRow) -> str:
    assert row.histogram is not None
    low = min(row.histogram.low, row.histogram.range_low)
    high = max(row.histogram.high, row.histogram.range_high)
    return (
        f"<figure><figcaption>{_titled(row)}</figcaption>"
        f'{svg.histogram(row.histogram)}<div class="ends"><span>{low:.3g}</span>'
        f"<span>{100 * row.clipped:.2g} % clipped, {100 * row.grid:.0f} % of the grid</span><span>{high:.3g}</span>"
        "</div></figure>"
    )


def _tensor_table(one: Comparison) -> str:
    head = ("tensor, in order", "own dB", "simulated dB", "ORT dB", "cosine", "MSE", "largest", "shift", "clipped %",
            "grid %", "avoidable dB")  # fmt: skip
    return table(head, [_tensor_row(row, row_is_suspect(row, one)) for row in one.rows], "dense")


def row_is_suspect(row: TensorRow, one: Comparison) -> bool:
    """Returns whether a row is that of the tensor whose scale is suspect."""
    return f"{row.kind} {row.site}" == one.suspect


def _tensor_row(row: TensorRow, suspect: bool) -> tuple[str, list[str]]:
    seen = row.simulated or row.own
    others = ["-" if one is None else decibels(one.sqnr) for one in (row.simulated, row.runtime)]
    return "problem" if suspect else "", [
        _name(row),
        decibels(row.own.sqnr),
        *others,
        f"{seen.cosine:.5f}",
        f"{seen.mse:.2e}",
        f"{seen.largest:.2e}",
        f"{seen.shift:.2e}",
        f"{100 * row.clipped:.2g}",
        f"{100 * row.grid:.0f}",
        f"{row.avoidable:.1f}",
    ]
