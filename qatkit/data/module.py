"""The data of a run: batches for training, validation, calibration and verification, with one preprocessing.

`PreparedSplits` holds the samples; the batches for each purpose are read here. Calibration images come from
the train split only, so they cannot be test images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning

from qatkit.config.fields import COUNT
from qatkit.data.image_loader import ImageLoader
from qatkit.data.loading import (
    EpochSampler,
    EvalImages,
    TrainImages,
    TrainLoader,
    balanced,
    steps_per_epoch,
)
from qatkit.data.pace import pace_of
from qatkit.data.prepared_splits import PreparedSplits
from qatkit.data.sources import ImageDataset
from qatkit.warning import warn
from qatkit_verify.errors import ConfigError, counted


class DataModule(PreparedSplits, lightning.LightningDataModule):
    """The batches for training, validation, calibration and verification; arguments as for `PreparedSplits`.

    With several processes, each one trains on its own share, which the sampler here selects. The trainer
    therefore needs `use_distributed_sampler=False`. `val_dataloader` is the same in each process, so all
    processes get the same figure.
    """

    _loader: TrainLoader | None = None
    _resume: dict[str, Any] | None = None

    def train_dataloader(self) -> TrainLoader:
        """Returns the augmented batches of this process, each of `data.batch_size` images.

        A step of the trainer uses one batch of each process, or several (`accumulate_grad_batches`).

        Raises:
            ConfigError: there are not enough images for one step, or a resumed checkpoint was written with another
                seed, number of images or size of a step.
        """
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        config = self.config
        batches = world_size * (self.trainer.accumulate_grad_batches if self.trainer else 1)
        if self.trainer is None or self.trainer.max_steps != 0:  # else the trainer only writes a checkpoint
            self.steps_per_epoch(batches)
        sampler = EpochSampler(self._train, self.seed, rank, world_size, batches * config.batch_size)
        self._loader = TrainLoader(self._augmented(), sampler, self.rows(config.batch_size), config.workers)
        if self._resume is not None:
            self._loader.load_state_dict(self._resume)
            self._resume = None
        return self._loader

    def _augmented(self) -> TrainImages:
        config = self.config
        return TrainImages(
            self._train_loaded, self._prepared, config.augment, self.seed, config.policy, self.task
        )

    def training_batch(self, samples: int) -> Any:
        """Returns a batch of augmented samples and targets without an epoch, whose state checkpoints would store."""
        return self._augmented().__getitems__([(0, one) for one in self.calibration_indices(samples)])

    @property
    def pace(self) -> str:
        """A description of the speed of the last training; "" if there was none."""
        if self._loader is None:
            return ""
        return pace_of(self._loader.passes, self._block.note if self._block else "")

    def steps_per_epoch(self, batches: int = 1) -> int:
        """Returns the number of optimizer steps of an epoch (`qatkit.data.loading.steps_per_epoch`)."""
        return steps_per_epoch(len(self._train), self.config.batch_size, batches, self.task.names.samples)

    def adapt_batch(self, batches: int) -> None:
        """Reduces the batch size of training so that the samples suffice for one step, with a note.

        Args:
            batches: batches per step, as for `steps_per_epoch`.
        """
        images, size = len(self._train), self.config.batch_size
        most = images // batches
        if 0 < most < size:
            of_step = f" for {batches} batches per step" if batches > 1 else ""
            why = f"since there are {counted(images, f'training {self.task.names.sample}')}{of_step}"
            self._note_batch("data.batch_size", size, most, why)
            self.config = replace(self.config, batch_size=most)

    def _note_batch(self, key: str, size: int, used: int, why: str) -> None:
        self.notes = (*self.notes, f"{key}={size}: {used} is used instead, {why}")

    def val_dataloader(self) -> ImageLoader:
        """Returns the held-out images, preprocessed as for evaluation; if there are none, the test split."""
        return self.validation_batches()

    def validation_batches(self, rank: int = 0, world_size: int = 1) -> ImageLoader:
        """Returns one process's share of the images of `val_dataloader`; it may be empty."""
        held_out, test = (self._train_loaded, self.held_out), (self._test_loaded, self._test)
        images, chosen = held_out if self.held_out else test
        return self._read(images, chosen[rank::world_size], self.eval_rows, persistent=True)

    def _read(
        self,
        images: ImageDataset,
        indices: Sequence[int],
        size: int,
        *,
        here: bool = False,
        persistent: bool = False,
    ) -> ImageLoader:
        """Returns a loader of images, preprocessed as for evaluation; with `here`, it uses no workers."""
        dataset = EvalImages(images, indices, self._prepared, self.task)
        workers = 0 if here else self.config.workers
        return ImageLoader(dataset, self.rows(size), workers, persistent=persistent)

    def held_out_batches(self) -> ImageLoader:
        """Returns the batches (inputs, targets) of the held-out images, preprocessed as for evaluation."""
        return self.image_batches(self.held_out, self.eval_rows)

    def test_batches(self) -> ImageLoader:
        """Returns the batches (inputs, targets) of the test split, in a fixed order."""
        return self._read(self._test_loaded, self._test, self.eval_rows)

    def test_subset_of(self, images: int | None) -> ImageLoader:
        """Returns a class-balanced choice of `images` test images.

        All of them are returned in order if `images` is None or is not below their number.
        """
        if images is None or images >= len(self._test):
            return self.test_batches()
        return self.test_subset(images, self.eval_rows)

    def test_subset(self, images: int, batch_size: int) -> ImageLoader:
        """Returns `images` test images, or all if there are fewer, in a seeded choice and order.

        Every batch is balanced over the classes.
        """
        chosen = balanced(self._test_images.groups, self._test, images, "analysis", self.seed)
        return self._read(self._test_loaded, chosen, batch_size)

    def calibration_indices(self, images: int, key: str = "calibration.images") -> list[int]:
        """Returns the indices in `splits.train` of the calibration images.

        The choice is class-balanced. The seed determines the choice and its order. If more images are
        requested than there are, all of them are used, with a warning.

        Raises:
            ConfigError: `images`, the value of `key`, is not positive.
        """
        COUNT.check(key, images)
        if images > len(self._train):
            text = f"{key}={images}: the train split has only {len(self._train)}, and all of them are used"
            warn(text)
        return balanced(self._train_images.groups, self._train, images, "calibration", self.seed)

    def check_calibration(self, images: int, batch_size: int, least: int = 1, *, adapt: bool = False) -> None:
        """Checks that `images` calibration images fill a batch and are at least `least`.

        With `adapt`, all of them are one smaller batch instead, and a note says so.

        Raises:
            ConfigError: `images`, or all training images if there are fewer, do not fill one batch, or are
                fewer than `least`.
        """
        there = min(images, len(self._train))
        kind = "training" if images > there else "calibration"
        if there < batch_size and adapt:
            why = f"the number of {kind} {self.task.names.samples}"
            self._note_batch("calibration.batch_size", batch_size, there, why)
        elif there < batch_size:
            allowed = f"at most {there}, the number of {kind} {self.task.names.samples}"
            raise ConfigError("calibration.batch_size", batch_size, allowed)
        if there < least:
            why = "some of them are held out to compare the candidates"
            if images <= there:
                raise ConfigError("calibration.images", images, f"at least {least}, since {why}")
            samples = self.task.names.samples
            reason = (
                f"{least} {samples} are needed, since {why}, but there are only {there} training {samples}"
            )
            raise ConfigError("calibration.images", images, reason=reason)

    def calibration_batches(self, images: int, batch_size: int) -> ImageLoader:
        """Returns the images of `calibration_indices(images)`, preprocessed as for evaluation.

        Raises:
            ConfigError: `images` or `batch_size` is not positive (at the call, not at the first batch).
        """
        return self.image_batches(self.calibration_indices(images), batch_size)

    def image_batches(self, indices: Sequence[int], batch_size: int) -> ImageLoader:
        """Returns the images of `splits.train` at `indices`, preprocessed as for evaluation.

        Raises:
            ConfigError: `batch_size` is not positive (at the call, not at the first batch).
        """
        COUNT.check("calibration.batch_size", batch_size)
        return self._read(self._train_loaded, indices, batch_size)

    def first_batch(self, count: int) -> Any:
        """Returns a batch of `count` calibration samples, not augmented; samples repeat if there are fewer.

        The batch has one sample if the model accepts only one. The first test image is checked as well.

        Raises:
            ConfigError: one of the samples, or the first test image, does not match what the source declared.
        """
        chosen = self.calibration_indices(min(count, len(self._train)))
        again = [chosen[position % len(chosen)] for position in range(self.rows(count))]
        ((batch, _),) = self._read(self._train_images, again, len(again), here=True)
        self._prepared.eval_batch([self._test_images[self._test[0]][0]])
        return batch

    def full_batches(self, count: int, size: int) -> list[Any]:
        """Returns `count` calibration samples, or all if there are fewer, not augmented, in batches of one size.

        If the samples do not fill one batch, some are repeated. Samples after the last full batch are left
        out.
        """
        size = self.rows(size)
        chosen = self.calibration_indices(min(count, len(self._train)))
        wanted = max(1, len(chosen) // size) * size
        again = [chosen[position % len(chosen)] for position in range(wanted)]
        loader = self._read(self._train_images, again, size, here=True)
        return [batch for batch, _ in loader]

    def golden_samples(self, count: int) -> list[Any]:
        """Returns `count` test samples, or all if there are fewer: a seeded choice, balanced over the classes."""
        chosen = balanced(self._test_images.groups, self._test, count, "golden", self.seed)
        return [self._test_images[index][0] for index in chosen]

    def joined(self, samples: Sequence[Any]) -> Any:
        """Returns samples as one batch, preprocessed as for evaluation."""
        return self._prepared.eval_batch(samples)

    def state_dict(self) -> dict[str, Any]:
        """Returns the data's fingerprint and, once training has begun, the position in the epoch.

        The position is saved here, since Lightning drops the loader's own state at the end of an epoch.
        """
        return {"fingerprint": self.fingerprint} | ({} if self._loader is None else self._loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the position for the next `train_dataloader`."""
        self._resume = state_dict if "epoch" in state_dict else None
