"""Tests of fidelity to the float file (against PyTorch's KL divergence and by hand), and of its bounds."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_thresholds import GOOD

from qatkit.config.schema import CalibrationConfig, Config, ScheduleConfig, VerifyConfig
from qatkit.records.fixes import either
from qatkit.records.results import Fidelity, Results
from qatkit.report import plain_report, render_page
from qatkit.verify.checks.base import default_checks
from qatkit.verify.fidelity import OutputDistance, fidelity
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.errors import ConfigError

BATCHES = [(np.arange(5), [None] * 5), (np.arange(5, 8), [None] * 3)]


def _draw(*shape: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    draw = np.random.default_rng(0)
    exact = 3 * draw.standard_normal(shape, np.float32)
    return exact, exact + draw.standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", [(8, 10), (8, 4, 3, 5)])
def test_each_measure_is_what_it_says(shape: tuple[int, ...]) -> None:
    exact, found = _draw(*shape)

    measured = fidelity(lambda i: exact[i], {"int8": lambda i: found[i]}, BATCHES)["int8"]

    a, b = torch.as_tensor(exact).double(), torch.as_tensor(found).double()
    parts = torch.nn.functional.kl_div(b.log_softmax(1), a.log_softmax(1), log_target=True, reduction="none")
    assert measured.kl == pytest.approx(parts.sum(1).mean().item(), rel=1e-9)
    assert measured.agreement == (exact.argmax(1) == found.argmax(1)).mean()
    ratio = np.square(exact, dtype=np.float64).sum() / np.square(exact - found, dtype=np.float64).sum()
    assert measured.sqnr_db == pytest.approx(10 * np.log10(ratio), rel=1e-6)
    assert measured.images == 8
    assert measured.kl is not None
    assert 0.3 < measured.agreement < 1 and 0.1 < measured.kl < 1  # neither is at a limit


def test_figures_by_hand() -> None:
    """An image with probabilities 1/2, 1/2 against 1/4, 3/4, and one without a difference."""
    exact = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    found = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    measured = fidelity(
        lambda _: exact, {"a": lambda _: found, "b": lambda _: exact}, [(np.arange(2), [0, 0])]
    )
    assert measured["a"].kl == pytest.approx(0.5 * (0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)), rel=1e-6)
    assert measured["a"].agreement == 0.5  # of equal values, the first is the top-1
    assert measured["b"] == Fidelity(1.0, 0.0, None, 2)


def test_large_logits_do_not_overflow() -> None:
    exact = np.array([[1e4, 0.0]], np.float32)
    measured = fidelity(lambda _: exact, {"a": lambda _: -exact}, [(np.zeros(1), [0])])["a"]
    assert measured.kl == pytest.approx(1e4)
    zeros = fidelity(lambda _: 0 * exact, {"a": lambda _: exact}, [(np.zeros(1), [0])])["a"]
    assert zeros.sqnr_db is not None and np.isfinite(zeros.sqnr_db) and zeros.sqnr_db < -1000


def test_outputs_that_are_no_numbers_are_refused_by_image() -> None:
    exact, found = _draw(8, 10)
    found[6, 3] = np.nan
    with pytest.raises(ConfigError, match="int8: its output for image 6 is NaN or infinite"):
        fidelity(lambda i: exact[i], {"int8": lambda i: found[i]}, BATCHES)
    with pytest.raises(ConfigError, match="at least one sample"):
        fidelity(lambda i: exact[i], {}, [])


NEAR = {"simulated": Fidelity(0.97, 2e-3, 24.0, 500), "int8": Fidelity(0.88, 0.25, 9.5, 500)}
BLIND = replace(GOOD, labelled=False, accuracy={}, fidelity=NEAR)
STRICT = VerifyConfig(min_float_agreement=0.95, max_float_kl=0.1, min_float_sqnr=12.0)


def test_bounds_of_images_without_labels() -> None:
    found = shortfalls(default_checks(), STRICT, BLIND)
    assert [one.line for one in found] == [
        "verify.min_float_agreement=0.95: same top-1 class 88.00 % on 500 images, INT8 against the float file",
        "verify.max_float_kl=0.1: KL of INT8 against the float file is 0.25 nats",
        "verify.min_float_sqnr=12.0: SQNR of INT8 against the float file's logits is 9.5 dB",
    ]
    near = replace(BLIND, fidelity={"int8": Fidelity(0.99, 1e-3, None, 500)})
    assert shortfalls(default_checks(), STRICT, near) == []
    absent = shortfalls(default_checks(), STRICT, replace(BLIND, fidelity={}))
    assert [one.line.partition(":")[0] for one in absent] == [
        "verify.min_float_agreement=0.95", "verify.max_float_kl=0.1", "verify.min_float_sqnr=12.0",
    ]  # fmt: skip
    assert (
        shortfalls(default_checks(), STRICT, replace(GOOD, fidelity=BLIND.fidelity)) == []
    )  # with labels, only accuracy is bounded


def test_what_would_mend_it_needs_no_labels() -> None:
    def fix(config: Config) -> str:
        bounds = VerifyConfig(max_float_kl=0.1)
        found = shortfalls(default_checks(), bounds, replace(BLIND, config=asdict(config)))
        (told,) = {either(one.fixes) for one in found}
        return told

    calibrated = Config(schedule=ScheduleConfig(epochs=0))
    assert fix(calibrated) == (
        "calibration=auto, or algorithm=auto (uses the algorithms that help), or precision=auto (keeps the operators "
        "that lose most in float), or schedule=qat_sgd schedule.distill=1 (learns from the float model; "
        "schedule=qat_adamw for a transformer)"
    )
    searched = CalibrationConfig(search="tournament")
    trained = Config(calibration=searched, schedule=ScheduleConfig(epochs=2, distill=1.0))
    assert fix(trained) == (
        "algorithm=auto (uses the algorithms that help), or precision=auto (keeps the operators that lose most in "
        "float), or "
        "schedule.epochs=4"
    )


def test_the_table_the_lines_and_the_page() -> None:
    text, page = plain_report(BLIND), render_page(BLIND)
    assert "same top-1 class as float, %        KL  SQNR dB" in text.splitlines()[2]
    assert "88.00  2.50e-01      9.5" in next(
        line for line in text.splitlines() if line.startswith("INT8, ONNX")
    )
    assert "outputs against the float file's on 500 images without labels" in text
    assert (
        "accuracy is unknown without labels; against the float file on 500 images:"
        " same top-1 class 88.00 %, KL 2.50e-01" in text
    )
    assert "accuracy on" not in text and "top-5" not in text + page
    assert "88.00 %" in page and "Same top-1 class as the float file" in page


def test_with_labels_it_is_one_line_more() -> None:
    told: Results = replace(GOOD, fidelity={"int8": Fidelity(0.98, 2e-3, 24.0, 512)})
    before, after = plain_report(GOOD).splitlines(), plain_report(told).splitlines()
    line = "against the float file on 512 images: same top-1 class 98.00 %, KL 2.00e-03, logits SQNR 24.0 dB"
    assert [one for one in after if one != line] == before and line in after
    assert line in render_page(told)


def test_each_output_has_its_own_figure_and_its_worst_channel() -> None:
    draw = np.random.default_rng(0)
    exact = draw.normal(size=(6, 5, 3)) * [100.0, 1.0, 1.0]
    found = exact + draw.normal(size=exact.shape) * 0.3
    distance = OutputDistance()
    for rows in (slice(0, 4), slice(4, 6)):
        distance.add(exact[rows], found[rows])
    told = distance.figures("boxes")

    def ratio(a: Any, b: Any) -> float:
        return 10 * math.log10(float(np.square(a).sum() / np.square(a - b).sum()))

    assert told["sqnr_db"] == pytest.approx(ratio(exact, found))
    channels = [ratio(exact[..., i], found[..., i]) for i in range(3)]
    assert (told["worst_channel"], told["channels"]) == (int(np.argmin(channels)), 3)
    assert told["worst_channel_db"] == pytest.approx(min(channels))


def test_channels_of_one_scale_are_not_told_apart() -> None:
    exact = np.random.default_rng(0).normal(size=(6, 5))
    distance = OutputDistance()
    distance.add(exact, exact + 0.1)
    assert set(distance.figures("scores")) == {"name", "sqnr_db"}
    same = OutputDistance()
    same.add(exact, exact)
    assert same.figures("scores")["sqnr_db"] is None
