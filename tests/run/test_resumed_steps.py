"""Tests that resumed training uses the same images per step and ends with the same weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from chain import noise
from tiny_run import Net, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import QuantizerConfig, ScheduleConfig
from qatkit.jobs.training import fine_tune
from qatkit.run.build import data_of, qat_module
from qatkit.run.folder import Run
from qatkit.train.learner import FloatModule
from qatkit.train.module import QATModule

Attempt = tuple[
    int, dict[str, Any], int | None
]  # images per batch, settings of the trainer, the step that it stops at


class Stops(QATModule):
    """A module that counts images per step, and stops at a step.

    Attributes:
        stop: the step that does not begin, if any.
        unvalidated: the step before whose validation the module stops, if any.
        images: number of images by step.
    """

    stop: int | None = None
    unvalidated: int | None = None
    images: Counter[int]

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.trainer.global_step == self.stop:
            raise KeyboardInterrupt
        self.images[self.trainer.global_step] += len(batch[0])
        return super().training_step(batch, index)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if (
            self._trainer is not None
            and not self.graph.training
            and self.trainer.global_step == self.unvalidated
        ):
            raise KeyboardInterrupt
        return super().forward(*inputs, **named)


def go_on(
    folder: Path, attempts: Sequence[Attempt], *, validated: bool = True, **schedule: Any
) -> tuple[Stops, Counter[int]]:
    """Trains attempts in one folder, 18 steps of 32 images an epoch; returns last module and images by step.

    Args:
        validated: True stops an attempt at its step; False before the validation that follows this step.
    """
    images, module = Counter[int](), None
    for batch, settings, stop in attempts:
        wanted: dict[str, Any] = {"epochs": 2, "lr": 0.01, "decay": "constant", "warmup": 0.0} | schedule
        quantizer = wanted.pop("quantizer", QuantizerConfig())
        config = tiny(folder, schedule=ScheduleConfig(**wanted), quantizer=quantizer)
        config.data.train_images, config.data.test_images, config.data.batch_size = 600, 100, batch
        config.trainer.checkpoint_every = 1
        for key, value in settings.items():
            setattr(config.trainer, key, value)
        data = data_of(config)
        torch.manual_seed(0)
        stops = {"stop" if validated else "unvalidated": stop, "images": images}
        module = qat_module(config, Net(), data.inputs, type("K", (Stops,), stops))
        if not (folder / "last.ckpt").exists():
            folder.mkdir(exist_ok=True)
            module.calibrate(batch for batch, _ in data.calibration_batches(64, 32))
        try:
            fine_tune(Run(config, folder), module, data, "last.ckpt", "QAT")
            assert stop is None
        except (SystemExit, KeyboardInterrupt):
            assert stop is not None
    assert isinstance(module, Stops)
    return module, images


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_steps_use_the_same_images_at_any_accumulation(before: int, after: int, tmp_path: Path) -> None:
    module, images = go_on(
        tmp_path / "run", [(32 // n, {"accumulate": n}, stop) for n, stop in ((before, 9), (after, None))]
    )
    assert images == Counter(dict.fromkeys(range(36), 32))
    assert [row["step"] for row in module.curve] == [18, 36]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("innermost", [(False, True), (True, False)])
def test_moments_follow_the_layout_of_the_weights(
    innermost: tuple[bool, bool], optimizer: str, tmp_path: Path
) -> None:
    first, then = ({"channels_last": one} for one in innermost)
    schedule: dict[str, Any] = {"optimizer": optimizer, "lr": 2e-3, "epochs": 1}
    whole, _ = go_on(tmp_path / "whole", [(32, first, 12), (32, first, None)], **schedule)
    moved, _ = go_on(tmp_path / "moved", [(32, first, 12), (32, then, None)], **schedule)
    for one, other in zip(whole.graph.parameters(), moved.graph.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Aux(nn.Module):
    """A classifier with an auxiliary head, as in torchvision's Inception and GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_logits = True
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc, self.aux = nn.Linear(8, 10), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).mean((2, 3))
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


IMAGES, LABELS = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10


def loaded(model: nn.Module, **schedule: Any) -> tuple[QATModule, lightning.Trainer, DataLoader[Any]]:
    module = QATModule(model.eval(), IMAGES[:4], ScheduleConfig(lr=1e-2, weight_decay=0.0, **schedule))
    module.calibrate([IMAGES])
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=schedule.get("epochs", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return module, trainer, DataLoader(TensorDataset(IMAGES, LABELS), 16)


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_auxiliary_heads_learn_from_labels_beside_a_teacher(
    distill: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module, trainer, loader = loaded(Aux(), distill=distill)
    if distill:
        module.learn_from(Aux())
    module.train()
    module.loss(IMAGES, LABELS).backward()
    (gradient,) = [
        p.grad for name, p in module.graph.named_parameters() if name.startswith("aux") and p.ndim == 2
    ]
    assert gradient is not None and bool(gradient.abs().sum() > 0) == (distill < 1)
    module.zero_grad()
    trainer.fit(module, loader)


def test_lightnings_own_loading_reads_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, trainer, loader = loaded(Net())
    trainer.fit(module, loader)
    trainer.save_checkpoint("one.ckpt")
    again = QATModule.load_from_checkpoint("one.ckpt", model=Net().eval(), example=IMAGES[:4])
    for one, other in zip(module.graph.parameters(), again.graph.parameters(), strict=True):
        assert torch.equal(one, other)


LSQ = QuantizerConfig(
    "qatkit.quant.learned.lsq.LSQFakeQuantize", "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
)


@pytest.mark.parametrize("step", [18, 36])
@pytest.mark.parametrize("schedule", [
    {"freeze_observers": 0.8},
    {"freeze_observers": 0.8, "batch_norm": "train", "freeze_batch_norm": 0.8},
    {"ema": 0.9, "freeze_observers": 0.2, "quantizer": LSQ},
    {"enable_fake_quant": 0.6},
])  # fmt: skip
def test_a_validation_that_was_missed_is_made_up_for(
    schedule: dict[str, Any], step: int, tmp_path: Path
) -> None:
    whole, _ = go_on(tmp_path / "whole", [(32, {}, None)], **schedule)
    moved, _ = go_on(tmp_path / "moved", [(32, {}, step), (32, {}, None)], validated=False, **schedule)
    assert [row["step"] for row in whole.curve] == [18, 36] and moved.curve == whole.curve
    for name, value in whole.state_dict().items():
        assert torch.equal(value, moved.state_dict()[name]), name


@pytest.mark.parametrize("schedule", [
    {"freeze_observers": 0.2, "batch_norm": "train", "freeze_batch_norm": 0.8}, {"ema": 0.9}
])  # fmt: skip
def test_validation_does_not_change_training_by_a_plain_trainer(
    schedule: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = []
    for validate in (True, False):
        torch.manual_seed(0)
        module, trainer, loader = loaded(Net(), epochs=3, **schedule)
        trainer.fit(module, loader, loader if validate else None)
        assert ("top1" in trainer.callback_metrics) == validate
        made.append(module)
    for name, value in made[0].state_dict().items():
        assert torch.equal(value, made[1].state_dict()[name]), name


class _Dropping(nn.Module):
    """A network from [N, 3, 8, 8] to [N, 4] with a dropout of one half."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(3, 16, 3), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.drop(torch.relu(self.conv(x)).mean((2, 3))))
        return logits


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_what_is_dropped_is_drawn_as_without_the_stop(device: str, tmp_path: Path) -> None:
    """Checks that a resumed training restores the random state of the device."""

    class Keep(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "3.ckpt")

    def trained(resume: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(7)
        module = FloatModule(_Dropping(), ScheduleConfig(float_lr=0.05))
        trainer = lightning.Trainer(
            accelerator=device, devices=1, max_steps=8, max_epochs=-1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[Keep()],
        )  # fmt: skip
        a_step = TensorDataset(noise(8, 3, 8, 8), torch.arange(8) % 4)
        images = DataLoader(
            a_step, 8, generator=torch.Generator()
        )  # without one, it draws from torch's global generator
        trainer.fit(module, images, ckpt_path=None if resume is None else str(resume))
        return {name: one.cpu() for name, one in module.state_dict().items()}

    whole, rest = trained(None), trained(tmp_path / "3.ckpt")
    assert not [name for name, one in whole.items() if not torch.equal(one, rest[name])]
