"""A search on the terminal: a line per trial during the search, a table of the Pareto front at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from qatkit.records.objectives import OBJECTIVES
from qatkit.records.study import Study, Trial
from qatkit.report.runs import print_table
from qatkit.report.summary import figure

_ALWAYS = ("accuracy", "latency", "size")


def columns(study: Study) -> list[str]:
    """Returns the names of the figures to show: objectives, constraints, then those shown for every run."""
    named = [*study.objectives, *(one.split("<")[0].split(">")[0] for one in study.constraints), *_ALWAYS]
    return list(dict.fromkeys(named))


def shown(value: object) -> str:
    """Returns a proposed value as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def values(proposed: Mapping[str, object]) -> str:
    """Returns the proposed settings as they would be typed."""
    return " ".join(f"{key}={shown(value)}" for key, value in proposed.items())


def heads(study: Study, names: Sequence[str], *, tested: bool) -> list[str]:
    """Returns the column headings for `cells`."""
    found = []
    for name in names:
        one = study.known[name]
        found.append(f"{name}, {one.title}" + (", held out" if one.of_images else ""))
        found += ["of test data"] if tested and one.of_images else []
    return found


def cells(trial: Trial, names: Sequence[str], *, tested: bool = False) -> list[str]:
    """Returns the figures of a trial.

    Args:
        trial: a trial.
        names: the names of the figures.
        tested: whether each figure of held-out images is followed by the same figure of the test images.
    """
    found = []
    for name in names:
        found.append(_cell(name, trial.figures))
        found += [_cell(name, trial.tested)] if tested and OBJECTIVES[name].of_images else []
    return found


def _cell(name: str, figures: Mapping[str, float]) -> str:
    value = figures.get(name)
    return "equal" if value == math.inf else figure(value, f"{{:.{OBJECTIVES[name].digits}f}}")


def trial_line(study: Study, number: int) -> str:
    """Returns the line of a trial that has ended, for printing during the search."""
    trial = next(one for one in study.trials if one.number == number)
    return f"trial {number}: {_became(study, trial)} ({values(trial.values)})"


def _became(study: Study, trial: Trial) -> str:
    """Returns a description of a trial's outcome."""
    told = trial.state + (f" after epoch {len(trial.epochs)}" if trial.state == "pruned" else "")
    if trial.state == "complete":
        told = ", ".join(
            f"{name} {cell}"
            for name, cell in zip(study.objectives, cells(trial, study.objectives), strict=True)
        )
        told += "" if trial.feasible else " (violates the constraints)"
        told += f" (falls short of {bounds_missed(trial)})" if trial.shortfalls else ""
    return told + (f": {trial.reason}" if trial.reason else "")


def bounds_missed(trial: Trial) -> str:
    """Returns the bounds that a trial's run misses, as `key=value`."""
    return ", ".join(dict.fromkeys(one.partition(": ")[0] for one in trial.shortfalls))


def print_study(study: Study, folder: Path) -> None:
    """Prints the front, best in the first objective first, and the path of the page.

    If the front is empty, the outcomes of all trials are printed instead.
    """
    names = columns(study)
    bounds = f" within {', '.join(study.constraints)}" if study.constraints else ""
    if study.front:
        title, head = f"the Pareto front{bounds}", ["trial", *heads(study, names, tested=True), "settings"]
        rows = [[str(one.number), *cells(one, names, tested=True), values(one.values)] for one in study.front]
    else:
        title, head = f"no trial completed{bounds}", ["trial", "outcome", "settings"]
        rows = [[str(one.number), _became(study, one), values(one.values)] for one in study.trials]
    print_table(f"{study.name}: {study.told()}; {title}:", head, rows)
    for trial in study.front:
        for shortfall in trial.shortfalls:
            print(f"trial {trial.number} falls short: {shortfall}")
    if any(trial.shortfalls for trial in study.front):
        print(f"  to fix it: see the end of {folder / 'trials'}/NUMBER/table.txt")
    print(f"page: {folder / 'search.html'}; run of each trial: {folder / 'trials'}/NUMBER")
