"""Tests of the order and augmentation of batches, and of runs that are killed and resumed bit for bit."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from qatkit.config.schema import DataConfig
from qatkit.data import DataModule, ImageDataset, Splits, digits, image_loader
from qatkit_verify.errors import ConfigError

GREY: dict[str, Any] = {"image_size": 8, "mean": [0.5], "std": [0.5]}


def epochs(workers: int, seed: int = 0, **values: Any) -> list[list[tuple[Tensor, Tensor]]]:
    augment: dict[str, Any] = {"augment": "crop_flip", "policy": "trivial_augment"}
    config = DataConfig(**GREY, batch_size=16, train_images=100, workers=workers, **augment)
    for key, value in values.items():
        setattr(config, key, value)
    loader = DataModule(config, digits, seed).train_dataloader()
    return [list(loader) for _ in range(2)]


def test_batches_depend_on_seed_and_epoch_but_not_on_workers() -> None:
    state = torch.get_rng_state()
    alone, helped = epochs(0), epochs(2)
    assert torch.equal(torch.get_rng_state(), state)  # dropout draws the same numbers either way
    for mine, theirs in zip(alone, helped, strict=True):
        assert len(mine) == 6
        for (x, y), (u, v) in zip(mine, theirs, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    assert not torch.equal(alone[0][0][0], alone[1][0][0])
    assert not torch.equal(alone[0][0][0], epochs(0, seed=1)[0][0][0])


def test_an_image_is_augmented_the_same_whatever_its_batch() -> None:
    one = torch.cat([x for x, _ in epochs(0, batch_size=10)[1]])
    other = torch.cat([x for x, _ in epochs(0, batch_size=25)[1]])
    assert torch.equal(one, other)


def telling(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the digits with test images whose second channel says whether a worker process loaded them."""
    splits = digits(root, download, seed)
    return replace(splits, test=Telling(splits.test))


class Telling:
    """A dataset whose images say, in their second channel, whether a worker process loaded them."""

    def __init__(self, images: ImageDataset) -> None:
        self.images, self.targets = images, images.targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images[index]
        assert isinstance(image, Tensor)
        return torch.cat([image, torch.full_like(image, get_worker_info() is not None), image]), label


@pytest.mark.parametrize(("seconds", "expected"), [(100.0, [0] * 5), (0.0, [0, 1, 1, 1, 1])])
def test_worker_processes_start_only_for_long_passes(
    seconds: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the time of the first batch decides, and that images and their order stay the same."""
    monkeypatch.setattr(image_loader, "_TO_START", seconds)
    values: dict[str, Any] = {"image_size": 8, "mean": [0.0] * 3, "std": [1.0] * 3, "eval_batch_size": 24}
    config = DataConfig(**values, workers=2, test_images=100)
    alone = list(DataModule(replace(config, workers=0), telling, 0).test_batches())
    data = DataModule(config, telling, 0)
    for batches, kept in ((data.test_batches(), False), (data.val_dataloader(), not seconds)):
        for again in range(2):
            found = list(batches)
            by_workers = [int(images[:, 1].amax() * 255) for images, _ in found]
            assert by_workers == ([1] * 5 if kept and again else expected)
            for (x, y), (u, v) in zip(found, alone, strict=True):
                assert torch.equal(x[:, ::2], u[:, ::2]) and torch.equal(y, v)


class Tiny(lightning.LightningModule):
    """A small network that records the sum of the pixels of every batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        self.batches: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.batches.append(batch[0].double().sum().item())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Kill(Callback):
    """A callback that stops the run when it is about to train on the batch after step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def fit(callbacks: list[Callback], workers: int, checkpoint: Path | None = None, **values: Any) -> Tiny:
    """Trains two epochs of seven steps each and returns the model."""
    config = DataConfig(**GREY, augment="crop_flip", batch_size=16, workers=workers, train_images=120)
    config.test_images = 10
    for key, value in values.items():
        setattr(config, key, value)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            use_distributed_sampler=False,
        )
        weights_only = None if checkpoint is None else True
        trainer.fit(
            model, datamodule=DataModule(config, digits, 3), ckpt_path=checkpoint, weights_only=weights_only
        )
    return model


@pytest.fixture(scope="module")
def uninterrupted() -> Tiny:
    return fit([], workers=0)


PLACES = {"mid-epoch": (3, 11), "last batch": (7, 9), "between epochs": (1, 7), "after validation": (None, 8)}


@pytest.mark.parametrize(
    ("every", "kill", "workers"),
    [
        # The sampler keeps the position, which does not depend on workers: one place with workers is enough
        # by default.
        pytest.param(
            *PLACES[place],
            workers,
            id=f"{place}-{workers}",
            marks=[pytest.mark.slow] if workers and place != "mid-epoch" else [],
        )
        for place in PLACES
        for workers in (0, 2)
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path, uninterrupted: Tiny, workers: int, every: int | None, kill: int
) -> None:
    when: dict[str, Any] = {"every_n_train_steps": every} if every else {"save_on_train_epoch_end": True}
    with pytest.raises(InterruptedError):
        fit([ModelCheckpoint(tmp_path, save_last=True, **when), Kill(kill)], workers)
    resumed = fit([], workers, tmp_path / "last.ckpt")
    done = kill // (every or 7) * (every or 7)
    assert resumed.batches == uninterrupted.batches[done:]
    assert 0 < len(resumed.batches) < 14
    for mine, reference in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_resuming_with_another_order_of_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        fit([ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=3), Kill(5)], 0)
    with pytest.raises(ConfigError, match=r"data\.batch_size=8: expected 16, as in the resumed checkpoint"):
        fit([], 0, tmp_path / "last.ckpt", batch_size=8)
    with pytest.raises(
        ConfigError, match=r"data\.train_images=110: expected 120, as in the resumed checkpoint"
    ):
        fit([], 0, tmp_path / "last.ckpt", train_images=110)
