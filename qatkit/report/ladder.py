"""The ladder of a rescue as text: a line for each rung (a remedy that was tried), and advice."""

from __future__ import annotations

from qatkit.config.argv import command_with
from qatkit.records.ladder import Ladder, RungResult
from qatkit.report.summary import ABSENT, figure, lined, nearness_columns
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames

_TAIL = ("latency ms", "speed-up", "size ratio", "seconds", "")


def ladder_columns(ladder: Ladder) -> tuple[str, ...]:
    """Returns the column headings of the table; without labels, figures of agreement with float replace accuracy."""
    near = (ladder.task.main.title, "drop") if _labelled(ladder) else nearness_columns(ladder.task)
    return ("rung", *near, *_TAIL)


def ladder_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """Returns a row per rung in the order of `ladder_columns`."""
    labelled = _labelled(ladder)
    return [(row.title, *(_near(row, labelled)), *_cost(row), _said(row, ladder)) for row in ladder.rungs]


def ladder_lines(ladder: Ladder) -> list[str]:
    """Returns the lines of the table and the advice."""
    rows = [ladder_columns(ladder), *ladder_rows(ladder)]
    marked = [False, *(row.name == ladder.chosen for row in ladder.rungs)]
    images = max((row.images for row in ladder.rungs), default=0)
    head = f"rescue: {ladder.target}; every file in ONNX Runtime, on {counted(images, ladder.task.sample)}"
    return [head, *lined(rows, marked, "handed over"), *filter(None, [ladder.advice])]


def rung_line(row: RungResult, task: TaskNames = NAMES) -> str:
    """Returns the line that is printed when a rung ends."""
    if not row.measured:
        return row.why
    near = (
        f"{task.main.name} {row.score:.2f} ({task.main.change(row.drop or 0.0):+.2f})"
        if row.score is not None
        else f"same {task.decision} {100 * (row.agreement or 0.0):.2f} %"
    )
    speed = "" if row.ratio is None else f", {row.ratio:.2f}x as fast as float"
    speed += f", {row.noise}" if row.noise else ""
    state = "meets the target" if row.meets else "misses the target"
    return f"{near}{speed}: {state}" + (f" ({row.why})" if row.why else "")


def advice(ladder: Ladder, epochs: int) -> str:
    """Returns one line: which rung met the target and which gained most, or what to try if none met it.

    Args:
        ladder: the finished ladder with its chosen rung.
        epochs: the number of epochs that the last rung has trained.
    """
    chosen = next(row for row in ladder.rungs if row.name == ladder.chosen)
    if not chosen.meets:
        more = command_with("rescue=ladder", f"rescue.epochs={4 * epochs}", "calibration.images=2048")
        away = _distance(chosen, ladder.task)
        typed = more or f"rescue.epochs={4 * epochs} calibration.images=2048"
        said = f"no rung meets the target; '{chosen.title}' comes closest{away}"
        return f"{said}; to train longer on more {ladder.task.samples}: {typed}"
    said = f"'{chosen.title}' meets the target"
    gains = _gains(ladder)
    if gains:
        title, gained, unit = max(gains, key=lambda gain: gain[1])
        by = "this rung" if title == chosen.title else f"'{title}'"
        said += f"; the largest gain came from {by} ({gained:+.2f} {unit})"
    if chosen.ratio is not None and chosen.ratio < 1:
        said += f"; the chosen file runs {chosen.ratio:.2f} times as fast as float here, so float is the better file on"
        said += " this machine"
    return said


def _distance(row: RungResult, task: TaskNames) -> str:
    if row.drop is not None:
        return f", {row.drop:.2f} {task.main.points} {task.main.below} float"
    return (
        ""
        if row.agreement is None
        else f", same {task.decision} as float on {100 * row.agreement:.2f} % of the {task.samples}"
    )


def _gains(ladder: Ladder) -> list[tuple[str, float, str]]:
    """Returns (title, gain, unit) of each measured rung, compared with the last kept rung before it.

    The first measured rung counts as kept.
    """
    found, before, metric = [], None, ladder.task.main
    for row in ladder.rungs[1:]:  # the first row is float
        if not row.measured:
            continue
        if before is not None:
            if row.score is not None and before.score is not None:
                found.append((row.title, metric.lost(row.score, before.score), metric.points))
            else:
                gain = 100 * ((row.agreement or 0.0) - (before.agreement or 0.0))
                found.append((row.title, gain, f"% of the {ladder.task.samples}"))
        before = row if row.kept or before is None else before
    return found


def _labelled(ladder: Ladder) -> bool:
    return any(row.score is not None for row in ladder.rungs)


def _near(row: RungResult, labelled: bool) -> tuple[str, ...]:
    if labelled:
        drop = None if row.drop is None else round(row.drop, 2) + 0.0  # avoids "-0.00"
        return figure(row.score), figure(drop)
    agreement = ABSENT if row.agreement is None else f"{100 * row.agreement:.2f}"
    return agreement, *(figure(row.kl, "{:.2e}"), figure(row.sqnr_db, "{:.1f}"))


def _cost(row: RungResult) -> tuple[str, ...]:
    return (
        figure(row.latency_ms),
        row.speed,
        figure(row.size_ratio, "{:.3f}"),
        f"{row.seconds:.0f}" if row.seconds else ABSENT,
    )


def _said(row: RungResult, ladder: Ladder) -> str:
    if row is ladder.rungs[0]:
        return ""
    if not row.measured:
        return row.why
    return ", ".join(filter(None, ["meets the target" if row.meets else "", row.why]))
