"""Which classes a file is worst at, from what `Scores` counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qatkit.records.results import Results

FEWEST = 3  # classes: of two the worse one is no news


@dataclass(frozen=True)
class ClassAccuracy:
    """Share of one class that is right, in percent, of the exported file and the float one (None: not measured)."""

    name: str
    images: int
    score: float
    float_score: float | None


def by_class(results: Results) -> list[ClassAccuracy]:
    """Every class that has test images, the worst first; empty with fewer than `FEWEST` classes or without labels."""
    int8, reference = results.accuracy.get("int8"), results.accuracy.get("float")
    if int8 is None or len(int8.class_images) < FEWEST:
        return []
    shares = _shares(int8.class_right, int8.class_images)
    before = _shares(reference.class_right, reference.class_images) if reference is not None else {}
    found = [
        ClassAccuracy(_name(results, label), int8.class_images[label], share, before.get(label))
        for label, share in shares.items()
    ]
    return sorted(found, key=lambda one: one.score)


def class_line(results: Results, count: int = 5) -> str:
    """The worst classes in one line; "" where there are none to tell."""
    found = by_class(results)[:count]
    if not found:
        return ""
    told = (f"{one.name} {one.score:.1f} % of {one.images:,}{_beside(one.float_score)}" for one in found)
    return f"worst classes, {results.label} {results.task.main.name}: {', '.join(told)}"


def _beside(float_score: float | None) -> str:
    return "" if float_score is None else f" (float {float_score:.1f})"


def _shares(right: Sequence[int], images: Sequence[int]) -> dict[int, float]:
    """Percent of each class that has images."""
    pairs = enumerate(zip(right, images, strict=True))
    return {label: 100 * hits / total for label, (hits, total) in pairs if total}


def _name(results: Results, label: int) -> str:
    return results.classes[label] if label < len(results.classes) else str(label)
