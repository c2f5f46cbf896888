"""The epochs of the stages that trained, in words and figures, once for the terminal and the page."""

from __future__ import annotations

from qatkit.records.results import Results
from qatkit.records.tried import Curve, Epoch
from qatkit.report.summary import ABSENT
from qatkit_verify.records import TaskNames

_SHOWN = 8  # epochs on a line of the terminal


def columns(task: TaskNames) -> tuple[str, ...]:
    """The heads of the table of epochs."""
    return "epoch", "step", task.main.title, "seconds", ""


def cells(curve: Curve) -> list[tuple[str, ...]]:
    """As `columns`, of each epoch."""
    return [
        (
            f"{one.epoch:g}" if one.epoch == round(one.epoch) else f"{one.epoch:.2f}",
            str(one.step),
            f"{one.score:.2f}",
            ABSENT if one.seconds is None else f"{one.seconds:.1f}",
            "kept" if one.kept else "",
        )
        for one in curve.epochs
    ]


def measured(curve: Curve) -> str:
    """What the figures are of."""
    images = f"{curve.images:,} training images held out"
    if not curve.chosen:
        images = images if curve.held_out else f"{curve.images:,} test images, which choose nothing"
        return f"what trains, on {images}: the last epoch is kept"
    what = "the control in PyTorch" if "control" in curve.stage else "the file in ONNX Runtime"
    seconds = sum(one.seconds or 0.0 for one in curve.epochs)
    return f"{what}, on {images}; judging took {seconds:.1f} s"


def lines(results: Results) -> list[str]:
    """What the terminal says: of many epochs some, with the last and the one that is kept."""
    return [_line(curve, results.task) for curve in results.curves]


def _line(curve: Curve, task: TaskNames) -> str:
    rows = list(zip(cells(curve), curve.epochs, strict=True))
    every = -(-len(rows) // _SHOWN)
    shown = [row for i, row in enumerate(reversed(rows)) if i % every == 0 or row[1].kept][::-1]
    figures = ", ".join(_figure(row, one) for row, one in shown)
    more = f" ({len(rows)} epochs)" if len(shown) < len(rows) else ""
    return f"epochs of {curve.stage}{more}, {task.main.name} of {measured(curve)}: {figures}"


def _figure(row: tuple[str, ...], one: Epoch) -> str:
    return f"{row[0]}: {row[2]}" + (" <- kept" if one.kept else "")
