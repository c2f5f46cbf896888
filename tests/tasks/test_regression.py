"""Tests of regression: metrics, loss and agreement against formulas, and INT8's shift against NumPy."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qatkit.config.schema import Config, ScheduleConfig, VerifyConfig
from qatkit.records.results import Results
from qatkit.report import plain_report, render_page
from qatkit.tasks import task_of
from qatkit.tasks.regression import Regression
from qatkit.verify.checks.base import Shortfall, Subject
from qatkit.verify.checks.bias import FIX, BiasCheck, fixes_of
from qatkit_verify.compare import Output
from qatkit_verify.records import Scores

COUNT = 500


@pytest.fixture(scope="module")
def numbers() -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Returns outputs [N, 2] and targets [N, 2], whose two values have very different magnitudes."""
    draw = np.random.default_rng(0)
    targets = draw.normal(size=(COUNT, 2)) * [3.0, 2000.0] + [1.0, -500.0]
    return (targets + draw.normal(size=(COUNT, 2)) * [0.3, 90.0]).astype(np.float32), targets


def fitted(targets: NDArray[Any]) -> Regression:
    task = task_of("regression").of_data([tuple(row) for row in targets.tolist()])
    assert isinstance(task, Regression)
    return task


def test_metrics_are_those_of_their_formulas(numbers: tuple[Any, Any]) -> None:
    outputs, targets = numbers
    task = fitted(targets)
    meter = task.meter()
    for start in range(0, COUNT, 70):
        meter.add(outputs[start : start + 70], targets[start : start + 70])
    absolute, root = meter.result().metrics
    errors = outputs.astype(np.float64) - targets
    assert absolute.value == pytest.approx(np.abs(errors).mean()) and absolute.name == "MAE"
    assert root.value == pytest.approx(np.sqrt((errors**2).mean())) and root.name == "RMSE"
    assert task.mean(task.values(outputs, targets)) == pytest.approx(absolute.value)
    one = Regression().meter()
    one.add(outputs[:, 0], targets[:, 0])  # [N] against [N], for one value
    one.add(outputs[:, :1], targets[:, 0])  # and [N, 1] against [N]
    assert one.result().score == pytest.approx(np.abs(errors[:, 0]).mean())


def test_the_loss_does_not_depend_on_the_unit(numbers: tuple[Any, Any]) -> None:
    outputs, targets = numbers
    scaled = (outputs.astype(np.float64) - targets) / targets.std(0)
    wanted = np.where(np.abs(scaled) < 1, scaled**2 / 2, np.abs(scaled) - 0.5).mean()
    for unit in (1.0, 1e-3, 1e4):
        pair = [torch.from_numpy(one * unit).float() for one in (outputs, targets)]
        loss = fitted(targets * unit).loss(pair[0], pair[1], ScheduleConfig())
        assert float(loss) == pytest.approx(wanted, rel=1e-3)


def test_values_agree_within_a_share_of_the_spread(numbers: tuple[Any, Any]) -> None:
    outputs, targets = numbers
    task, near = fitted(targets), outputs + np.array([0.1, 60.0], np.float32) * np.random.default_rng(1).normal(
        size=outputs.shape
    ).astype(np.float32)  # fmt: skip
    counted = task.agreement()
    for start in range(0, COUNT, 64):
        counted.add(outputs[start : start + 64], near[start : start + 64])
    wanted = (np.abs(near.astype(np.float64) - outputs) <= 0.05 * targets.std(0)).all(1)
    assert counted.share == pytest.approx(wanted.mean()) and 0.2 < counted.share < 0.95


def test_two_ways_to_compute_a_value_are_held_to_a_step() -> None:
    """A single column must not be compared by argmax, which would always agree."""
    output = Output(1, task_of("regression").rule)
    output.add(np.array([[0.0], [1.0], [2.0]], np.float32), [np.array([[0.05], [1.0], [2.3]], np.float32)])
    assert output.comparisons(0.1)[0].agreement == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ([1.0, 1.0], "targets of train must differ between samples, but are always 1"),
        (
            [(1.0, 2.0), (1.5, 2.0)],
            "value 1 of the targets of train must differ between samples, but is always 2",
        ),
        (
            [(1.0, 2.0), 3.0],
            "targets of train must all have the same number of values, but there are single numbers and lists of 2",
        ),
        ([1.0, 2.0], ""),
        ([-1, -1], ""),  # without targets
    ],
)
def test_targets_are_checked_together(targets: list[Any], told: str) -> None:
    assert Regression().check_targets("train", (), [Regression().target(one) for one in targets]) == told


@pytest.mark.parametrize("value", ["three", None, float("nan"), [1.0, "x"], []])
def test_a_target_is_a_finite_number_or_several(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="targets must be "):
        Regression().target(value)


def test_the_model_gives_a_value_for_each_target(numbers: tuple[Any, Any]) -> None:
    task = fitted(numbers[1])
    assert task.width(()) == 2 and task.fits((8, 2), 8, 2) and not task.fits((8,), 8, 2)
    one = Regression().of_data([1.0, 2.0])
    assert (
        one.width(()) == 1 and one.fits((8,), 8, 1) and one.fits((8, 1), 8, 1) and not one.fits((8, 2), 8, 1)
    )


def line(path: Path, factor: float, shift: float) -> Path:
    """Writes a file that computes factor * x + shift."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 1]) for name in ("x", "y")]
    nodes = [helper.make_node("Mul", ["x", "a"], ["ax"]), helper.make_node("Add", ["ax", "b"], ["y"])]
    stored = [
        numpy_helper.from_array(np.array(one, np.float32), name)
        for one, name in ((factor, "a"), (shift, "b"))
    ]
    graph = helper.make_graph(nodes, "line", values[:1], values[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def shifted(folder: Path, factor: float, shift: float, **config: Any) -> tuple[Results, NDArray[np.float64]]:
    """Returns BiasCheck's results for a file with factor * x + shift instead of x, and the targets."""
    x = np.random.default_rng(3).normal(size=(400, 1)).astype(np.float32)
    targets = 2 * x[:, 0].astype(np.float64)
    files = {"float": line(folder / "f.onnx", 1, 0), "int8": line(folder / "i.onnx", factor, shift)}
    subject = Subject(
        folder, files, lambda: [(x[:150], targets[:150]), (x[150:], targets[150:])], lambda count: (count,),
        VerifyConfig(threads=1), task=Regression().of_data(targets.tolist()),
    )  # fmt: skip
    made = asdict(Config())
    made["export"]["mode"] = "static"
    results = Results("r", "m", str(folder), task=subject.task.names, config=made | config)
    return BiasCheck().measure(subject, results), targets


def test_a_shift_is_found_where_it_is(tmp_path: Path) -> None:
    results, targets = shifted(tmp_path, 1.1, 0.0)  # errors with both signs, about 0 on average
    found = results.measured["bias"]["outputs"][0]
    difference = 0.1 * targets / 2
    assert found["shift"] == pytest.approx(difference.mean(), abs=1e-6)
    edges = np.quantile(targets, np.linspace(0, 1, 6))
    for place, one in enumerate(found["ranges"]):
        inside = (targets >= edges[place]) & (targets < edges[place + 1] + (place == 4))
        assert one["samples"] == inside.sum() == 80
        assert one["shift"] == pytest.approx(difference[inside].mean(), abs=1e-6)
        assert one["error"] == pytest.approx(difference[inside].std() / np.sqrt(80), abs=1e-6)
    lines = BiasCheck().lines(results)
    assert len(lines) == 6 and "for target" in lines[0] and lines[4] == f"to correct the shift: {FIX}"
    share = f"{100 / targets.std():.3g} % of their standard deviation"
    assert lines[5].startswith(f"verify.max_drop=1 is in the unit of the targets and equals {share}")
    page, text = render_page(results), plain_report(results)
    assert "Shift against float" in page and "beyond noise" in page and str(FIX) in page and lines[0] in text


def test_no_shift_needs_no_fix(tmp_path: Path) -> None:
    results, _ = shifted(tmp_path, 1.0, 0.0, verify={"max_drop": 0.1})
    assert fixes_of(results) == []
    assert BiasCheck().lines(results) == [
        "the outputs of INT8 have no mean shift against float beyond noise on 400 samples"
    ]


def test_a_fix_that_was_used_is_not_proposed_again(tmp_path: Path) -> None:
    used = {"algorithm": {"bias_correction": {"target": "qatkit.algorithms.BiasCorrection"}}}
    results, _ = shifted(tmp_path, 1.0, 0.3, **used)
    assert "against float: +0.3 +/- " in BiasCheck().lines(results)[0] and fixes_of(results) == []


def test_a_shift_explains_a_larger_error(tmp_path: Path) -> None:
    results, _ = shifted(tmp_path, 1.0, 0.3)
    metric = results.task.main
    results = replace(
        results, accuracy={"float": Scores((metric.of(0.2),), 400), "int8": Scores((metric.of(0.4),), 400)}
    )
    assert BiasCheck().explains(Shortfall("verify.max_drop=0.1: MAE"), results) == [FIX]
    assert BiasCheck().explains(Shortfall("verify.min_speedup=9: slow"), results) is None
