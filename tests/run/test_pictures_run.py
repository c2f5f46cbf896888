"""Tests of runs on pictures without labels: figures as computed from the files, and refused settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float_files import made, settings, trained
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from tiny_run import BUNDLE, Net, calibrate_only, logits, report_of, sha256, weights_of

from qatkit.config.schema import (
    CalibrationConfig,
    Config,
    DataConfig,
    ExportConfig,
    RescueConfig,
    ScheduleConfig,
    TargetConfig,
)
from qatkit.data import NO_LABEL
from qatkit.jobs import export_checkpoint, pipeline, quantize_file, rescue
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

COUNT = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of digits as grey, colour and palette files."""
    root = tmp_path_factory.mktemp("pictures")
    for index, image in enumerate(load_digits().images[:COUNT]):
        grey = Image.fromarray(np.round(image * 255 / 16).astype(np.uint8))
        picture = (grey, grey.convert("RGB"), grey.convert("P"))[index % 3]
        picture.save(root / f"{index:03}.{('png', 'bmp', 'gif')[index % 3]}")
    return root


def _config(folder: Path, out: Path, **changes: Any) -> Config:
    config = calibrate_only(out)
    data = DataConfig(source="qatkit.data.pictures", root=str(folder), image_size=8, mean=[0.5] * 3, std=[0.5] * 3,
                      workers=0, batch_size=16, eval_batch_size=32)  # fmt: skip
    config = replace(config, data=data, calibration=CalibrationConfig(images=64, batch_size=16), **changes)
    config.verify.min_float_agreement = 0.5  # random weights hardly tell the classes apart
    config.verify.max_drop = 1.0
    return config


def _odd(folder: Path) -> NDArray[np.float32]:
    """Returns the pictures used for verification (every other file), preprocessed for the model."""
    paths = sorted(folder.iterdir())[1::2]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB"), np.float32) for path in paths])
    return ((pixels / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2).astype(np.float32)


def _figures(exact: NDArray[np.float32], found: NDArray[np.float32]) -> dict[str, float]:
    a, b = exact.astype(np.float64), found.astype(np.float64)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b))
    return {
        "agreement": float((a.argmax(1) == b.argmax(1)).mean()),
        "kl": float((p * np.log(p / q)).sum(1).mean()),
        "sqnr_db": float(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum())),
        "images": len(a),
    }


def _same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found["images"] == expected["images"]
    assert found["agreement"] == pytest.approx(expected["agreement"], abs=1.5 / expected["images"])
    assert found["kl"] == pytest.approx(expected["kl"], rel=0.02)
    assert found["sqnr_db"] == pytest.approx(expected["sqnr_db"], abs=0.1)


def test_a_run_on_pictures_alone(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert pipeline.train(_config(folder, out)) == 0

    assert {path.name for path in out.iterdir()} == BUNDLE
    report, images = report_of(out), _odd(folder)
    exact, found = (logits(out / name, images) for name in ("model.float.onnx", "model.int8.onnx"))
    _same(report["fidelity"]["int8"], _figures(exact, found))
    assert report["fidelity"]["simulated"]["images"] == COUNT // 2
    assert (report["labelled"], report["accuracy"], report["shortfalls"]) == (False, {}, [])
    assert report["parity"]["images"] == COUNT // 2 and report["parity"]["optimized"]["agreement"] == 1
    assert json.loads((out / "model.json").read_text())["classes"] == []
    printed, page = capfd.readouterr().out, (out / "report.html").read_text()
    share = f"{100 * report['fidelity']['int8']['agreement']:.2f}"
    assert "same top-1 class as float, %" in printed and share in printed and f"{share} %" in page
    assert "all `verify` bounds are met" in printed

    again = replace(_config(folder, tmp_path / "again"), checkpoint=str(out / "last.ckpt"))
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(out / "model.int8.onnx")


@pytest.mark.slow  # three whole runs
def test_a_rescue_goes_by_agreement(folder: Path, tmp_path: Path) -> None:
    target = TargetConfig(min_agreement=0.5)
    config = _config(folder, tmp_path / "run", rescue=RescueConfig(climb=True), target=target)
    assert rescue.climb(config) == 0
    ladder, images = report_of(tmp_path / "run")["ladder"], _odd(folder)
    rungs = {row["name"]: row for row in ladder["rungs"]}
    assert list(rungs)[:3] == ["float", "naive", "whole_operators"] and list(rungs)[-1] == "placement"
    assert "no labels" in ladder["target"]
    below = tmp_path / "run" / "rungs"
    exact = logits(below / "float" / "model.float.onnx", images)
    for name, file in (("naive", "model.static.onnx"), ("whole_operators", "model.int8.onnx")):
        _same(rungs[name], _figures(exact, logits(below / name / file, images)))
        assert (rungs[name]["top1"], rungs[name]["drop"]) == (None, None)


def test_fine_tuning_learns_from_the_float_model_and_resumes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = _config(folder, out, schedule=ScheduleConfig(epochs=2, distill=1.0, lr=1e-2))
    assert pipeline.train(config) == 0
    before, digest = weights_of(out / "last.ckpt"), sha256(out / "model.int8.onnx")
    torch.manual_seed(config.seed)
    assert not before["graph.fc.weight"].equal(Net().state_dict()["fc.weight"])

    # Resumed without its report, the run trains no further step and makes the same file.
    (out / "report.json").unlink()
    assert pipeline.train(replace(config, resume=str(out / "last.ckpt"))) == 0
    assert sha256(out / "model.int8.onnx") == digest
    assert all(value.equal(before[name]) for name, value in weights_of(out / "last.ckpt").items())


def test_without_labels_the_loss_is_the_divergence_from_float() -> None:
    torch.manual_seed(0)
    net, images = Net().eval(), 3 * torch.randn(4, 3, 8, 8)
    net.fc.weight.data *= 100  # logits that differ by more than rounding
    module = QATModule(net, images, ScheduleConfig(distill=1.0, distill_temperature=2.0))
    module.calibrate([images])
    module.eval()
    module.ready_to_convert()
    loss = module.loss(images, torch.full((4,), NO_LABEL))
    with torch.no_grad():
        teacher, student = (torch.softmax(model(images).double() / 2, 1) for model in (net, module))
    expected = 4 * (teacher * (teacher / student).log()).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2) and expected > 1e-5


def test_the_tournament_is_judged_by_the_logits(folder: Path, tmp_path: Path) -> None:
    config = _config(folder, tmp_path / "run")
    config.calibration = CalibrationConfig(images=64, batch_size=16, search="tournament",
                                           observer="qatkit.quant.observers.MSEObserver")  # fmt: skip
    assert pipeline.train(config) == 0
    rows = report_of(tmp_path / "run")["calibration"]
    tried = [row for row in rows if row["logit_error"] is not None]
    (chosen,) = [row for row in rows if row["chosen"]]
    assert 3 < len(tried) < len(rows) and all(row["top1"] is None for row in rows)
    assert chosen["logit_error"] <= 1.01 * min(row["logit_error"] for row in tried)
    assert "too large an output error" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("mode", ["static", "float16"])
def test_a_file_without_its_module(mode: str, folder: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "run", settings(trained(), mode, tmp_path / "run")
    config.data = _config(folder, out).data
    assert quantize_file.quantize(config) == 0
    report, images = report_of(out), _odd(folder)
    exact, found = (logits(out / name, images) for name in ("model.float.onnx", made(mode)))
    _same(report["fidelity"]["int8"], _figures(exact, found))
    simulated = {"simulated"} if mode == "static" else set()
    assert set(report["fidelity"]) == {"int8"} | simulated and report["accuracy"] == {}


def test_a_float16_file_falls_short_of_a_bound_on_its_sqnr(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = _config(folder, tmp_path / "run", export=ExportConfig(mode="float16"))
    config.verify.min_float_sqnr = 120.0
    assert pipeline.train(config) == 1
    report = report_of(tmp_path / "run")
    decibel = report["fidelity"]["int8"]["sqnr_db"]
    assert 50 < decibel < 100
    line = f"verify.min_float_sqnr=120.0: SQNR of float16 against the float file's logits is {decibel:.1f} dB"
    assert report["shortfalls"] == [line]
    assert f"SHORTFALL {line}\n  to fix it: export.mode=weight_only\n" in capfd.readouterr().out


def _groups(**parts: dict[str, Any]) -> Callable[[Config], Config]:
    return lambda config: replace(
        config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()}
    )


REFUSED = {
    "labels for a float model": (
        _groups(schedule={"float_epochs": 2}),
        "schedule.float_epochs=2: expected 0 with data.source=qatkit.data.pictures, which has no labels",
    ),
    "labels for fine-tuning": (
        _groups(schedule={"epochs": 1, "distill": 0.9}),
        "schedule.epochs=1: expected 0 with data.source=qatkit.data.pictures, which has no labels "
        "(schedule=calibrate_only), or schedule.distill=1, which learns from the float model",
    ),
    "a control": (_groups(verify={"control": True}), "verify.control=true: expected false with data.source"),
    "few pictures": (
        _groups(calibration={"batch_size": 100, "images": 512}),
        f"calibration.batch_size=100: expected at most {COUNT // 2}, the number of training images",
    ),
    "no size": (_groups(data={"image_size": None}), "data.image_size=null: expected a value, since neither"),
    "no check of a bound": (
        _groups(verify={"checks": ["qatkit.verify.checks.size.SizeCheck"], "audit": False, "min_agreement": None}),
        "verify.checks=[qatkit.verify.checks.size.SizeCheck]: expected a list with the check of each bound "
        "(verify.min_float_agreement=0.5: agreement with float was not measured)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_labels_is_refused_at_once(case: str, folder: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ConfigError) as raised:
        pipeline.train(change(_config(folder, tmp_path / "run")))
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_bound_of_images_without_labels_is_refused_with_labels(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.verify.min_float_sqnr = 20.0
    with pytest.raises(
        ConfigError,
        match=r"verify\.min_float_sqnr=20\.0: expected 12\.0 with labels, where verify\.max_drop is",
    ):
        pipeline.train(config)
