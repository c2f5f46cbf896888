"""Tests of learned weight scales of a convolution with a trained BatchNorm.

The running variance must be that of the convolved images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from chain import noise, settle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.batch_norm import kept_norms
from qatkit.graph.quantizers import inference_weight, quantized_weights
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

SHARE = 0.25  # standard deviation of the images, relative to those of the float model


class Net(nn.Module):
    """A network from [N, 3, 8, 8] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return result


def _prepared(found: bool, **settings: float) -> QATModule:
    """Returns a calibrated module with learned weight scales, fixed if `found`, as if by an algorithm."""
    schedule = ScheduleConfig(
        lr=1e-3, batch_norm="train", freeze_batch_norm=1.0, freeze_observers=0.0, warmup=0.0, decay="constant"
    )
    schedule = replace(schedule, **settings)  # type: ignore[arg-type]  # all are numbers
    torch.manual_seed(0)
    quantizers = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)
    module = QATModule(
        settle(Net(), 3, 8, 8), noise(2, 3, 8, 8), schedule, quantizers=quantizers,
        overrides={"*": OverrideConfig(weight_dtype="int4")},
    )  # fmt: skip
    module.calibrate([SHARE * noise(32, 3, 8, 8)])
    for _, operator, fake in quantized_weights(module.graph):
        if found:
            fake.fix(fake.scale(inference_weight(operator, fake)).detach())
    return module


class _Half(lightning.Callback):
    """Saves a checkpoint after the fourth step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def _train(
    module: QATModule, steps: int, accumulate: int, half: Path | None, resume: Path | None = None
) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=accumulate,
        callbacks=[] if half is None else [_Half(half)],
    )  # fmt: skip
    images = DataLoader(TensorDataset(SHARE * noise(32, 3, 8, 8, seed=5), torch.arange(32) % 4), 8)
    trainer.fit(module, images, ckpt_path=None if resume is None else str(resume))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("found", [False, True], ids=["learned", "found"])
def test_running_variance_is_that_of_the_convolved_images(
    found: bool, accumulate: int, tmp_path: Path
) -> None:
    module = _prepared(found)
    _train(module, 80, accumulate, tmp_path / "half.ckpt")
    (norm,) = kept_norms(module.graph)
    weight = module.graph.get_submodule("conv").get_parameter("weight")
    made = F.conv2d(SHARE * noise(32, 3, 8, 8, seed=5), weight).detach()
    share = norm.get_buffer("running_var") / made.var((0, 2, 3))
    assert float(share.min()) > 0.5 and float(share.max()) < 1.5


def test_an_average_ships_the_integers_that_an_algorithm_found() -> None:
    """The weights hardly move. With a scale from the last σ instead of the averaged one, at least a tenth of
    the integers would change.
    """
    module = _prepared(True, lr=1e-7, ema=0.99)
    before = {
        path: fake.whole(inference_weight(op, fake)) for path, op, fake in quantized_weights(module.graph)
    }
    _train(module, 60, 1, None)
    module.take_average()
    module.ready_to_convert()
    for path, operator, fake in quantized_weights(module.graph):
        moved = int((fake.whole(inference_weight(operator, fake)) != before[path]).sum())
        assert moved <= 0.02 * before[path].numel(), (path, moved)


def test_in_a_loop_of_ones_own_scales_follow_too() -> None:
    module = _prepared(False)
    module.begin()
    module.train()
    images, labels = SHARE * noise(32, 3, 8, 8, seed=5), torch.arange(32) % 4
    optimizer = make_optimizer(module.graph, module.schedule, 1e-3)
    for step in range(160):
        module.set_phase(step / 160)
        optimizer.zero_grad()
        part = slice(8 * (step % 4), 8 * (step % 4) + 8)
        F.cross_entropy(module(images[part]), labels[part]).backward()
        optimizer.step()
        module.after_step()
    (norm,) = kept_norms(module.graph)
    made = F.conv2d(images, module.graph.get_submodule("conv").get_parameter("weight")).detach()
    share = norm.get_buffer("running_var") / made.var((0, 2, 3))
    assert float(share.min()) > 0.5 and float(share.max()) < 1.5


def test_scales_that_follow_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole, rest = _prepared(False), _prepared(False)
    _train(whole, 8, 1, tmp_path / "half.ckpt")
    _train(rest, 8, 1, tmp_path / "other.ckpt", tmp_path / "half.ckpt")
    expected, got = whole.state_dict(), rest.state_dict()
    assert not [name for name, value in expected.items() if not torch.equal(value, got[name])]
