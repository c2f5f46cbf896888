"""Tests of algorithm_choice=auto: only algorithms that help are kept, and the judged file is written."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_run import calibrate_only, logits, report_of, sha256
from torch import fx

from qatkit.algorithms import Algorithm
from qatkit.algorithms.base import CALIBRATED, FUSED, OBSERVED
from qatkit.choose.ranges import splits
from qatkit.choose.verdict import Verdict, why_not
from qatkit.config.rules import validate
from qatkit.config.schema import Config, OverrideConfig, TargetConfig
from qatkit.graph.pass_result import PassResult
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.quant.qat_layers import QATOperator
from qatkit.run.build import data_of
from qatkit_verify.errors import ConfigError


@dataclass(frozen=True)
class Spoil(Algorithm):
    """An algorithm that moves every bias far away."""

    stage: ClassVar[str] = CALIBRATED
    images: int = 8

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        operators = [m for m in graph_module.modules() if isinstance(m, QATOperator) and m.bias is not None]
        with torch.no_grad():
            for operator in operators:
                assert operator.bias is not None
                operator.bias += 0.5 * torch.linspace(-1, 1, len(operator.bias))
        return PassResult(graph_module, len(operators))


@dataclass(frozen=True)
class Costly(Spoil):
    """An expensive algorithm that must not be tried when the target is met."""

    expensive: ClassVar[bool] = True

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        raise AssertionError("tried")


def competing(folder: Path, *names: str) -> Config:
    """Returns a config without training; with one scale per conv weight, int8 is poor without algorithms."""
    config = calibrate_only(folder)
    config.model.name = "tiny_run.Uneven"
    config.calibration = replace(config.calibration, images=128)
    config.backend.overrides = {"conv*": OverrideConfig(weight_granularity="per_tensor")}
    known = {"equalize": "qatkit.algorithms.Equalize", "bias_correction": "qatkit.algorithms.BiasCorrection"}
    config.algorithm = {
        name: {"target": known.get(name, f"{__name__}.{name.capitalize()}")} for name in names
    }
    return replace(config, algorithm_choice="auto", target=TargetConfig(max_drop=50.0))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = competing(tmp_path_factory.mktemp("compete") / "run", "equalize", "spoil", "costly")
    config.target.max_drop = 0.0  # never met beyond noise
    config.algorithm.pop("costly")
    assert pipeline.train(config) == 0
    return config


def folder_of(config: Config) -> Path:
    assert config.output_dir is not None
    return Path(config.output_dir)


def test_what_pays_is_kept_and_what_spoils_is_not(finished: Config) -> None:
    rows = {row["name"]: row for row in report_of(folder_of(finished))["algorithms"]}
    assert list(rows) == ["none", "equalize", "spoil"]
    assert [rows[name]["kept"] for name in rows] == [True, True, False]
    assert rows["equalize"]["sqnr_db"] > rows["none"]["sqnr_db"] + 3
    assert rows["spoil"]["sqnr_db"] < rows["equalize"]["sqnr_db"] and rows["spoil"]["why"]
    page = (folder_of(finished) / "report.html").read_text()
    assert "Kept: equalize." in page


def test_figures_are_those_of_the_file_on_held_out_images(finished: Config) -> None:
    data, folder = data_of(finished), folder_of(finished)
    seen, held_out = splits(data, finished)
    assert not set(seen) & set(held_out) and len(held_out) == 32
    images = np.concatenate([part.numpy() for part, _ in data.image_batches(held_out, 32)])
    exact, found = (
        logits(folder / f"model.{name}.onnx", images).astype(np.float64) for name in ("float", "int8")
    )
    size = np.square(exact - exact.mean(1, keepdims=True)).mean()
    row = next(row for row in report_of(folder)["algorithms"] if row["name"] == "equalize")
    assert row["sqnr_db"] == pytest.approx(-10 * np.log10(np.square(found - exact).mean() / size), abs=1e-3)
    assert row["agreement"] == (found.argmax(1) == exact.argmax(1)).mean()


def test_the_checkpoint_knows_what_was_kept(finished: Config, tmp_path: Path) -> None:
    """Exporting again gives the same bytes, and a resumed run reports the same."""
    folder = folder_of(finished)
    again = replace(finished, checkpoint=str(folder / "last.ckpt"), output_dir=str(tmp_path / "again"))
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(folder / "model.int8.onnx")
    before = report_of(folder)
    (folder / "report.json").unlink()
    assert pipeline.train(replace(finished, resume=str(folder / "last.ckpt"))) == 0
    after = report_of(folder)
    for key in ("algorithms", "skipped", "accuracy"):
        assert after[key] == before[key]


def test_a_target_that_is_met_ends_the_competition(tmp_path: Path) -> None:
    config = competing(tmp_path / "run", "equalize", "costly")
    assert pipeline.train(config) == 0
    rows = report_of(tmp_path / "run")["algorithms"]
    assert [(row["name"], row["kept"]) for row in rows] == [
        ("none", True),
        ("equalize", False),
        ("costly", False),
    ]
    assert all("target" in row["why"] for row in rows[1:])


def verdict(errors: list[float], right: list[bool] | None = None) -> Verdict:
    count = len(errors)
    return Verdict(
        None if right is None else np.array(right), np.ones(count, bool), np.array(errors, np.float64)
    )


@pytest.mark.parametrize(
    ("trial", "best", "why"),
    [
        (verdict([0.10, 0.11, 0.09, 0.10]), verdict([0.2, 0.21, 0.19, 0.21]), ""),
        (verdict([0.2, 0.1, 0.3, 0.1]), verdict([0.1, 0.3, 0.1, 0.2]), "no difference beyond noise"),
        (verdict([0.2, 0.21, 0.19, 0.2]), verdict([0.1, 0.11, 0.09, 0.1]), "worse"),
        (verdict([0.1] * 8, [False] * 8), verdict([0.2] * 8, [True] * 8), "loses 8 images"),
        (verdict([0.10, 0.1], [True, False]), verdict([0.2, 0.21], [True, True]), ""),
        (verdict([0.1, 0.3]), verdict([0.1, 0.3]), "finds nothing to change"),
        (verdict([float("nan")] * 4), verdict([0.1] * 4), "its outputs are not finite"),
    ],
)
def test_only_a_gain_beyond_noise_pays(trial: Verdict, best: Verdict, why: str) -> None:
    assert why_not(trial, best) == why


def test_nothing_competes_without_algorithms_or_images() -> None:
    with pytest.raises(ConfigError, match="algorithm_choice=auto"):
        validate(Config(algorithm_choice="auto"))
    config = competing(Path("anywhere"), "equalize")
    config.calibration.random = True
    with pytest.raises(ConfigError, match=r"calibration\.random"):
        validate(config)


@dataclass(frozen=True)
class Idle(Algorithm):
    """An algorithm that finds nothing to change."""

    stage: ClassVar[str] = CALIBRATED
    images: int = 8

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        return PassResult(graph_module)


@dataclass(frozen=True)
class IdleBefore(Idle):
    """An Idle that runs before calibration."""

    stage: ClassVar[str] = FUSED


def test_an_idle_algorithm_is_reported_also_after_a_resume(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.algorithm = {name: {"target": f"{__name__}.{name}"} for name in ("Idle", "IdleBefore")}
    assert pipeline.train(config) == 0
    told = report_of(tmp_path / "run")["skipped"]
    assert [row for row in told if "Idle" in row[0]] == [
        ["IdleBefore", "finds nothing to change"],
        ["Idle", "finds nothing to change"],
    ]
    (tmp_path / "run" / "report.json").unlink()
    assert pipeline.train(replace(config, resume=str(tmp_path / "run" / "last.ckpt"))) == 0
    assert report_of(tmp_path / "run")["skipped"] == told


def test_pre_range_algorithms_are_first_judged_by_ranges_alone(tmp_path: Path) -> None:
    config = competing(tmp_path / "run", "bias_correction", "equalize")
    config.algorithm["idle"] = {"target": f"{__name__}.IdleBefore"}
    config.algorithm = {name: config.algorithm[name] for name in ("bias_correction", "idle", "equalize")}
    config.target.max_drop = 0.0  # never met beyond noise
    pipeline.train(config)
    rows = {row["name"]: row for row in report_of(tmp_path / "run")["algorithms"]}
    assert rows["bias_correction"]["kept"]
    # It changes nothing; its figures are those with ranges only, without another bias correction.
    assert rows["idle"]["why"] == "with ranges only: finds nothing to change"
    assert rows["idle"]["sqnr_db"] == rows["none"]["sqnr_db"] < rows["bias_correction"]["sqnr_db"]
    assert rows["equalize"]["kept"] and rows["equalize"]["sqnr_db"] > rows["bias_correction"]["sqnr_db"]


@dataclass(frozen=True)
class Halve(Idle):
    """An algorithm that changes three sites."""

    stage: ClassVar[str] = OBSERVED

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        time.sleep(0.2)
        return PassResult(graph_module, changed=3)


def test_a_fixed_list_is_reported_in_the_order_of_its_calls(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    paths = {"last": "Idle", "mine": "Halve", "first": "IdleBefore"}
    config.algorithm = {name: {"target": f"{__name__}.{kind}"} for name, kind in paths.items()}
    assert pipeline.train(config) == 0
    ran = report_of(tmp_path / "run")["ran"]
    assert [(one["name"], one["stage"], one["changed"]) for one in ran] == [
        ("first", FUSED, 0),
        ("mine", OBSERVED, 3),
        ("last", CALIBRATED, 0),
    ]
    assert ran[1]["seconds"] >= 0.2 > ran[2]["seconds"]
    page = (tmp_path / "run" / "report.html").read_text()
    told = page.partition("<h2>Algorithms</h2>")[2].partition("</section>")[0]
    assert -1 < told.find(">first<") < told.find(">mine<") < told.find(">last<")
    assert "<td>3 sites</td>" in told
    (tmp_path / "run" / "report.json").unlink()
    assert pipeline.train(replace(config, resume=str(tmp_path / "run" / "last.ckpt"))) == 0
    again = report_of(tmp_path / "run")["ran"]
    assert [one["name"] for one in again] == ["first", "mine", "last"] and again[1:] == ran[1:]
