"""The one reader of a report's figures, against the results that the report was written of."""

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
    assert figures_of(report) == Figures(97.0, 1.5, 0.875, 0.5, 21.5, 360, 2.0, 1.5, 1_000_000, 0.25)
    assert figures_of(report, "float") == Figures(98.5, 0.0, images=360, bytes=4_000_000, size_ratio=1.0)
    assert figures_of(report, "control") == Figures()
    assert validation_of(report) == Figures()


def test_equal_outputs_have_infinite_sqnr_and_unmeasured_no_sqnr(tmp_path: Path) -> None:
    equal = _written(tmp_path, accuracy={}, fidelity={"int8": Fidelity(1.0, 0.0, None, 64)})
    assert figures_of(equal) == Figures(None, None, 1.0, 0.0, math.inf, 64, 2.0, 1.5, 1_000_000, 0.25)
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
    assert validation_of(report) == Figures(90.0, 1.0, 0.5, 0.25, math.inf, 100)
    assert figures_of(report).score == 97.0


@pytest.mark.parametrize("value", ["97", True, math.nan, math.inf, [97.0]])
def test_what_is_no_figure_is_refused(value: object) -> None:
    report = {"accuracy": {"int8": {"top1": value}}, "latency": {}, "sizes": {}}
    with pytest.raises(ValueError, match="a figure belongs"):
        figures_of(report)
