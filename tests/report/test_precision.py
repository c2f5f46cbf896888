"""Tests of the reported Pareto front of mixed precisions: every point with its name, command and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qatkit.records.precision import Precision, PrecisionPoint
from qatkit.records.results import Results
from qatkit.report.page import render_page
from qatkit.report.pictures import draw_front
from qatkit.report.table import plain_report

FRONT = Precision(
    (
        PrecisionPoint(0, (), 0, 1.0, 1.0, 4.0, 70.0, 0.9, 20.0),
        PrecisionPoint(1, ("<conv>",), 1, 2.1, 2.0, 2.0, None, 0.95, 35.0, chosen=True),
        PrecisionPoint(2, None, 3, 4.0, 4.0, 1.0, 71.0, 1.0, None),
    ),
    operators=3,
    measured=7,
    images=64,
    note="because",
)
RESULTS = Results("run", "net", "/runs/a", precision=FRONT)


def test_page_names_every_point_and_draws_those_with_an_error() -> None:
    page = render_page(RESULTS)
    pins = dict(re.findall(r'class="pin[^"]*" style="left:([\d.]+)%;bottom:[\d.]+%">(\d)<', page))
    assert list(pins.values()) == ["0", "1", "2"]
    left = [float(one) for one in pins]
    assert left == pytest.approx(
        [100 / 4.2, 200 / 4.2, 400 / 4.2], abs=0.01
    )  # the axis ends 5 % beyond float
    assert re.findall(r"<title>(.*?)</title>", page)[1:] == [
        "0, int8, 1.000 ms: 20.0 dB",
        "1, 1 float, 2.000 ms: 35.0 dB",
    ]
    assert "precision.front=/runs/a precision.point=1" in page and "1: &lt;conv&gt;" in page
    assert "point 1, 1 float: because" in page


def test_the_terminal_says_the_same() -> None:
    lines = plain_report(RESULTS).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("precision: 3 of 7 measured files"))
    assert lines[start + 2].split() == [
        *("0", "0", "of", "3", "1.000", "1.000", "4.00x", "70.00", "90.00", "20.0"),
        *("precision.front=/runs/a", "precision.point=0"),
    ]
    assert (
        lines[start + 3].endswith("<- chosen") and "2.100" in lines[start + 3] and " - " in lines[start + 3]
    )
    assert lines[start + 4].split()[-2:] == ["equal", "model.float.onnx"]
    assert lines[start + 5] == "  float: <conv>"


def test_without_a_search_nothing_is_said() -> None:
    nothing = Results("run", "net", "")
    assert "Precision" not in render_page(nothing) and "precision" not in plain_report(nothing)


def test_the_picture_is_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_front(tmp_path / "pictures", FRONT) == ["precision.png"]
    assert (tmp_path / "pictures" / "precision.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
