"""Tests of steps that accumulate several batches: a run stopped within a step resumes to the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import Net, tiny

from qatkit.config.schema import Config, ScheduleConfig
from qatkit.jobs.training import fine_tune
from qatkit.run.build import data_of, qat_module
from qatkit.run.folder import Run
from qatkit.train.learner import Batch
from qatkit.train.module import QATModule
from qatkit_verify import stopping


class Ending(QATModule):
    """A module that stops its run at batch number `batch`, by the signal `by` or (None) by an exception."""

    batch: int | None = None
    by: int | None = None
    taken = 0

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        if self.taken == self.batch:
            if self.by is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), self.by)
        self.taken += 1
        return super().training_step(batch, index)


def _config(folder: Path) -> Config:
    config = tiny(folder, schedule=ScheduleConfig(epochs=1, lr=0.05, max_steps=9))
    config.data.batch_size, config.trainer.accumulate, config.trainer.checkpoint_every = 16, 3, 4
    return config


def _trained(config: Config, batch: int | None = None, by: int | None = None) -> dict[str, torch.Tensor]:
    run, data = Run(config, Path(config.output_dir or "")), data_of(config)
    run.folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    kind = type("Here", (Ending,), {"batch": batch, "by": by})
    module = qat_module(config, Net(), data.inputs, kind)
    module.calibrate(images for images, _ in data.calibration_batches(64, 32))
    fine_tune(run, module, data, "last.ckpt", "QAT")
    return module.state_dict()


@pytest.mark.parametrize(
    ("by", "batches"), [(None, (16, 1, 4)), (signal.SIGTERM, (16, 0, 4))], ids=["kill", "signal"]
)
def test_a_stop_in_the_midst_of_a_step_changes_nothing(
    by: int | None, batches: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks three stops, each counted from the start or resume before it.

    They are in the 17th batch (the second of a step's three), within the first step, and in the fifth batch.
    """
    wanted, config = _trained(_config(tmp_path / "whole")), _config(tmp_path / "stopped")
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    for batch in batches:
        monkeypatch.setattr(stopping._State, "wanted", None)  # as if each run had its own process
        monkeypatch.setattr(stopping._State, "server", None)
        with pytest.raises(SystemExit), stopping.served():
            _trained(config, batch, by)
        stopping.wait(False)
    monkeypatch.setattr(stopping._State, "wanted", None)
    monkeypatch.setattr(stopping._State, "server", None)
    for number, handler in before.items():
        signal.signal(number, handler)
    found = _trained(config)
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
