"""The progress bar over batches of samples, with its rate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 30.0  # seconds between two lines without a terminal, for example in the log of a cluster job
Batches = Iterable[tuple[Any, Any]]  # (images [N, C, H, W], labels [N]), tensors or arrays


def shown(batches: Batches, title: str, progress: bool, unit: str = "samples") -> Iterator[tuple[Any, Any]]:
    """Yields `batches` and shows the progress on stderr: as a bar, or as occasional lines without a terminal.

    Args:
        batches: pairs whose second element has one entry per sample (or whatever `unit` says).
        title: the text before the bar.
        progress: whether to show progress.
        unit: what is counted, for the rate after the bar ("samples" per second).
    """
    if not progress:
        yield from batches
        return
    with _bar(unit) as bar:
        task = bar.add_task(title, total=len(batches) if isinstance(batches, Sized) else None)
        seen, told = 0, time.monotonic()
        for images, labels in batches:
            yield images, labels
            seen += len(labels)
            bar.update(task, advance=1, images=seen)
            if not bar.console.is_terminal and not bar.finished and time.monotonic() - told >= _EVERY:
                bar.console.print(bar.get_renderable())
                told = time.monotonic()


def _bar(unit: str) -> Progress:
    """Returns a bar of rich, imported late since machines that only run files do not need rich."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """A column of the bar with the rate per second."""

        def render(self, task: Task) -> Text:
            done = task.fields.get("images", 0)
            return Text(f"{done / task.elapsed:,.0f} {unit}/s" if task.elapsed and done else "")

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), Rate())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
