"""The figures of a run's report.json, read here for all code that shows, compares or chooses runs by them.

    report["accuracy"], ["fidelity"], ["latency"], ["sizes"]          on the test images and the machine
    report["measured"]["validation"], the first two groups again      on held-out training images, if there
    are any

A figure that was not measured is None. A measured but unbounded one is `math.inf`, which JSON does not have:
if outputs are equal to the last bit, the report has null instead of decibels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qatkit_verify.classification import names_of
from qatkit_verify.records import Metric

VALIDATION = "validation"  # the name of the check that measures them


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one file in ONNX Runtime, each None if it was not measured.

    Attributes:
        score, drop: the task's main metric, and by how much it is worse than the float file's.
        agreement: share of the outputs with the same decision as the float file.
        kl, sqnr_db: the outputs against float's: nats, and decibels, infinite if they are equal.
        images: number of images for the metric or, without labels, for the comparison.
        latency_ms, ratio: median latency, and float's latency over it.
        bytes, size_ratio: size of the file, and its ratio to float's.
    """

    score: float | None = None
    drop: float | None = None
    agreement: float | None = None
    kl: float | None = None
    sqnr_db: float | None = None
    images: int = 0
    latency_ms: float | None = None
    ratio: float | None = None
    bytes: int | None = None
    size_ratio: float | None = None


def figures_of(report: Mapping[str, Any], row: str = "int8") -> Figures:
    """Returns the figures of one file in a report ("int8", or "float").

    Raises:
        ValueError, KeyError, TypeError, AttributeError: a run did not write this report.
    """
    near = _nearness(report, row, names_of(report).main)
    latency, sizes = report["latency"].get(row) or {}, report["sizes"]
    size, whole = number(sizes.get(row)), number(sizes.get("float"))
    return Figures(
        **near,
        latency_ms=number(latency.get("median_ms")),
        ratio=number(latency.get("ratio")),
        bytes=None if size is None else int(size),
        size_ratio=None if size is None or not whole else size / whole,
    )


def validation_of(report: Mapping[str, Any], row: str = "int8") -> Figures:
    """Returns the figures on the held-out training images: how good the file is, without latency and size.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: see `figures_of`.
    """
    found = report.get("measured", {}).get(VALIDATION)
    return Figures() if found is None else Figures(**_nearness(found, row, names_of(report).main))


def _nearness(groups: Mapping[str, Any], row: str, metric: Metric) -> dict[str, Any]:
    accuracy, fidelity = groups["accuracy"], groups.get("fidelity", {}).get(row) or {}
    own, reference = accuracy.get(row) or {}, accuracy.get("float") or {}
    score, before = number(own.get(metric.key)), number(reference.get(metric.key))
    decibel = number(fidelity.get("sqnr_db"))
    return {
        "score": score,
        "drop": None if score is None or before is None else metric.lost(before, score),
        "agreement": number(fidelity.get("agreement")),
        "kl": number(fidelity.get("kl")),
        "sqnr_db": math.inf if decibel is None and "sqnr_db" in fidelity else decibel,
        "images": int(number((own or fidelity).get("images")) or 0),
    }


def number(value: Any) -> float | None:
    """Returns a finite figure from JSON; None for null.

    Raises:
        ValueError: something else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
