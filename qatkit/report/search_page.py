"""The page search.html, which needs no scripts or network: the trials of a study, the Pareto front first.

With several objectives, the first two are drawn against each other. A single objective is drawn over the
numbers of the trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from qatkit.records.objectives import finite
from qatkit.records.study import Study, Trial
from qatkit.report import svg
from qatkit.report.html import chart, chip, pin, section, table
from qatkit.report.search_text import bounds_missed, cells, columns, heads, shown
from qatkit_verify.files import write_text

PAGE = "search.html"
_LINES = 4  # number of grid lines
_KIND = {"complete": "good", "pruned": "plain", "failed": "bad", "running": "warn"}


def write_search_page(path: Path, study: Study) -> None:
    """Writes the page in an atomic step."""
    write_text(path, search_page(study))


def search_page(study: Study) -> str:
    """Returns the page as one HTML document."""
    css = resources.files("qatkit.report").joinpath("page.css").read_text(encoding="utf-8")
    aims = ", ".join(
        f"{name} ({'maximize' if study.known[name].largest else 'minimize'})" for name in study.objectives
    )
    bounds = f"; constraints: {', '.join(study.constraints)}" if study.constraints else ""
    parts = (
        f"<header><h1>{escape(study.name)}: search</h1></header>"
        f'<p class="soft">{escape(study.told())}. Objectives: {escape(aims + bounds)}.</p>',
        section("Front", _drawing(study), _table(study, study.front)),
        section("All trials", _table(study, study.trials, states=True)),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(study.name)}: search</title><style>\n{css}</style></head><body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _table(study: Study, trials: Sequence[Trial], *, states: bool = False) -> str:
    if not trials:
        within = " within the constraints" if study.constraints else ""
        return f'<p class="soft">No trial completed{within}.</p>'
    names = columns(study)
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    tested = not states  # readers should not choose by the test figures of all trials
    head = ("trial", *(["state"] if states else []), *heads(study, names, tested=tested), *keys)
    rows = [
        (
            "main" if states and trial.front else "",
            [
                str(trial.number),
                *([_state(trial)] if states else []),
                *cells(trial, names, tested=tested),
                *(escape(shown(trial.values.get(key, "-"))) for key in keys),
            ],
        )
        for trial in trials
    ]
    return table(head, rows, "dense")


def _state(trial: Trial) -> str:
    word = trial.state if trial.state != "complete" or trial.feasible else "outside"
    told = chip("warn" if word == "outside" or trial.shortfalls else _KIND[trial.state], word)
    more = [trial.reason] if trial.reason else []
    more += [f"falls short of {bounds_missed(trial)}"] if trial.shortfalls else []
    more += [f"after epoch {len(trial.epochs)}"] if trial.state == "pruned" else []
    more += [f"started {trial.attempts} times"] if trial.attempts > 1 else []
    return f'<td class="left">{told} <span class="soft small">{escape("; ".join(more))}</span></td>'


def _drawing(study: Study) -> str:
    """Returns a drawing of the completed trials, with numbers on the front; "" for fewer than two trials."""
    first = study.objectives[0]
    second = study.objectives[1] if len(study.objectives) > 1 else None
    done = [trial for trial in study.trials if trial.state == "complete"]
    if len(done) < 2:
        return ""
    ups = [finite(first, trial.figures[first]) for trial in done]
    acrosses = [
        float(trial.number) if second is None else finite(second, trial.figures[second]) for trial in done
    ]
    places = list(zip(_shares(acrosses), _shares(ups), strict=True))
    names = [f"trial {trial.number}" for trial in done]
    drawn = svg.points([("through" if trial.front else "own", place, name)
                        for trial, place, name in zip(done, places, names, strict=True)], _LINES)  # fmt: skip
    pins = "".join(
        pin(trial.number, x, y, chosen=True)
        for trial, (x, y) in zip(done, places, strict=True)
        if trial.front
    )
    low, high = _ends(ups)
    ticks = [f"{low + (high - low) * i / _LINES:.4g}" for i in range(_LINES, -1, -1)]
    left, right = _ends(acrosses)
    below = "trial" if second is None else study.known[second].title
    ends = (f"<span>{left:.4g}</span>", f"<span>{right:.4g}</span>")
    title = f"<h3>{escape(study.known[first].title)}, over {escape(below)}</h3>"
    return title + chart(drawn, ticks, ends, pins)


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    """Returns the limits of an axis with a margin; outliers beyond Tukey's outer fences are drawn on the edges."""
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    fence = 3 * (third - first)
    near = [one for one in numbers if first - fence <= one <= third + fence]
    low, high = min(near), max(near)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _shares(numbers: Sequence[float]) -> list[float]:
    low, high = _ends(numbers)
    return [min(1.0, max(0.0, (one - low) / (high - low))) for one in numbers]
