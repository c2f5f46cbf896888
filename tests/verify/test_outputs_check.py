"""Tests of the figures of every output against NumPy, in reports of modules and of given files."""

from __future__ import annotations

import json
from pathlib import Path

import float_files
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_run import calibrate_only, logits, report_of

from qatkit.jobs import pipeline, quantize_file
from qatkit.records.results import Results
from qatkit.verify.checks.outputs import OutputsCheck
from qatkit.verify.fidelity import SampleDistance


def check(told: dict[str, float], exact: NDArray[np.float32], found: NDArray[np.float32]) -> None:
    """Checks the reported figures against NumPy, sample by sample."""
    cosines = [float(a @ b / np.sqrt((a @ a) * (b @ b))) for a, b in zip(exact, found, strict=True)]
    lengths = [float(np.sqrt(np.square(a - b).sum())) for a, b in zip(exact, found, strict=True)]
    assert told["samples"] == len(exact)
    assert told["cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert told["least_cosine"] == pytest.approx(min(cosines), abs=1e-6)
    assert told["l2"] == pytest.approx(np.mean(lengths), rel=1e-5)
    assert told["largest_l2"] == pytest.approx(max(lengths), rel=1e-5)
    ratio = np.square(exact.astype(np.float64)).sum() / np.square(exact.astype(np.float64) - found).sum()
    assert told["sqnr_db"] == pytest.approx(10 * np.log10(ratio), rel=1e-5)


def test_a_run_tells_cosine_and_distance(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = calibrate_only(tmp_path / "run")
    config.verify.outputs = True
    config.export.bundle = False
    assert pipeline.train(config) == 0
    (told,) = report_of(tmp_path / "run")["measured"]["outputs"]["outputs"]
    images = float_files.digits()[2]
    files = (tmp_path / "run" / name for name in ("model.float.onnx", "model.int8.onnx"))
    exact, found = (logits(file, images) for file in files)
    check(told, exact, found)
    line = f"cosine {told['cosine']:.5f} (minimum {told['least_cosine']:.5f})"
    assert line in capfd.readouterr().out and line in (tmp_path / "run" / "report.html").read_text()


def test_a_given_file_has_the_same_figures(tmp_path: Path) -> None:
    source, folder = float_files.by_hand(tmp_path / "file.onnx"), tmp_path / "run"
    config = float_files.settings(source, "static", folder)
    config.verify.max_drop, config.verify.outputs = None, True
    assert quantize_file.quantize(config) == 0
    (told,) = json.loads((folder / "report.json").read_text())["measured"]["outputs"]["outputs"]
    images = float_files.digits()[2]
    exact, found = (float_files.logits(path, images) for path in (source, folder / "model.static.onnx"))
    check(told, exact[: told["samples"]], found[: told["samples"]])


def test_an_output_of_integers_is_not_called_equal() -> None:
    found = {"outputs": [{"name": "ids", "sqnr_db": None}, {"name": "y", "sqnr_db": None, "samples": 1,
             "cosine": 1.0, "least_cosine": 1.0, "l2": 0.0, "largest_l2": 0.0}]}  # fmt: skip
    lines = OutputsCheck().lines(Results("r", "m", "").with_measured("outputs", found))
    assert lines[0] == "SQNR of each output: ids not compared, y equal"


def test_equal_and_empty_outputs_have_a_cosine() -> None:
    """Two rows of zeros have a cosine of 1; zeros and ones have a cosine of 0."""
    distance = SampleDistance()
    distance.add(np.zeros((2, 3), np.float32), np.array([[0, 0, 0], [1, 1, 1]], np.float32), 2)
    found = distance.figures()
    assert (found["cosine"], found["least_cosine"]) == (0.5, 0.0)
    assert found["largest_l2"] == pytest.approx(3**0.5)


def test_outputs_of_integers_or_other_sizes_have_none() -> None:
    distance = SampleDistance()
    distance.add(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64), 2)
    distance.add(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), 2)
    assert distance.figures() == {}
