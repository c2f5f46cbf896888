"""Tests of the reader of a report's figures, against the results from which the report was written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qatkit.records.figures import Figures, figures_of, validation_of
from qatkit.records.results import Fidelity, Results
from qatkit.report import write_report
from qatkit_verify.classification import classified
from qatkit_verify.records import Latency


def _written(folder: Path, **changes: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "accuracy": {"float": classified(98.5, None, 360), "int8": classified(97.0, None, 360)},
        "fidelity": {"int8": Fidelity(0.875, 0.5, 21.5, 64)},
        "latency": {"int8": Latency(2.0, 1.0, 3.0, 1.5, 1.0, 2.0, 1, 2, 50)},
        "sizes": {"float": 4_000_000, "int8": 1_000_000},
    }
    write_report(folder / "report.json", Results("name", "model", str(folder), **{**figures, **changes}))
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_figures_are_those_that_were_written(tmp_path: Path) -> None:
    report = _written(tmp_path)
    near = {"score": 97.0, "drop": 1.5, "agreement": 0.875, "kl": 0.5, "sqnr_db": 21.5, "images": 360}
    cost = {"latency_ms": 2.0, "ratio": 1.5, "ratio_p10": 1.0, "ratio_p90": 2.0}
    assert vars(figures_of(report)) == near | cost | {"bytes": 1_000_000, "size_ratio": 0.25}
    whole = Figures(score=98.5, drop=0.0, images=360, bytes=4_000_000, size_ratio=1.0)
    assert figures_of(report, "float") == whole
    assert figures_of(report, "control") == Figures()
    assert validation_of(report) == Figures()


def test_equal_outputs_have_infinite_sqnr_and_unmeasured_no_sqnr(tmp_path: Path) -> None:
    equal = _written(tmp_path, accuracy={}, fidelity={"int8": Fidelity(1.0, 0.0, None, 64)})
    found = figures_of(equal)
    assert (found.agreement, found.kl, found.sqnr_db, found.images) == (1.0, 0.0, math.inf, 64)
    assert found.score is found.drop is None
    assert figures_of(_written(tmp_path, fidelity={})).sqnr_db is None


def test_the_images_held_out_have_the_same_figures_of_their_own(tmp_path: Path) -> None:
    groups = {
        "accuracy": {
            "int8": classified(90.0, None, 100).as_dict(),
            "float": classified(91.0, None, 100).as_dict(),
        },
        "fidelity": {"int8": asdict(Fidelity(0.5, 0.25, None, 100))},
    }
    report = _written(tmp_path, measured={"validation": groups})
    near = Figures(score=90.0, drop=1.0, agreement=0.5, kl=0.25, sqnr_db=math.inf, images=100)
    assert validation_of(report) == near
    assert figures_of(report).score == 97.0


@pytest.mark.parametrize("value", ["97", True, math.nan, math.inf, [97.0]])
def test_what_is_no_figure_is_refused(value: object) -> None:
    report = {"accuracy": {"int8": {"top1": value}}, "latency": {}, "sizes": {}}
    with pytest.raises(ValueError, match="is not a finite number"):
        figures_of(report)
