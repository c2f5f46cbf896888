"""Tests of the commands that a run proposes: each is composed as if typed, and does what it promises."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CONF

from qatkit.cli.export_command import export_run
from qatkit.cli.train_command import train_run
from qatkit.config.argv import EXPORT, TRAIN, typing
from qatkit.config.compose import compose_config, register, save_config
from qatkit.config.schema import Config
from qatkit.records.results import Results
from qatkit.report.next_steps import after_cleaning, after_summary, lines, next_steps
from qatkit.verify.checks.accuracy import AccuracyCheck
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.classification import classified
from qatkit_verify.command import _parser
from qatkit_verify.records import Latency

CHECKS = [AccuracyCheck()]
ADAPT = {"train.py": train_run, "export.py": export_run}


@pytest.fixture(autouse=True)
def _schema() -> None:
    register()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a run folder whose name both a shell and Hydra would split unless it is quoted."""
    made = tmp_path / "my runs, {new}" / "a=b"
    made.mkdir(parents=True)
    return made


def composed(command: str) -> Config:
    """Returns the configuration that the script of a printed command composes."""
    uv, run, script, *words = shlex.split(command)
    assert (uv, run) == ("uv", "run")
    return compose_config(CONF, words, ADAPT[script])


def results_of(made: Config, folder: Path, lost: float, **more: Any) -> Results:
    """Returns the results, with shortfalls, of a run whose INT8 file loses `lost` points of top-1."""
    fast = Latency(10.0, 9.5, 11.0, 1.0, 1.0, 1.0, 1, 2, 50)
    given: dict[str, Any] = {
        "accuracy": {"float": classified(80, 98, 1000), "int8": classified(80 - lost, 97, 1000)},
        "latency": {"float": fast, "int8": replace(fast, median_ms=5.0, ratio=2.0)},
        "measured": {"paired": {"lost": lost, "interval": 0.2}},
        "config": asdict(made),
    }
    found = Results("run", "resnet18", str(folder), **(given | more))
    short = shortfalls(CHECKS, made.verify, found)
    return replace(found, shortfalls=[one.line for one in short], fixes=[one.fixes for one in short])


def proposed(typed: Sequence[str], folder: Path, lost: float, program: str = TRAIN, **more: Any) -> list[str]:
    """Returns the commands proposed after a run with these arguments."""
    config = compose_config(CONF, typed, ADAPT[f"{program}.py"])
    save_config(config, folder / "config.yaml")
    (folder / "last.ckpt").touch()
    with typing(typed, program):
        steps = next_steps(results_of(config, folder, lost, **more))
        assert lines(steps)[:1] == (["next:"] if steps else [])
        return [one.command for one in steps]


CIFAR = ("data.root=/my pictures", "model.checkpoint=/w/r 18.pt")


def test_a_missed_bound_leads_to_its_fix_and_to_an_analysis(folder: Path) -> None:
    typed = ["recipe=resnet18_cifar10_ptq", "calibration=mse", "algorithm=none", *CIFAR]
    fixed, analysed, trained = map(composed, proposed(typed, folder, lost=2.0))
    assert fixed.calibration.search == "tournament" and fixed.data.root == "/my pictures"
    assert fixed.algorithm == {} and fixed.output_dir is fixed.resume is None
    assert analysed.resume == str(folder / "last.ckpt") and analysed.analysis.sensitivity == "exact"
    assert replace(analysed, resume=None, analysis=fixed.analysis, calibration=fixed.calibration) == fixed
    assert trained.name == "resnet18_cifar10_qat" and trained.schedule.epochs > 0
    assert (trained.data.root, trained.model.checkpoint) == ("/my pictures", "/w/r 18.pt")


def test_a_climb_comes_before_an_analysis(folder: Path) -> None:
    typed = ["recipe=resnet18_cifar10_ptq", *CIFAR]
    climb = "uv run train.py recipe=resnet18_cifar10_ptq rescue=ladder"
    assert proposed(typed, folder, lost=2.0, climb=climb)[1] == climb


def test_a_met_bound_leads_to_a_check_of_the_bundle(folder: Path) -> None:
    typed = ["recipe=resnet18_cifar10_ptq", "export.bundle=true", *CIFAR]
    (command,) = proposed(typed, folder, lost=0.0)
    assert shlex.split(command) == ["uv", "run", "qatkit-verify", str(folder / "bundle")]
    assert _parser().parse_args(shlex.split(command)[3:]).paths == [folder / "bundle"]
    (zipped,) = proposed([*typed, "export.bundle_as=zip"], folder, lost=0.0)
    assert zipped.endswith("bundle.zip'")


def test_a_bundle_of_a_slower_file_is_checked_without_its_speed(folder: Path) -> None:
    """`qatkit-verify` requires a speed-up of 1 by default, which would fail right after a run that met its bounds."""
    typed = ["recipe=resnet18_cifar10_ptq", "export.bundle=true", *CIFAR]
    both = {
        name: Latency(10.0, 9.5, 11.0, ratio, ratio, ratio, 1, 2, 50)
        for name, ratio in (("float", 1.0), ("int8", 0.6))
    }
    command = proposed(typed, folder, lost=0.0, latency=both)[0]
    assert _parser().parse_args(shlex.split(command)[3:]).min_speedup == 0
    bounded = proposed([*typed, "verify.min_speedup=0.5"], folder, lost=0.0, latency=both)[0]
    assert _parser().parse_args(shlex.split(bounded)[3:]).min_speedup is None


def test_a_run_without_a_bundle_leads_to_one(folder: Path) -> None:
    typed = ["recipe=resnet18_cifar10_ptq", "export.bundle=false", "verify.max_drop=1", *CIFAR]
    made, trained = map(composed, proposed(typed, folder, lost=0.25))
    assert made.checkpoint == str(folder / "last.ckpt") and made.export.bundle
    assert trained.name == "resnet18_cifar10_qat"


def test_a_float_training_leads_to_fine_tuning_of_its_model(folder: Path) -> None:
    typed = ["recipe=resnet18_cifar10_float", "data.root=/d", "schedule.float_epochs=14"]
    commands = proposed(typed, folder, lost=0.0)
    trained = composed(commands[-1])
    assert trained.model.checkpoint == str(folder / "float.ckpt")
    assert (trained.name, trained.schedule.float_epochs) == ("resnet18_cifar10_qat", 0)
    assert trained.schedule.epochs > 0


def test_fine_tuning_leads_to_a_comparison_and_a_control(folder: Path) -> None:
    typed = ["recipe=resnet18_qat", "data.root=/d", "export.bundle=false"]
    made, controlled = map(composed, proposed(typed, folder, lost=0.0))
    assert made.export.bundle and controlled.verify.control
    other = folder.parent / "other run"
    other.mkdir()
    (other / "report.json").touch()
    compared = proposed(typed, folder, lost=0.0)[1]
    assert shlex.split(compared) == ["uv", "run", "qatkit", "compare", str(folder.parent)]


def test_a_slow_file_leads_to_a_measured_placement(folder: Path) -> None:
    slow = Latency(10.0, 9.5, 11.0, 0.5, 0.5, 0.5, 1, 2, 50)
    commands = proposed(["recipe=resnet18_qat", "data.root=/d"], folder, 0.0, latency={"int8": slow})
    assert [composed(one).placement for one in commands[1:2]] == ["measured"]


def test_a_given_file_is_quantized_by_another_mode(folder: Path) -> None:
    model = folder / "my model.onnx"
    model.touch()
    typed = [f"onnx='{model}'", "mode=dynamic", "data=digits"]
    kept = {"config": asdict(compose_config(CONF, typed, export_run))}
    for group in ("model", "quantizer", "algorithm", "schedule"):  # the report leaves them out too
        kept["config"].pop(group)
    (other,) = map(composed, proposed(typed, folder, 2.0, EXPORT, **kept))
    assert (other.mode, other.onnx, other.data.source) == (
        "weight_only",
        str(model),
        compose_config(CONF, ["data=digits"]).data.source,
    )
    (static,) = map(composed, proposed(typed, folder, 0.0, EXPORT, **kept))
    assert (static.mode, static.onnx) == ("static", str(model))


def test_files_that_only_change_lead_to_the_next_look(folder: Path) -> None:
    model = folder / "model.clean.onnx"
    with typing([], EXPORT):
        after = [composed(one.command) for one in after_cleaning(model)]
        (encoded,) = after_summary(model, quantized=True)
    assert [(one.mode, one.onnx) for one in after] == [("summary", str(model)), ("static", str(model))]
    assert composed(encoded.command).mode == "encodings"


@pytest.mark.parametrize("within", [lambda: typing(None), lambda: typing(["recipe=x"], swept=True)])
def test_nothing_is_proposed_where_nothing_was_typed_for_it(within: Callable[[], Any], folder: Path) -> None:
    config = compose_config(CONF, ["recipe=quickstart"])
    with within():
        assert next_steps(results_of(config, folder, lost=9.0)) == ()
        assert after_cleaning(folder) == ()
