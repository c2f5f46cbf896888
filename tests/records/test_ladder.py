"""Tests of a rescue ladder, whose rungs are the methods tried: reading, storing, printing, and advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qatkit.config.argv import typing
from qatkit.records.ladder import Ladder, RungResult, read_ladder, rung_result, write_ladder
from qatkit.report.ladder import advice, ladder_lines, rung_line

REPORT = {
    "accuracy": {"float": {"top1": 67.2, "images": 10000}, "int8": {"top1": 66.9, "images": 10000}},
    "fidelity": {"int8": {"agreement": 0.97, "kl": 0.01, "sqnr_db": 21.5, "images": 512}},
    "latency": {"float": {"median_ms": 3.0, "ratio": 1.0}, "int8": {"median_ms": 2.0, "ratio": 1.5}},
    "sizes": {"float": 1000, "int8": 260},
}
UNLABELLED = {**REPORT, "accuracy": {}}


def rung(**changes: object) -> RungResult:
    row = rung_result("a", "rung a", "rungs/a", REPORT)
    return replace(row, **changes)  # type: ignore[arg-type]


def test_a_rung_is_what_the_report_of_its_run_says() -> None:
    row = rung()
    assert row.drop == pytest.approx(0.3)
    assert (row.score, row.agreement, row.images) == (66.9, 0.97, 10000)
    assert (row.latency_ms, row.ratio, row.bytes, row.size_ratio) == (2.0, 1.5, 260, 0.26)


def test_without_labels_a_rung_has_agreement_but_no_drop() -> None:
    row = rung_result("a", "rung a", "", UNLABELLED)
    assert (row.score, row.drop, row.agreement, row.images) == (None, None, 0.97, 512)


def test_a_ladder_comes_back_from_its_file(tmp_path: Path) -> None:
    ladder = Ladder((rung(), RungResult("b", "rung b", why="not possible")), "a", "a target", "some advice")
    assert read_ladder(tmp_path) is None
    write_ladder(tmp_path, ladder)
    assert read_ladder(tmp_path) == replace(ladder, rungs=list(ladder.rungs))


def test_the_table_lists_each_rung_and_what_is_handed_over() -> None:
    float_row = replace(rung_result("float", "float", "", REPORT, key="float"), meets=True)
    failed = RungResult("c", "rung c", why="not possible: data=x: y")
    ladder = Ladder(
        (float_row, rung(kept=True, meets=True, seconds=12.4), failed), "a", "a target", "some advice"
    )
    head, columns, first, second, third, last = ladder_lines(ladder)
    assert "a target" in head and "10,000 images" in head
    assert columns.split()[:4] == ["rung", "top-1", "%", "drop"]
    assert first.split()[:3] == ["float", "67.20", "0.00"]
    assert second.split()[2:8] == ["66.90", "0.30", "2.00", "1.50x", "0.260", "12"]
    assert second.endswith("meets the target  <- handed over") and "handed over" not in third
    assert third.endswith("not possible: data=x: y") and last == "some advice"


def test_a_line_for_a_rung_as_it_is_climbed() -> None:
    assert rung_line(rung()) == "top-1 66.90 (-0.30), 1.50x as fast as float: misses the target"
    noisy = rung(ratio_p10=0.9, ratio_p90=1.7)
    assert "1.50x as fast as float, noisy: 0.90 to 1.70: misses" in rung_line(noisy)
    assert "1.50x, noisy: 0.90 to 1.70" in ladder_lines(Ladder((noisy,), "a"))[2]
    assert rung_line(rung_result("a", "", "", UNLABELLED)).startswith("same top-1 class 97.00 %, 1.50x")
    assert rung_line(RungResult("a", "", why="not possible")) == "not possible"


def test_the_advice_names_what_was_won_where() -> None:
    rows = (
        rung(name="float", title="float"),
        rung(name="naive", title="naive", score=47.0),
        rung(name="b", title="rung b", score=66.0, kept=True),
        rung(name="c", title="rung c", score=60.0, kept=False),
        rung(name="a", kept=True, meets=True),
    )
    said = advice(Ladder(rows, "a"), 1)
    assert said == "'rung a' meets the target; the largest gain came from 'rung b' (+19.00 points)"
    slow = advice(Ladder((*rows[:-1], replace(rows[-1], ratio=0.8)), "a"), 1)
    assert "0.80 times as fast as float" in slow


def test_where_nothing_meets_the_target_the_advice_is_a_command() -> None:
    ladder = Ladder((rung(name="float"), rung(kept=True)), "a")
    with typing(["recipe=vit_rescue", "data.root=my pictures", "output_dir=old"]):
        said = advice(ladder, 2)
    assert "0.30 points below float" in said
    assert said.endswith(
        "recipe=vit_rescue 'data.root=my pictures' rescue=ladder rescue.epochs=8 calibration.images=2048"
    )
