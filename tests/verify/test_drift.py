"""Tests of two files that each feed back their own states: agreement and SQNR after more and more steps."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from state_net import HIDDEN, gru_run, gru_weights, save_gru, sequence

from qatkit.config.schema import Config, ScheduleConfig, VerifyConfig
from qatkit.quant.spec import RECURRENT_WEIGHTS
from qatkit.records.fixes import either
from qatkit.records.results import FREE, Fidelity, Results
from qatkit.report import plain_report, render_page
from qatkit.tasks import task_of
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.drift import DriftCheck
from qatkit.verify.checks.fidelity import FidelityCheck
from qatkit_verify.errors import ConfigError
from qatkit_verify.free_run import FreeRun, StepSequence
from qatkit_verify.session import open_session

WEIGHTS = gru_weights()
ROUGH = {name: (one * 4).round() / 4 for name, one in WEIGHTS.items()}
LENGTHS = (150, 7)


def _sequences() -> Any:
    for seed, length in enumerate(LENGTHS):
        start = {"h": np.full((1, HIDDEN), 0.1 * seed, np.float32)}
        yield StepSequence(start, ({"x": row[None]} for row in sequence(length, seed)))


def _measured(folder: Path, **changes: Any) -> Results:
    files = {"float": save_gru(folder / "a.onnx", WEIGHTS), "int8": save_gru(folder / "b.onnx", ROUGH)}
    subject = Subject(
        folder=folder,
        files=files,
        batches=lambda: (),
        timed=lambda count: (count,),
        settings=VerifyConfig(threads=1),
        labelled=False,
        task=task_of("outputs", "threshold(0.5)"),
        states={"h": "hN"},
        sequences=_sequences,
    )
    subject = replace(subject, **changes)
    results = Results("gru", "m", str(folder), labelled=False, task=subject.task.names)
    return DriftCheck().measure(subject, results)


def _wanted(steps: int) -> tuple[float, float, float]:
    """Returns the agreement, and the SQNR of y and of hN, over the first steps of each sequence."""
    pairs = []
    for seed, length in enumerate(LENGTHS):
        x, start = sequence(length, seed)[:steps], np.full((1, HIDDEN), 0.1 * seed)
        pairs.append([gru_run(weights, x, start) for weights in (WEIGHTS, ROUGH)])
    y, other = (np.concatenate([pair[i][0] for pair in pairs]) for i in (0, 1))
    h, rough = (np.concatenate([pair[i][1][1:] for pair in pairs]) for i in (0, 1))
    ratios = [10 * np.log10(np.square(a).sum() / np.square(a - b).sum()) for a, b in ((y, other), (h, rough))]
    return float(((y > 0.5) == (other > 0.5)).mean()), ratios[0], ratios[1]


def test_drift_is_that_of_two_free_runs(tmp_path: Path) -> None:
    results = _measured(tmp_path)
    found = results.measured["drift"]
    assert found["sequences"] == 2 and found["states"] == {"h": "hN"}
    assert [(one["steps"], one["counted"]) for one in found["horizons"]] == [(10, 17), (100, 107), (150, 157)]
    for one in found["horizons"]:
        agreement, y, h = _wanted(one["steps"])
        assert one["agreement"] == pytest.approx(agreement)
        assert [output["name"] for output in one["outputs"]] == ["y", "hN"]
        assert one["outputs"][0]["sqnr_db"] == pytest.approx(y, abs=0.02)
        assert one["outputs"][1]["sqnr_db"] == pytest.approx(h, abs=0.02)
    free = results.fidelity[FREE]
    assert (free.images, free.kl) == (157, None) and free.agreement == pytest.approx(_wanted(150)[0])


def test_drift_stands_on_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    results = _measured(tmp_path)
    text, page = plain_report(results), render_page(results)
    assert "drift: float and INT8 each with their own states, 157 steps of 2 sequences:" in text
    assert "first steps" in text and "hN dB" in text and "INT8, with its own states" in text
    assert "Drift of states" in page and "hN is h of the next step" in page
    percent = f"{100 * results.fidelity[FREE].agreement:.2f}"
    assert percent in text and percent in page


def test_the_bounds_are_on_free_runs() -> None:
    near, free = Fidelity(1.0, None, 40.0, 10), Fidelity(0.8, None, 20.0, 500)
    results = Results("r", "m", "", labelled=False, fidelity={"int8": near, FREE: free})
    bounds = VerifyConfig(min_float_agreement=0.9, max_float_kl=None, min_float_sqnr=30.0)
    same, signal = FidelityCheck().shortfalls(bounds, results)
    assert "80.00 % on 500 steps, each file with its own states" in same.line
    assert (
        "against the float file's logits is 20.0 dB on 500 steps, each file with its own states"
        in signal.line
    )
    assert not FidelityCheck().shortfalls(VerifyConfig(min_float_agreement=0.8), results)


@pytest.mark.parametrize(("free_db", "named"), [(29.0, True), (39.0, False)])
def test_the_fix_of_drift_is_float_recurrent_weights(free_db: float, named: bool) -> None:
    near, free = Fidelity(1.0, None, 40.0, 10), Fidelity(1.0, None, free_db, 500)
    skipped = [("lstm.inner", RECURRENT_WEIGHTS), ("input", "another reason")]
    settings = asdict(Config(schedule=ScheduleConfig(epochs=0)))
    results = Results(
        "r", "m", "", labelled=False, fidelity={"int8": near, FREE: free}, skipped=skipped, config=settings
    )
    (short,) = FidelityCheck().shortfalls(VerifyConfig(min_float_sqnr=45.0), results)
    assert either(short.fixes).startswith("'+backend.overrides={lstm.inner:{float:true}}'") == named
    assert ("29.0 dB with its own" in either(short.fixes)) == named


def test_without_states_nothing_is_said(tmp_path: Path) -> None:
    results = _measured(tmp_path, states={}, sequences=None)
    assert results.measured == {} and results.fidelity == {} and not DriftCheck().lines(results)
    assert "Drift" not in render_page(results)


def test_no_step_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one step"):
        _measured(tmp_path, sequences=lambda: iter(()))


def test_a_state_of_another_shape_than_before_is_named(tmp_path: Path) -> None:
    session = open_session(save_gru(tmp_path / "a.onnx", WEIGHTS), threads=1)
    run = FreeRun(session, {"h": "y"})
    run.begin({"h": np.zeros((1, HIDDEN), np.float32)})
    with pytest.raises(
        ConfigError, match=r"'h' has shape \[1, 8\], and 'y' \[1, 1\]; a state must keep its shape"
    ):
        run.step({"x": np.zeros((1, 6), np.float32)})
