"""The data of a run: one object that trains, validates, calibrates and verifies on the same preprocessing.

Everything that can be wrong with the data's configuration is found when the object is built, before any
model exists. Calibration images come from the train split only, so they cannot be test images.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning

from qatkit.config.fields import COUNT, check_limits
from qatkit.config.schema import DataConfig
from qatkit.data import checked
from qatkit.data.arrays import ArrayBatches, Port
from qatkit.data.fingerprint import digest, fingerprint
from qatkit.data.image_files import ImageFiles
from qatkit.data.image_loader import ImageLoader, at_once
from qatkit.data.inputs import ImageInputs, Inputs
from qatkit.data.loading import (
    EpochSampler,
    EvalImages,
    TrainImages,
    TrainLoader,
    balanced,
    capped,
    held_out_of,
    steps_per_epoch,
)
from qatkit.data.pace import pace_of
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.ram_cache import Block, cached_images, check_cache
from qatkit.data.recordings import Recordings
from qatkit.data.request import Request
from qatkit.data.resolve import resolve_preprocessing
from qatkit.data.rollout import Rollout, States, rolled_out
from qatkit.data.sources import ImageDataset, Source
from qatkit.data.survey import survey
from qatkit.tasks import CLASSIFICATION, Task
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import as_typed
from qatkit_verify.free_run import StepSequence


class DataModule(lightning.LightningDataModule):
    """The splits of a source, capped, preprocessed and batched as the configuration says.

    With several processes each trains on its own share (`Trainer(use_distributed_sampler=False)`, the sampler
    here does it) and each validates on the whole test split, so that all agree on the figure.

    Args:
        config: the data group.
        source: called as `source(config.root, config.download, seed)`, with a `request` where it takes one.
        seed: seed of the split, the subsets, the order and the augmentation.
        weights_preprocessing: preprocessing of the pretrained weights; `config` overrides it, and it
            overrides the source's default.
        progress: a bar is shown while files are checked.
        held_out: number of training images that neither train nor calibrate, balanced over the classes as far
            as a fifth of each goes; None: a fifth of them, at most 1000.
        task: the task, which defines targets and their batches.
        ports: the model's inputs, where they are known and samples are arrays by their names.
        states: states of a model whose outputs are inputs of its next step; None: samples have every input.
        image_size: size of the model's images, if the model declares it; `weights_preprocessing` has its own.
        about: facts from the model's file in addition to its graph.

    Attributes:
        inputs: the inputs of the model.
        notes: the report's notes on the images.
        fingerprint: hex digits that identify the training and held-out images, their order and their labels.
        held_out: indices of the held-out images in `splits.train`, in ascending order.
        recordings, of_pictures: the preparation of recordings, or None; whether samples are images.

    Raises:
        ConfigError: a value is out of range, the source does not return what it should, or files cannot be read.
    """

    def __init__(  # noqa: PLR0913  independent settings of a run, by name
        self,
        config: DataConfig,
        source: Source,
        seed: int,
        weights_preprocessing: Preprocessing | None = None,
        *,
        progress: bool = False,
        held_out: int | None = 0,
        task: Task = CLASSIFICATION,
        ports: Sequence[Port] = (),
        states: States | None = None,
        image_size: int | Sequence[int] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        check_limits(config, "data")
        checked.check_augmentation(config, task)
        self.config, self.seed, self.task = config, seed, task
        outputs = {} if states is None else dict(states.outputs)
        inputs = [port for port in ports if port.name not in outputs]
        self.request = Request(config, inputs, outputs, about or {})
        self.splits = checked.splits_of(source, config, seed, self.request)
        lone = any(port.axis is None for port in ports if port.name in outputs)  # a sequence has one state
        if lone or not getattr(self.splits, "batched", True):
            ports = [replace(port, axis=None) for port in ports]
        of_arrays = getattr(self.splits, "arrays", False)
        arrays = ArrayBatches(config.source, tuple(ports), outputs) if of_arrays else None
        self.recordings = checked.recordings_in(self.splits, config, task)
        if states is not None:
            self.splits = rolled_out(self.splits, states, ports, config.source, task, progress)
        kind = arrays or self.recordings
        self.of_pictures = kind is None
        images = checked.checked_splits(self.splits, config.source, task, kind)
        self._train_images, self._test_images = images
        self.task = task.of_data(self._train_images.targets)
        check_cache(config.cache, config.workers)
        self._block = Block(config.cache_mb) if config.cache == "ram" else None
        self._train_loaded = cached_images(self._train_images, self._block)
        self._test_loaded = cached_images(self._test_images, self._block)
        base = weights_preprocessing or self.splits.default_preprocessing
        test = self.splits.test
        upright = isinstance(test, ImageFiles) and test.upright  # how files are opened is up to the source
        self._arrays, self._images = arrays, None
        if self.of_pictures:
            if image_size is not None and weights_preprocessing is None:
                config = replace(config, image_size=as_typed(image_size))
            self._images = replace(resolve_preprocessing(config, base), upright=upright)
        found = survey(self.splits.train, self.splits.test, config.bad, progress=progress)
        self.notes = (*self.splits.notes, *found.notes)
        self._train = capped(self._train_images.groups, found.train, config.train_images, "train", seed)
        self._test = capped(self._test_images.groups, found.test, config.test_images, "test", seed)
        self.fingerprint = fingerprint(self._train_images, self._train, self.classes, found.ends, seed)
        self.held_out = held_out_of(self._train, self._train_images.groups, held_out, seed)
        left_out = set(self.held_out)
        self._train = [index for index in self._train if index not in left_out]
        self.inputs = self._inputs()
        self._loader: TrainLoader | None = None
        self._resume: dict[str, Any] | None = None

    def _inputs(self) -> Inputs:
        if self._arrays is None:
            return self.recordings.inputs() if self.recordings else ImageInputs(self.preprocessing.shape)
        few = self._train[:2] if self._arrays.batched else self._train[:1]
        return self._arrays.inputs([self._train_images[index][0] for index in few])

    @property
    def _prepared(self) -> Preprocessing | ArrayBatches | Recordings:
        """Returns the preparation that turns items into a batch."""
        return self._arrays or self.recordings or self.preprocessing

    @property
    def of_arrays(self) -> bool:
        """Returns whether samples are arrays by name rather than images."""
        return self._arrays is not None

    def one_at_a_time(self) -> bool:
        """Makes every batch one sample from now on, and returns whether batches were larger before."""
        if self._arrays is None or not self._arrays.ports or not self._arrays.batched:
            return False
        ports = tuple(replace(port, axis=None) for port in self._arrays.ports)
        self._arrays = replace(self._arrays, ports=ports)
        self._train_images.arrays = self._test_images.arrays = self._arrays
        self.inputs = self._inputs()
        self.notes = (*self.notes, "the model takes one sample at a time, whatever its file declares")
        return True

    @property
    def states(self) -> Mapping[str, str]:
        """Returns the outputs of a step that are inputs of the next one, by these inputs; none of most models."""
        return {} if self._arrays is None else self._arrays.states

    def sequences(self) -> Iterator[StepSequence]:
        """Yields the sequences of the test split, of a model with states: all, or `data.test_images` steps of them."""
        assert isinstance(self.splits.test, Rollout)
        return self.splits.test.sequences(self.config.test_images)

    def calibration_sequences(self, limit: int) -> Iterator[StepSequence]:
        """Yields the sequences that calibrate a model with states: at most `limit` steps of them."""
        assert isinstance(self.splits.train, Rollout)
        return self.splits.train.sequences(limit)

    def about_inputs(self) -> dict[str, Any]:
        """Returns how model.json describes the preparation of an input."""
        return self._prepared.as_dict()

    def rows(self, wanted: int) -> int:
        """Returns the number of samples per batch: `wanted`, or one if the model takes no more."""
        return wanted if self._arrays is None or self._arrays.batched else 1

    @property
    def eval_rows(self) -> int:
        """Number of test samples read at a time: `data.eval_batch_size`, or as many pictures as 64 MiB hold."""
        wanted = self.rows(self.config.eval_batch_size)
        return wanted if self.of_arrays else at_once(wanted, self.inputs.shape)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each label."""
        return self.splits.classes

    @property
    def labelled(self) -> bool:
        """Returns whether the images have targets; else there is no metric, only agreement with the float model."""
        return self.task.labelled(self.splits.classes, self._train_images.targets)

    @property
    def num_classes(self) -> int | None:
        """Number of values that the model gives, one a class; None where the images have no labels to tell."""
        return self.task.width(self.splits.classes)

    @property
    def test_count(self) -> int:
        """Number of test images."""
        return len(self._test)

    @property
    def preprocessing(self) -> Preprocessing:
        """The preparation of every image; samples of arrays and recordings have none."""
        assert self._images is not None
        return self._images

    def train_dataloader(self) -> TrainLoader:
        """Returns augmented batches of this process's share; `data.batch_size` is per process.

        A step of the trainer takes a batch of each process, or several (`accumulate_grad_batches`).

        Raises:
            ConfigError: the share does not fill one batch, or a resumed checkpoint was written with another
                order.
        """
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        config = self.config
        batches = world_size * (self.trainer.accumulate_grad_batches if self.trainer else 1)
        if self.trainer is None or self.trainer.max_steps != 0:  # else it only writes a checkpoint
            self.steps_per_epoch(batches)
        sampler = EpochSampler(self._train, self.seed, rank, world_size, batches * config.batch_size)
        dataset = TrainImages(
            self._train_loaded, self._prepared, config.augment, self.seed, config.policy, self.task
        )
        self._loader = TrainLoader(dataset, sampler, self.rows(config.batch_size), config.workers)
        if self._resume is not None:
            self._loader.load_state_dict(self._resume)
            self._resume = None
        return self._loader

    @property
    def pace(self) -> str:
        """The pace of the last training in words; "" if there was none."""
        if self._loader is None:
            return ""
        return pace_of(self._loader.passes, self._block.note if self._block else "")

    def steps_per_epoch(self, batches: int = 1) -> int:
        """Returns the optimizer steps of an epoch, as `qatkit.data.loading.steps_per_epoch`."""
        return steps_per_epoch(len(self._train), self.config.batch_size, batches)

    def val_dataloader(self) -> ImageLoader:
        """Returns the held-out images in order, as in evaluation; if there are none, the test split."""
        return self.validation_batches()

    def validation_batches(self, rank: int = 0, world_size: int = 1) -> ImageLoader:
        """Returns one process's share of `val_dataloader`, which may be empty."""
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
        """Returns a loader of images as in evaluation, in batches of `size`, by the workers or in this process."""
        dataset = EvalImages(images, indices, self._prepared, self.task)
        workers = 0 if here else self.config.workers
        return ImageLoader(dataset, self.rows(size), workers, persistent=persistent)

    @property
    def validation_count(self) -> int:
        """Number of images that a training is validated on."""
        return len(self.held_out or self._test)

    def held_out_batches(self) -> ImageLoader:
        """Returns the training images held out: float32 (N, C, H, W) and int64 (N,), as in evaluation."""
        return self.image_batches(self.held_out, self.eval_rows)

    def test_batches(self) -> ImageLoader:
        """Returns the test split: float32 (N, C, H, W) and int64 (N,), always the same ones."""
        return self._read(self._test_loaded, self._test, self.eval_rows)

    def test_subset_of(self, images: int | None) -> ImageLoader:
        """Returns `test_batches`, or only `images` of the test images, balanced over the classes."""
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
        """Returns the indices in `splits.train` of the calibration images: a seeded, class-balanced choice, in order.

        If more images are requested than there are, all of them are taken, with a warning.

        Raises:
            ConfigError: `images`, the value of `key`, is not positive.
        """
        COUNT.check(key, images)
        if images > len(self._train):
            text = f"{key}={images}: the train split has {len(self._train)} images, all are used"
            warnings.warn(text, stacklevel=2)
        return balanced(self._train_images.groups, self._train, images, "calibration", self.seed)

    def check_calibration(self, images: int, batch_size: int, least: int = 1) -> None:
        """Checks that there are enough images to calibrate with.

        Raises:
            ConfigError: `images`, or all there are, do not fill one batch, or are fewer than `least`.
        """
        there = min(images, len(self._train))
        kind = "training" if images > there else "calibration"
        if there < batch_size:
            raise ConfigError("calibration.batch_size", batch_size, f"at most the {there} {kind} images")
        if there < least:
            raise ConfigError("calibration.images", there, f"at least {least} for a tournament")

    def calibration_batches(self, images: int, batch_size: int) -> ImageLoader:
        """Returns the images of `calibration_indices(images)`, as in evaluation: no augmentation.

        Raises:
            ConfigError: `images` or `batch_size` is not positive (at the call, not at the first batch).
        """
        return self.image_batches(self.calibration_indices(images), batch_size)

    def image_batches(self, indices: Sequence[int], batch_size: int) -> ImageLoader:
        """Returns images of `splits.train` by their indices, as in evaluation: no augmentation.

        Raises:
            ConfigError: `batch_size` is not positive (at the call, not at the first batch).
        """
        COUNT.check("calibration.batch_size", batch_size)
        return self._read(self._train_loaded, indices, batch_size)

    def first_batch(self, count: int) -> Any:
        """Returns a batch of `count` training samples, as in evaluation; samples repeat if there are fewer.

        Raises:
            ConfigError: one of them, or the first test image, is not what the source promised.
        """
        chosen = self.calibration_indices(min(count, len(self._train)))
        again = [chosen[position % len(chosen)] for position in range(self.rows(count))]
        ((batch, _),) = self._read(self._train_images, again, len(again), here=True)
        self._prepared.eval_batch([self._test_images[self._test[0]][0]])
        return batch

    def full_batches(self, count: int, size: int) -> list[Any]:
        """Returns `count` training samples, or all there are, in batches of one size, as in evaluation.

        Where they fill no batch, some are in it again.
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
        """Returns samples as one batch, as in evaluation."""
        return self._prepared.eval_batch(samples)

    def array_axes(self) -> dict[str, int | None]:
        """Returns the batch axis of each input of a model of arrays."""
        assert self._arrays is not None
        return self._arrays.axes(self._test_images[self._test[0]][0])

    def digests(self, indices: Sequence[int]) -> list[str]:
        """Returns digests that identify items of `splits.train`, as hex digits."""
        return [digest(self._train_images, index) for index in indices]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in training: Lightning leaves a loader's own out where an epoch had just ended."""
        return {"fingerprint": self.fingerprint} | ({} if self._loader is None else self._loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the position for the next `train_dataloader`."""
        self._resume = state_dict if "epoch" in state_dict else None
