"""The figures of a run's report.json, for all code that shows, compares or chooses runs.

    report["accuracy"], ["fidelity"], ["latency"], ["sizes"]        on the test images and the machine
    report["measured"]["validation"], the first two groups again    on held-out training images, if there are any

A figure that was not measured is None. An infinite figure is `math.inf`, which JSON does not support: if
outputs are equal to the last bit, the report has null instead of decibels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qatkit_verify.classification import names_of
from qatkit_verify.records import Metric, noise

VALIDATION = "validation"  # the name of the check that measures figures on held-out training images


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one file in ONNX Runtime, each None if it was not measured.

    Attributes:
        score, drop: the task's main metric, and its loss compared with the float file.
        agreement: the share of outputs with the same decision as the float file.
        kl, sqnr_db: the divergence from float's outputs in nats, and the SQNR in dB, infinite if outputs are
            equal.
        images: the number of images for the metric or, without labels, for the comparison.
        latency_ms, ratio: the median latency, and float's latency divided by it.
        ratio_p10, ratio_p90: the range of the ratio over the rounds.
        bytes, size_ratio: the size of the file, and its ratio to that of the float file.
    """

    score: float | None = None
    drop: float | None = None
    agreement: float | None = None
    kl: float | None = None
    sqnr_db: float | None = None
    images: int = 0
    latency_ms: float | None = None
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    bytes: int | None = None
    size_ratio: float | None = None

    @property
    def noise(self) -> str:
        """The remark on an uncertain ratio (`qatkit_verify.records.noise`)."""
        return noise(self.ratio_p10, self.ratio_p90)

    @property
    def speed(self) -> str:
        """The ratio as text, marked if it is noisy; "-" if it was not measured."""
        return "-" if self.ratio is None else ", ".join(filter(None, [f"{self.ratio:.2f}x", self.noise]))


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
        ratio_p10=number(latency.get("ratio_p10")),
        ratio_p90=number(latency.get("ratio_p90")),
        bytes=None if size is None else int(size),
        size_ratio=None if size is None or not whole else size / whole,
    )


def validation_of(report: Mapping[str, Any], row: str = "int8") -> Figures:
    """Returns the figures on the held-out training images; latency and size are None.

    All figures are None if the run measured nothing on held-out images.

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
        ValueError: the value is not a finite number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
