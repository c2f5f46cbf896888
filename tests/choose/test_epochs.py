"""Tests of choosing the epoch whose exported file is best: which is kept, by which images, and resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from tiny_run import Net, tiny
from torch import Tensor

from qatkit.config.schema import Config, ScheduleConfig
from qatkit.data import NO_LABEL, DataModule, digits
from qatkit.data.sources import TensorImages
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.jobs.training import fine_tune
from qatkit.run.build import data_of, qat_module
from qatkit.run.folder import Run
from qatkit.train.learner import Batch
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import accuracy
from qatkit_verify.errors import ConfigError

HELD_OUT = 200
NORMS: dict[str, Any] = {"batch_norm": "train", "batch_norm_images": 96}
TAUGHT: dict[str, Any] = {"lr": 0.02, "distill": 0.3, "distill_features": ["pool", "bn2"]}


def _config(folder: Path, every: int | None = 1, **schedule: Any) -> Config:
    """Returns a config with a high, constant learning rate.

    Epochs therefore differ, and an epoch does not depend on how many follow.
    """
    settings: dict[str, Any] = {
        "epochs": 1,
        "lr": 0.3,
        "decay": "constant",
        "warmup": 0.0,
        "freeze_observers": 0.0,
        **schedule,
    }
    config = tiny(folder, schedule=ScheduleConfig(**settings))
    config.verify.every, config.verify.held_out = every, HELD_OUT
    config.data.train_images, config.trainer.checkpoint_every = 600, 5
    return config


def _trained(
    config: Config, module_type: type[QATModule] = QATModule, **options: Any
) -> tuple[QATModule, Run]:
    """Runs only the training stage on a random float model, calibrated once; returns the module and run."""
    run, data = Run(config, Path(config.output_dir or "")), data_of(config)
    run.folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    module = qat_module(config, Net(), data.inputs, module_type, **options)
    if not (run.folder / "last.ckpt").exists():
        module.calibrate(images for images, _ in data.calibration_batches(64, 32))
    fine_tune(run, module, data, "last.ckpt", "QAT")
    return module, run


def _top1(file: Path, data: DataModule) -> float:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    right = count = 0
    for images, labels in data.image_batches(data.held_out, 50):
        logits = session.run(None, {"input": images.numpy()})[0]
        right += int((np.asarray(logits).argmax(1) == labels.numpy()).sum())
        count += len(labels)
    assert count == HELD_OUT
    return 100 * right / count


@pytest.mark.slow
def test_the_kept_epoch_is_the_one_whose_file_is_best(tmp_path: Path) -> None:
    """Exports each epoch from a run that ends with it; the best file must equal that of the choosing run."""
    epochs, files, figures = 4, list[bytes](), list[float]()
    for count in range(1, epochs + 1):
        config = _config(tmp_path / str(count), every=count, epochs=count)
        module, run = _trained(config)
        files.append(_exported(module, run.folder))
        figures.append(_top1(run.folder / "model.onnx", data_of(config)))
    config = _config(tmp_path / "chosen", epochs=epochs)
    module, run = _trained(config)
    rows = run.curves["QAT"][1:]  # after the start
    assert [row["score"] for row in rows] == pytest.approx(figures)
    best = max(range(epochs), key=lambda i: (figures[i], i))
    assert best != epochs - 1 and len(set(figures)) > 2  # otherwise the last one would do
    assert [row["kept"] for row in rows] == [i == best for i in range(epochs)]
    assert _exported(module, run.folder) == files[best]


def _exported(module: QATModule, folder: Path) -> bytes:
    export_onnx(module.convert().graph, torch.zeros(2, 3, 8, 8), folder / "model.onnx")
    return (folder / "model.onnx").read_bytes()


class Seeing(QATModule):
    """A module that records its training images, and is interrupted at step `stop_at`."""

    stop_at: int | None = None
    seen: list[Tensor]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.seen.append(batch[0])
        if self.trainer.global_step == self.stop_at:
            raise KeyboardInterrupt
        return super().training_step(batch, index)


def test_held_out_images_are_not_trained_tested_or_calibrated_on(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    data, seen = data_of(config), list[Tensor]()
    module, _ = _trained(config, type("Here", (Seeing,), {"seen": seen}))
    held_out = torch.cat([images for images, _ in data.image_batches(data.held_out, 50)])
    of_test = torch.cat([images for images, _ in data.test_batches()])
    calibrating = torch.cat([images for images, _ in data.calibration_batches(64, 32)])
    labels = [int(data.splits.train.targets[index]) for index in data.held_out]
    assert len(held_out) == HELD_OUT and {labels.count(one) for one in range(10)} == {20}
    assert len(torch.cat(seen)) == 384  # 12 batches of the 400 that are left
    own = {one.numpy().tobytes() for one in held_out}
    for others in (torch.cat(seen), of_test, calibrating):
        assert not own & {one.numpy().tobytes() for one in others}
    assert not set(data.held_out) & set(data.calibration_indices(400))
    assert [row["step"] for row in module.curve] == [0, 12]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"every": 1}, marks=pytest.mark.slow, id="every"),
        pytest.param({"every": None, "ema": 0.9}, marks=pytest.mark.slow, id="ema"),
        pytest.param({"every": None, **NORMS}, marks=pytest.mark.slow, id="batch_norm"),
        pytest.param({"every": None, **TAUGHT}, marks=pytest.mark.slow, id="features"),
        pytest.param({"every": 1, "ema": 0.9, **NORMS, **TAUGHT}, id="everything"),
    ],
)
def test_a_stopped_and_resumed_training_ends_bit_identical(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = _trained(_config(tmp_path / "whole", epochs=2, **settings))
    wanted = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    config = _config(tmp_path / "stopped", epochs=2, **settings)
    for step in (8, 14, None):  # in the first epoch, and after it was judged
        kind = type("Here", (Seeing,), {"seen": [], "stop_at": step})
        try:
            module, _ = _trained(config, kind)
        except SystemExit:  # Lightning's reaction to KeyboardInterrupt
            assert step is not None
    found = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)
    assert found["state_dict"].keys() == wanted["state_dict"].keys()
    for name, value in found["state_dict"].items():
        assert torch.equal(value, wanted["state_dict"][name]), name
    drop = ("seconds",)
    rows = [[{k: v for k, v in row.items() if k not in drop} for row in m.curve] for m in (module, whole)]
    assert rows[0] == rows[1]
    assert {"average", "best"} & wanted.keys() == set() and wanted["finished"]


def test_of_a_stopped_run_the_average_is_exported(tmp_path: Path) -> None:
    config = _config(tmp_path, epochs=2, every=None, ema=0.9)
    with pytest.raises(SystemExit):
        _trained(config, type("Here", (Seeing,), {"seen": [], "stop_at": 8}))
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    weights = dict(export_checkpoint.restored(config, "last.ckpt", stored).graph.named_parameters())
    assert stored["average"] and not stored["finished"]
    last = {name.removeprefix("graph."): value for name, value in stored["state_dict"].items()}
    for name, average in stored["average"].items():
        if name in weights:
            assert torch.equal(weights[name], average) and not torch.equal(average, last[name]), name


@pytest.mark.slow
def test_a_run_stopped_while_it_judges_judges_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _trained(_config(tmp_path / "whole", epochs=2))
    config = _config(tmp_path / "stopped", epochs=2)
    for judged in (1, 0):  # first after judging the start, then at once
        monkeypatch.setattr("qatkit.choose.epochs.accuracy", _interrupted_after(judged))
        with pytest.raises(SystemExit):
            _trained(config)
        stored = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)
        assert stored["global_step"] == 12 and [row["step"] for row in stored["curve"]] == [0]
    monkeypatch.undo()
    module, _ = _trained(config)
    assert [row["score"] for row in module.curve] == [row["score"] for row in whole.curve]
    assert all(
        torch.equal(a, b)
        for a, b in zip(module.state_dict().values(), whole.state_dict().values(), strict=True)
    )


def _interrupted_after(judged: int) -> Callable[..., Any]:
    """Returns a version of `accuracy` that is interrupted after `judged` calls."""
    calls = iter(range(judged))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return accuracy(*args, **options)

    return interrupted


def test_a_whole_run_reports_the_curve_and_what_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "run", epochs=2, float_epochs=2, ema=0.9, **NORMS, **TAUGHT)
    config.verify.max_drop, config.verify.control = None, True
    assert pipeline.train(config) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    curves = {one["stage"]: one for one in report["curves"]}
    assert list(curves) == ["float", "QAT", "float control"]
    qat = curves["QAT"]
    assert (
        qat["chosen"] and qat["images"] == HELD_OUT and [one["epoch"] for one in qat["epochs"]] == [0, 1, 2]
    )
    kept = [one for one in qat["epochs"] if one["kept"]]
    data = data_of(config)
    assert [one["top1"] for one in kept] == [pytest.approx(_top1(tmp_path / "run" / "model.int8.onnx", data))]
    assert kept[0]["top1"] == max(one["top1"] for one in qat["epochs"])
    assert not curves["float"]["chosen"] and curves["float"]["images"] == HELD_OUT
    assert report["measured"]["validation"]["accuracy"]["int8"]["top1"] == pytest.approx(kept[0]["top1"])
    printed = capsys.readouterr().out
    assert (
        "epochs of QAT, top-1 of the file in ONNX Runtime on 200 held-out training images (measured in"
        in printed
    )
    assert "epochs of float control, top-1 of the control in PyTorch on 200" in printed
    assert (
        "epochs of float, top-1 of the training model on 200 held-out training images (the last epoch is used)"
        in printed
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Epochs of QAT</h2>" in page and "kept" in page


def test_without_labels_floats_answers_choose(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", distill=1.0)
    config.data = replace(config.data, source=f"{__name__}.unlabelled")
    module, run = _trained(config)
    rows = run.curves["QAT"]
    assert all(0 <= row["score"] <= 100 for row in rows) and sum(row["kept"] for row in rows) == 1
    answers = module.teacher[0]
    batches = [images for images, _ in data_of(config).held_out_batches()]
    export_onnx(module.convert().graph, batches[0][:2], tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    with torch.no_grad():
        same = [
            (session.run(None, {"input": images.numpy()})[0].argmax(1) == answers(images).argmax(1).numpy())
            for images in batches
        ]
    assert 100 * np.concatenate(same).mean() == pytest.approx(max(row["score"] for row in rows))


def test_the_start_is_kept_where_training_made_it_worse(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", distill=1.0, lr=1.0, optimizer="adamw")
    config.task, config.data = "outputs", replace(config.data, source=f"{__name__}.unlabelled")
    module, run = _trained(config)
    start, worse = run.curves["QAT"]
    assert start["kept"] and start["step"] == 0 and start["score"] < worse["score"] and not worse["kept"]
    weights = {n: p.detach() for n, p in module.graph.named_parameters() if n.endswith("weight")}
    config.schedule.epochs, config.verify.every = 0, None
    untrained, _ = _trained(replace(config, output_dir=str(tmp_path / "untrained")))
    same = dict(untrained.graph.named_parameters())
    assert weights and all(torch.equal(value, same[name]) for name, value in weights.items())


def unlabelled(root: str | None, download: bool, seed: int) -> Any:
    """Returns the digits without their labels."""
    splits = digits(root, download, seed)
    parts = [TensorImages(one.images, [NO_LABEL] * len(one)) for one in (splits.train, splits.test)]  # type: ignore[attr-defined]
    return replace(splits, train=parts[0], test=parts[1], classes=())


@pytest.mark.parametrize("kind", ["QAT", "control"])
def test_a_training_that_runs_away_is_one_line_with_what_to_try(kind: str, tmp_path: Path) -> None:
    """Covers fine-tuning that is judged by its file (QAT) and in PyTorch (control)."""
    with pytest.raises(
        ConfigError,
        match=r"schedule.lr=1e\+25: expected a smaller value, such as 1e\+24, .*; the training had diverged by",
    ):
        _trained(_config(tmp_path / "run", lr=1e25), quantize=kind == "QAT")
    assert not list((tmp_path / "run").glob("*.ckpt"))
