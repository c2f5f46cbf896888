"""The bar over batches of images, with its rate: what a user looks at while waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

Batches = Iterable[tuple[Any, Any]]  # (images [N, C, H, W], labels [N]), tensors or arrays


def shown(batches: Batches, title: str, progress: bool, unit: str = "images") -> Iterator[tuple[Any, Any]]:
    """`batches`, with a progress bar on stderr when asked.

    Args:
        batches: pairs, the second of each as long as there are `unit` in it.
        title: in front of the bar.
        progress: whether there is one.
        unit: what the rate behind the bar counts.
    """
    if not progress:
        yield from batches
        return
    with _bar(unit) as bar:
        task = bar.add_task(title, total=len(batches) if isinstance(batches, Sized) else None)
        seen = 0
        for images, labels in batches:
            yield images, labels
            seen += len(labels)
            bar.update(task, advance=1, images=seen)


def _bar(unit: str) -> Progress:
    """With rich, which a machine that only runs files has no need of."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """So many a second."""

        def render(self, task: Task) -> Text:
            done = task.fields.get("images", 0)
            return Text(f"{done / task.elapsed:,.0f} {unit}/s" if task.elapsed and done else "")

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), Rate())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
