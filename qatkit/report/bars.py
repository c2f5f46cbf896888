"""The bar charts of report.html, with one bar for each row of the table."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Results


def charts(results: Results) -> str:
    """Returns the charts of accuracy (or of the figure that replaces it) and latency; unmeasured ones are left out."""
    found = "".join(filter(None, (_share_bars(results), _latency_bars(results))))
    return f'<div class="cols">{found}</div>'


def _share_bars(results: Results) -> str:
    """Returns a chart of the main metric if it is in percent; without labels, of the share of equal decisions."""
    task = results.task
    if results.labelled and task.main.unit != "%":
        return ""
    if results.labelled:
        head = f"{task.main.name[:1].upper()}{task.main.name[1:]}, 0 to 100 %"
        shares = {key: one.score for key, one in results.accuracy.items()}
    else:
        head = f"Same {task.decision} as the float file, 0 to 100 %"
        shares = {key: 100 * one.agreement for key, one in results.fidelity.items()}
    bars = [
        _bar(key, label, shares[key], f"{shares[key]:.2f} %") for key, label in results.rows if key in shares
    ]
    return f'<div><h3>{head}</h3><div class="bars">{"".join(bars)}</div></div>' if bars else ""


def _latency_bars(results: Results) -> str:
    if not results.latency:
        return ""
    full = max(latency.p90_ms for latency in results.latency.values()) * 1.02
    bars = []
    for key, label in results.rows:
        latency = results.latency.get(key)
        if latency is not None:
            start, end = 100 * latency.p10_ms / full, 100 * latency.p90_ms / full
            spread = f'<u style="left:{start:.2f}%;width:{end - start:.2f}%"></u>'
            bars.append(
                _bar(key, label, 100 * latency.median_ms / full, f"{latency.median_ms:.2f} ms", spread)
            )
    return f'<div><h3>Latency, median and p10-p90</h3><div class="bars">{"".join(bars)}</div></div>'


def _bar(key: str, label: str, percent: float, value: str, extra: str = "") -> str:
    kind = "int8" if key in ("int8", "simulated") else ""
    bar = f'<div class="bar {kind}"><i style="width:{percent:.2f}%"></i>{extra}</div>'
    return f'<span>{escape(label)}</span>{bar}<span class="value">{value}</span>'
