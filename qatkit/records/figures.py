"""The figures of a run's report.json: read here for whoever shows, compares or chooses runs by them.

    report["accuracy"], ["fidelity"], ["latency"], ["sizes"]          of the test images and the machine
    report["measured"]["validation"], the first two groups again      of the training images held out, where there are

A figure that was not measured is None. What is measured and has no bound is `math.inf`, which JSON does not know: of
outputs that are equal to the last bit the report says null where the decibels are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qatkit_verify.classification import names_of
from qatkit_verify.records import Metric

VALIDATION = "validation"  # what the check that measures them is called


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one file in ONNX Runtime, each None where it was not measured.

    Attributes:
        score, drop: the task's main metric, and by how much it is worse than the float file's.
        agreement: share of the outputs that are decided as by the float file.
        kl, sqnr_db: of the outputs against float's: nats, and decibels, infinite where they are equal.
        images: on which the metric was measured, or without labels what is compared.
        latency_ms, ratio: median latency, and float's over it.
        bytes, size_ratio: of the file, and over float's.
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
    """What a report says of one file ("int8", or "float").

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not what a run writes.
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
    """The same of the training images held out: how good the file is, no latency and no size.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: as `figures_of`.
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
    """A finite figure as JSON has it; None of null.

    Raises:
        ValueError: something else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a figure belongs")
    return float(value)
