"""Tests of a decoder's shortfalls: comparisons that fail, and an accuracy level that costs too much."""

from __future__ import annotations

from typing import Any

import pytest

from qatkit.config.schema import VerifyConfig
from qatkit.records.results import Results
from qatkit.verify.checks.decoder import DecoderCheck

GOOD = {
    "windows": 4, "tokens": 2048, "perplexity": 20.0, "whole": 20.0, "agreement": 1.0, "steps": (16, 16),
    "greedy": (32, 32), "tokens_per_second": 30.0, "bytes": 1000, "threads": 2, "level": 0,
}  # fmt: skip
DEAR: dict[str, Any] = {"level": 4, "levels": {"perplexity": (20.0, 20.2), "agreement": 0.9, "ratio": 2.0}}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, []),
        ({"perplexity": 20.03}, ["perplexity 20.030 (20.000 without keys and values)"]),
        ({"agreement": 0.99}, ["the same next token for 99.00 % of 2,048 tokens"]),
        ({"steps": (16, 15)}, ["15 of 16 tokens right one by one"]),
        ({"greedy": (32, 7)}, ["7 of 32 tokens right in a greedy text"]),
        (DEAR, ["export.accuracy_level=4: perplexity is 20.200, and 20.000 at level 0"]),
        (DEAR | {"steps": (16, 3)}, ["3 of 16 tokens right one by one", "export.accuracy_level=4"]),
        (DEAR | {"levels": {"perplexity": (20.0, 20.09), "agreement": 0.9, "ratio": 2.0}}, []),
    ],
)
def test_each_difference_falls_short(found: dict[str, Any], told: list[str]) -> None:
    results = Results("run", "model", "").with_measured("decoder", GOOD | found)
    lines = [one.line for one in DecoderCheck().shortfalls(VerifyConfig(), results)]
    assert len(lines) == len(told) and all(text in line for text, line in zip(told, lines, strict=True))
