"""Tests of how calibration, backends and overrides change the files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_run import SEED, Net, calibrate_only, digits_test, logits, report_of, sha256, tiny, weights_of
from torch import Tensor

from qatkit.config.schema import (
    BackendConfig,
    CalibrationConfig,
    ExportConfig,
    ModelConfig,
    OverrideConfig,
    ScheduleConfig,
    VerifyConfig,
)
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.run.loop import fit
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


def test_without_epochs_the_weights_are_the_float_ones(tmp_path: Path) -> None:
    assert pipeline.train(calibrate_only(tmp_path / "run")) == 0

    folder = tmp_path / "run"
    state = weights_of(folder / "last.ckpt")
    initializers = {t.name: t for t in onnx.load(str(folder / "model.float.onnx")).graph.initializer}
    weights = [onnx.numpy_helper.to_array(t) for t in initializers.values() if len(t.dims) == 4]
    assert len(weights) == 2
    for name in ("graph.conv1.weight", "graph.conv2.weight"):
        assert any(w.shape == tuple(state[name].shape) and np.array_equal(w, state[name]) for w in weights)
    images, _ = digits_test()
    expected, got = (logits(folder / f"model.{name}.onnx", images) for name in ("float", "int8"))
    spread = expected.max() - expected.min()
    assert 0 < np.abs(got - expected).max() < 0.05 * spread


def test_a_table_for_tensorrt_joins_the_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = replace(calibrate_only(folder), export=ExportConfig(tensorrt_table="8601"))
    assert pipeline.train(config) == 0
    lines = (folder / "tensorrt.table").read_text().splitlines()
    assert lines[0] == "TRT-8601-EntropyCalibration2" and lines[1].startswith("input: ")
    tensors = {o for node in onnx.load(str(folder / "model.float.onnx")).graph.node for o in node.output}
    assert {line.split(": ")[0] for line in lines[1:]} <= tensors | {"input"}
    assert len(lines) > len(json.loads((folder / "ranges.json").read_text()))
    assert "tensorrt.table" in {record["name"] for record in report_of(folder)["files"]}


def test_qnnpack_gives_signed_activations(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend = BackendConfig(target="qatkit.quant.backends.QNNPACK")

    assert pipeline.train(config) == 0

    graph = onnx.load(str(tmp_path / "run" / "model.int8.onnx")).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    points = [tensors[node.input[2]].data_type for node in graph.node if node.op_type == "QuantizeLinear"]
    assert set(points) == {onnx.TensorProto.INT8}
    assert len(points) >= 5
    reported = report_of(tmp_path / "run")
    wanted = {"session.qdqisint8allowed": "1", "session.qdq_matmulnbits_accuracy_level": "0"}
    assert reported["session_options"] == wanted
    assert reported["audit"]["ok"]


@pytest.mark.parametrize(
    ("pattern", "site", "weight"), [("op/linear", "fc", (10, 16)), ("conv2", "conv2", (16, 16, 3, 3))]
)
def test_an_override_leaves_an_operator_float(
    tmp_path: Path, pattern: str, site: str, weight: tuple[int, ...]
) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend = BackendConfig(overrides={pattern: OverrideConfig(float=True)})

    assert pipeline.train(config) == 0

    graph = onnx.load(str(tmp_path / "run" / "model.int8.onnx")).graph
    kinds = {tuple(sorted(t.dims)): t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert kinds.pop(tuple(sorted(weight))) == onnx.TensorProto.FLOAT
    assert set(kinds.values()) == {onnx.TensorProto.INT8}
    skipped = dict(report_of(tmp_path / "run")["skipped"])
    assert skipped[site] == f"float by override '{pattern}'"


class NeverCalibrates(QATModule):
    """A module that fails when it calibrates, since a run with a cache must not."""

    def calibrate(self, batches: Iterable[Tensor]) -> int:
        raise AssertionError("an image was looked at")


def test_a_tournament_is_reported_and_its_cache_is_reused(tmp_path: Path) -> None:
    chosen = CalibrationConfig(
        observer="qatkit.quant.observers.MSEObserver",
        images=64,
        search="tournament",
        cache=str(tmp_path / "ranges.safetensors"),
    )
    first, second = (
        tiny(
            tmp_path / name,
            calibration=chosen,
            model=ModelConfig(name=f"{__name__}.Net"),
            schedule=ScheduleConfig(epochs=0),
            verify=VerifyConfig(latency_runs=3, threads=1, max_drop=None),
        )
        for name in ("first", "second")
    )
    torch.manual_seed(SEED)  # the float weights are drawn at random
    assert pipeline.train(first) == 0
    assert pipeline.train(second, NeverCalibrates) == 0
    reports = [report_of(tmp_path / name) for name in ("first", "second")]
    assert reports[0]["calibration"] == reports[1]["calibration"]
    (winner,) = [row for row in reports[0]["calibration"] if row["chosen"]]
    (plain,) = [row for row in reports[0]["calibration"] if row["method"] == "min-max"]
    assert winner["images"] == 16 and winner["top1"] >= plain["top1"]
    assert sha256(tmp_path / "first" / "model.int8.onnx") == sha256(tmp_path / "second" / "model.int8.onnx")
    assert winner["method"] in (tmp_path / "second" / "report.html").read_text()


@pytest.mark.parametrize("spoil", ["other settings", "damaged"])
def test_a_foreign_cache_is_refused_before_anything_long(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "ranges.safetensors"
    first = calibrate_only(tmp_path / "first")
    first.calibration.cache = str(cache)
    assert pipeline.train(first) == 0
    second = tiny(tmp_path / "second", calibration=replace(first.calibration))
    if spoil == "damaged":
        cache.write_bytes(cache.read_bytes()[:-1])
    else:
        second.calibration.batch_size = 16
    monkeypatch.setattr(fit, "fit", _never)
    with pytest.raises(ConfigError, match=r"calibration\.cache=.*ranges\.safetensors: "):
        pipeline.train(second)
    assert not (tmp_path / "second").exists()


def _never(*_: object, **__: object) -> None:
    raise AssertionError("the float model was trained first")


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_runs_without_training_need_no_training_batch(mode: str, tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.data = replace(config.data, train_images=70, batch_size=128)
    config.export = ExportConfig(mode=mode)
    assert pipeline.train(config) == 0
    assert {f"model.{'int8' if mode == 'static' else mode}.onnx", "report.json"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


class OneFarOut(Net):
    """A network whose conv2 has one weight of 0.6 among 2,304 weights of at most 1/12."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        with torch.no_grad():
            self.conv2.weight[0, 0, 0, 0] = 0.6


def test_clipped_weights_are_trained_shipped_and_exported_again(tmp_path: Path) -> None:
    """Checks calibration.weights=mse where it helps: one scale for a 7-bit weight tensor with an outlier.

    A scale given by an override is kept throughout, and the report lists what the selectors matched.
    """
    chosen = CalibrationConfig(images=64, weights="mse")
    given = OverrideConfig(activation_scale=0.01, activation_zero_point=100)
    backend = BackendConfig(
        reduce_range=True,
        overrides={"*": OverrideConfig(weight_granularity="per_tensor"), "tensor/input": given},
    )
    run = tiny(
        tmp_path / "run",
        model=ModelConfig(name=f"{__name__}.OneFarOut"),
        calibration=chosen,
        backend=backend,
        schedule=ScheduleConfig(epochs=1, float_epochs=0, lr=1e-3),
    )
    assert pipeline.train(run) == 0
    stored = weights_of(tmp_path / "run" / "last.ckpt")
    assert stored["graph.conv2.weight_fake_quant.clip"] == pytest.approx(0.96)
    parity = report_of(tmp_path / "run")["parity"]
    assert parity["unoptimized"]["agreement"] == parity["optimized"]["agreement"] == 1.0
    matched = report_of(tmp_path / "run")["measured"]["overrides"]["matched"]
    assert [one["selector"] for one in matched] == ["*", "tensor/input"]
    assert matched[0]["count"] == len(matched[0]["names"]) > 1 and matched[1]["names"] == ["input"]
    assert float(stored["graph.input_quant.scale"]) == pytest.approx(0.01)
    again = replace(run, output_dir=str(tmp_path / "again"), checkpoint=str(tmp_path / "run" / "last.ckpt"))
    assert export_checkpoint.export(again) == 0
    first, second = (sha256(tmp_path / folder / "model.int8.onnx") for folder in ("run", "again"))
    assert first == second


def test_only_weights_below_8_bits_are_clipped_by_least_squares(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend.overrides = {"conv2": OverrideConfig(weight_dtype="int4")}
    assert pipeline.train(config) == 0
    tensors = weights_of(tmp_path / "run" / "last.ckpt")
    stored = {
        name: value.double().numpy() for name, value in tensors.items() if name.endswith(("weight", "clip"))
    }
    weight = stored["graph.conv2.weight"].reshape(16, -1)
    # A symmetric int4 range has 7 integers on either side of zero; clipping the largest values gives finer
    # steps.
    shares = np.linspace(0.3, 1.0, 71)
    for row, clip in zip(weight, stored["graph.conv2.weight_fake_quant.clip"], strict=True):
        errors = [np.square(row - scale * np.clip(np.rint(row / scale), -7, 7)).sum()
                  for scale in shares * np.abs(row).max() / 7]  # fmt: skip
        found = clip * np.abs(row).max() / 7
        error = np.square(row - found * np.clip(np.rint(row / found), -7, 7)).sum()
        assert error <= 1.05 * min(errors)
    assert (stored["graph.conv2.weight_fake_quant.clip"] < 1).any()
    assert (stored["graph.conv1.weight_fake_quant.clip"] == 1).all()


def test_noise_instead_of_images_is_said_aloud(tmp_path: Path) -> None:
    config = tiny(
        tmp_path / "run",
        calibration=CalibrationConfig(images=64, random=True),
        schedule=ScheduleConfig(epochs=0),
        verify=VerifyConfig(latency_runs=3, threads=1, max_drop=None),
    )
    with pytest.warns(UserWarning, match="calibrated on random noise"):
        assert pipeline.train(config) == 0
    (note,) = report_of(tmp_path / "run")["notes"]
    assert "random noise" in note and note in (tmp_path / "run" / "report.html").read_text()
