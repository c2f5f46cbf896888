"""Tests of the report's line on ONNX Runtime's dynamic int8, for comparison with the INT8 file."""

from __future__ import annotations

from typing import Any

import pytest

from qatkit.records.results import Results
from qatkit.verify.checks.accuracy import AccuracyCheck
from qatkit_verify.classification import classified
from qatkit_verify.records import Latency


def measured(bounds: dict[str, Any]) -> Results:
    times = {"float": (4.0, 1.0), "int8": (2.0, 2.0), "dynamic": (2.5, 1.6)}
    latency = {
        name: Latency(median, median, median, ratio, ratio, ratio, 1, 2, 10)
        for name, (median, ratio) in times.items()
    }
    return Results(
        "name", "model", "folder",
        accuracy={name: classified(score, None, 100) for name, score in
                  (("float", 90.0), ("int8", 89.9), ("dynamic", 89.0))},
        latency=latency, sizes={"float": 100, "int8": 25, "dynamic": 50},
        measured={"dynamic": {"lost": 1.0, "interval": 0.4}}, config={"verify": bounds},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"max_drop": 0.3}, "; it would not have met verify.max_drop=0.3"),
        ({"max_drop": 1.0, "min_speedup": 1.5}, "; it would have met verify.max_drop=1 and verify.min_speedup=1.5"),
        ({"max_drop": None, "max_size_ratio": 0.3}, "; it would not have met verify.max_size_ratio=0.3"),
        ({"max_drop": None}, ""),
    ],
)  # fmt: skip
def test_the_line_says_which_bounds_are_met(bounds: dict[str, Any], told: str) -> None:
    (line,) = AccuracyCheck().lines(measured(bounds))
    said = "top-1 -1.00 points, +/- 0.40, against float, 0.80 times as fast as INT8, 2.00 of its size"
    assert line == f"ONNX Runtime's dynamic int8 of the float file: {said}{told}"


def test_its_row_is_the_last_of_the_table() -> None:
    assert measured({}).rows[-1] == ("dynamic", "ONNX Runtime's dynamic int8")
