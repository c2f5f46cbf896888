"""Tests of shortfalls that neither calibration nor training can fix: they end a run at its first export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import Net, calibrate_only, report_of
from torch import Tensor, nn

from qatkit.choose import ranges
from qatkit.config.schema import Config, ExportConfig, ModelConfig, OverrideConfig, ScheduleConfig
from qatkit.jobs import pipeline
from qatkit.run.loop import fit


class Table(Net):
    """A network whose head, with 200,000 weights, is a bmm, for which no backend has a rule."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(16)
        self.table = nn.Parameter(torch.randn(16, 12500) / 40)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        product: Tensor = torch.bmm(x[:, None], self.table.expand(len(x), -1, -1))
        return product.reshape(len(x), -1, 1250).mean(2)


def _config(folder: Path, **changes: object) -> Config:
    config = calibrate_only(folder)
    config.model = ModelConfig(name=f"{__name__}.Table")
    for key, value in changes.items():
        setattr(config.verify, key, value)
    return config


def never(*_: object, **__: object) -> None:
    pytest.fail("something long began although the file cannot meet its bounds")


@pytest.fixture
def nothing_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "calibrate_module", never)
    monkeypatch.setattr(fit, "fit", never)


@pytest.mark.usefixtures("nothing_long")
def test_a_weight_that_stays_float_ends_the_run_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "run", max_size_ratio=0.3)
    config.schedule = ScheduleConfig(epochs=3, float_epochs=3)

    assert pipeline.train(config) == 1

    printed, said = capsys.readouterr()
    assert "SHORTFALL verify.max_size_ratio=0.3: the INT8 file has 0." in printed
    assert (
        "SHORTFALL verify.audit=true: float MatMul 'bmm/MatMul': its weight is float in the file"
        " (no DequantizeLinear)\n  to fix it: '+backend.overrides={bmm:{float:true}}'"
    ) in printed
    assert printed.endswith(
        "stopped at the first export: nothing was calibrated, trained or written;"
        " set verify.audit=false to run to the end regardless\n"
    )
    assert "size MB" in printed and "output folder" not in printed
    assert said == "exporting once, before the long stages\n"
    assert not (tmp_path / "run").exists()


def test_a_run_that_accepts_float_continues_and_fails_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "run", max_size_ratio=0.3, audit=False)
    assert pipeline.train(config) == 1
    report = report_of(tmp_path / "run")
    (line,) = report["shortfalls"]
    assert line.startswith("verify.max_size_ratio=0.3: the INT8 file has 0.9")
    assert report["audit"]["problems"][0].startswith("float MatMul 'bmm/MatMul'")
    assert "stopped at the first export" not in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_long")
@pytest.mark.parametrize(
    "export",
    [ExportConfig(io="uint8", dynamic_batch=False), ExportConfig(mode="float16")],
    ids=["ends", "mode"],
)
def test_size_is_held_of_every_kind_of_file(
    export: ExportConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "run", max_size_ratio=0.4)
    config.model, config.export = ModelConfig(name=f"{__name__}.Table"), export
    assert pipeline.train(config) == 1
    printed = capsys.readouterr().out
    label = "float16" if export.mode == "float16" else "INT8"
    assert f"SHORTFALL verify.max_size_ratio=0.4: the {label} file has " in printed
    assert ("export.mode=weight_only" in printed) == (export.mode == "float16")
    assert ("bmm/MatMul" in printed) == (export.mode == "static")


class Half(Net):
    """A network that adds a bmm of its logits to them; no backend has a rule for bmm."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.table = nn.Parameter(torch.randn(num_classes, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.bmm(x[:, None], self.table.expand(len(x), -1, -1))[:, 0]


def test_what_is_left_float_on_purpose_is_no_finding(tmp_path: Path) -> None:
    """Checks that the run accepts the fix that the first export names."""
    config = _config(tmp_path / "run", max_drop=None, min_agreement=None)
    config.model = ModelConfig(name=f"{__name__}.Half")
    config.backend.overrides = {"bmm": OverrideConfig(float=True)}
    assert pipeline.train(config) == 0
