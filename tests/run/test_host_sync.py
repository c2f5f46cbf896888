"""Tests that a training step reads nothing from the device: the host would wait for all kernels before it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import Net, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from qatkit.config.schema import ScheduleConfig, TrainerConfig
from qatkit.run.build import data_of, qat_module
from qatkit.run.loop.fit import Stage, fit
from qatkit.train.learner import Batch
from qatkit.train.module import QATModule

STEPS = 100


class Reads(TorchDispatchMode):
    """A mode that counts reads such as `.item()`: before, in and between training steps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.found = "before", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found[self.where] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_no_step_of_a_hundred_asks_for_a_value(optimizer: str, tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config.schedule = ScheduleConfig(
        epochs=1,
        lr=1e-3,
        optimizer=optimizer,
        batch_norm="train",
        freeze_observers=1.0,
        freeze_batch_norm=1.0,
    )
    config.trainer = TrainerConfig(accelerator="cpu", progress=False, gradient_clip=1.0)
    config.data.batch_size = 8
    reads = Reads()

    class Told(QATModule):
        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            reads.where = "step"
            super().on_train_batch_start(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            reads.where = "between"
            float(self.global_step)

    data = data_of(config)
    module = qat_module(config, Net(), data.inputs, Told)
    module.calibrate(images for images, _ in data.calibration_batches(64, 32))
    with reads:
        float(torch.ones(()))  # checks that reads are counted
        fit(module, data, tmp_path / "last.ckpt", config.trainer, Stage("reads", 1, STEPS))
    assert reads.found["before"] > 0 and reads.found["step"] == 0, reads.found
