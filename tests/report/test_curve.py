"""Tests of the charts of epochs: their axes have readable numbers."""

from __future__ import annotations

import re

import pytest

from qatkit.records.results import Results
from qatkit.records.tried import Curve, Epoch
from qatkit.report.curve import curve_section


def section(values: list[float], steps: list[int] | None = None) -> str:
    """Returns the section for epochs with these scores."""
    steps = steps or [22 * (i + 1) for i in range(len(values))]
    epochs = [Epoch(step / 22, step, value) for step, value in zip(steps, values, strict=True)]
    return curve_section(Results("demo", "net", "out", curves=[Curve("QAT", False, 360, epochs)]))


def ticks(page: str) -> list[str]:
    """Returns the labels of the vertical axis, the highest first."""
    return re.findall(r"<span>([^<]*)</span>", page.partition('class="ticks"')[2].partition("</div>")[0])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([16.11, 63.89, 90.28, 97.78, 100.0], ["100", "80", "60", "40", "20", "0"]),
        ([96.94, 97.5], ["97.6", "97.4", "97.2", "97.0", "96.8"]),
        ([0.0123, 0.0119], ["0.0123", "0.0122", "0.0121", "0.0120", "0.0119"]),
        ([81234.0, 15.2], ["100,000", "80,000", "60,000", "40,000", "20,000", "0"]),
        ([50.0, 50.0], ["50.1", "50.0"]),
        ([0.0, 0.0], ["0.2", "0.0"]),
    ],
)
def test_the_score_axis_has_round_numbers(values: list[float], labels: list[str]) -> None:
    assert ticks(section(values)) == labels


def test_the_epoch_axis_names_its_ends() -> None:
    page = section([90.0, 95.0, 94.0], [11, 33, 44])
    ends = page.partition('class="ends"')[2].partition("</div>")[0]
    assert re.findall(r"<span>([^<]*)</span>", ends) == ["epoch 0.50", "epoch 2"]
    drawn = re.findall(r'class="dot found" d="M([\d.]+) ', page)
    assert list(map(float, drawn)) == [0.0, pytest.approx(66.67), 100.0]
