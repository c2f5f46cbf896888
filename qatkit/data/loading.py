"""Loaders that can stop after any batch and continue as if they had never stopped.

An uninterrupted run and a resumed one must see the same batches, bit for bit. Therefore no random generator
keeps a state:

- the order of epoch e is a permutation seeded by (seed, e); rank r of w takes every w-th image, from image r
  on;
- the augmentation of image i in epoch e is drawn from (seed, e, i), whichever worker prepares it;
- the position consists of two numbers, the epoch and the images passed to training by all ranks together. Batches
  are counted when they leave the loader, so prefetched ones do not count.

An optimizer step uses the same images, however many processes and accumulated batches share them. A run may
continue with another number of processes or accumulated batches if the number of images per step stays the
same.

Nothing is drawn from torch's global generator either, so the number of workers does not affect the training.
"""

from __future__ import annotations

import hashlib
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from qatkit.data.arrays import ArrayBatches
from qatkit.data.box_targets import BoxTargets
from qatkit.data.image_loader import Batch, Failure, ImageLoader
from qatkit.data.inputs import Batch as Inputs
from qatkit.data.label_maps import LabelMaps
from qatkit.data.pace import Pass
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.recordings import Recordings
from qatkit.data.sources import ImageDataset
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import Sides

_Key = tuple[int, int]  # epoch, index into the dataset
_STEP = "samples of a step"
_HELD_OUT = 1000  # maximum number of held-out images by default


def seeded_permutation(count: int, *parts: object) -> list[int]:
    """Returns 0..count-1 in an order that depends only on `parts`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(*parts))).tolist()


def seed_of(*parts: object) -> int:
    """Returns a seed that depends only on `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def balanced_subset(labels: Sequence[Hashable], count: int, *parts: object) -> list[int]:
    """Returns `count` indices with classes as balanced as possible, or all indices if there are fewer.

    `parts` seed the choice and the order. Every class contributes one image per round, in random order of the
    classes, until it is exhausted. Any prefix of the result is therefore balanced too, as are the batches cut
    from it.
    """
    rounds: list[list[int]] = []
    seen: dict[Hashable, int] = {}
    for index in seeded_permutation(len(labels), *parts):
        turn = seen.get(labels[index], 0)
        seen[labels[index]] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(index)
    return [index for one_round in rounds for index in one_round][:count]


def balanced(labels: Sequence[Hashable], indices: Sequence[int], count: int, *parts: object) -> list[int]:
    """Returns `count` of the `indices`, chosen by `balanced_subset`; `labels` are those of all images."""
    return [indices[p] for p in balanced_subset([labels[index] for index in indices], count, *parts)]


def capped(labels: Sequence[Hashable], usable: list[int], cap: int | None, *parts: object) -> list[int]:
    """Returns `cap` of the usable indices (None: all), a seeded class-balanced choice in ascending order."""
    return usable if cap is None or cap >= len(usable) else sorted(balanced(labels, usable, cap, *parts))


def held_out_subset(labels: Sequence[Hashable], count: int, *parts: object) -> list[int]:
    """Returns `count` indices, balanced over the classes until a fifth of each class is chosen.

    Further indices are chosen in proportion to the sizes of the classes, so that no rare class is held out
    entirely.
    """
    sizes, taken = Counter(labels), Counter[Hashable]()
    first, rest = list[int](), list[tuple[float, int]]()
    for index in balanced_subset(labels, len(labels), *parts):
        label = labels[index]
        if taken[label] < sizes[label] // 5:
            first.append(index)
        else:
            rest.append((taken[label] / sizes[label], index))
        taken[label] += 1
    rest.sort(key=lambda one: one[0])
    return [*first, *(index for _, index in rest)][:count]


def held_out_of(
    train: Sequence[int], groups: Sequence[Hashable], count: int | None, seed: int, samples: str
) -> list[int]:
    """Returns the indices of the held-out images of a train split, in ascending order.

    Args:
        train: indices of the split.
        groups: groups of all images, by index, such as their labels; the choice is balanced over groups.
        count: number of held-out images; None for a fifth of the split, but at least 1 and at most 1000.
        seed: seed of the choice.
        samples: the name of the images in messages (`TaskNames.samples`).

    Raises:
        ConfigError: `count` leaves no image to train on.
    """
    count = min(_HELD_OUT, max(1, len(train) // 5)) if count is None else count
    if not count:
        return []
    if count >= len(train):
        raise ConfigError(
            "verify.held_out", count, f"a number below {len(train)}, the number of training {samples}"
        )
    labels = [groups[index] for index in train]
    return sorted(train[place] for place in held_out_subset(labels, count, "held out", seed))


class EvalImages(Dataset[Batch]):
    """A dataset of prepared evaluation images; position p is image `indices[p]`."""

    def __init__(
        self,
        images: ImageDataset,
        indices: Sequence[int],
        preprocessing: Preprocessing | ArrayBatches | Recordings,
        task: Task = CLASSIFICATION,
    ) -> None:
        self.images, self.indices, self.preprocessing, self.task = images, indices, preprocessing, task
        self._placing = _placing(preprocessing, task, images)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitems__(self, positions: list[int]) -> Batch | Failure:
        """Returns the batch at `positions`, or a `Failure` if an image of it cannot be read."""
        chosen, placing = [self.indices[p] for p in positions], self._placing
        place = None if placing is None else placing.eval_targets
        return _load(self.images, chosen, self.preprocessing.eval_batch, self.task, place)


class TrainImages(Dataset[Batch]):
    """A dataset of augmented training images, indexed by (epoch, index) pairs."""

    def __init__(
        self,
        images: ImageDataset,
        preprocessing: Preprocessing | ArrayBatches | Recordings,
        augment: str,
        seed: int,
        policy: str = "none",
        task: Task = CLASSIFICATION,
    ) -> None:
        self.task = task
        self.images, self.preprocessing, self.seed = images, preprocessing, seed
        self.augment, self.policy = augment, policy
        self._placing = _placing(preprocessing, task, images)

    def __getitems__(self, keys: list[_Key]) -> Batch | Failure:
        """Returns the augmented batch at `keys`, or a `Failure` if an image of it cannot be read."""
        placing = self._placing

        def draws() -> list[random.Random]:
            return [random.Random(f"{self.seed}/{epoch}/{index}") for epoch, index in keys]

        def prepare(images: Iterable[Any]) -> Inputs:
            return self.preprocessing.train_batch(images, self.augment, draws(), self.policy)

        def place(targets: Sequence[Any], pictures: Sequence[Sides]) -> Tensor:
            assert placing is not None
            return placing.train_targets(targets, pictures, self.augment, draws())

        chosen = [index for _, index in keys]
        return _load(self.images, chosen, prepare, self.task, place if placing else None)


def _placing(
    preprocessing: Preprocessing | ArrayBatches | Recordings, task: Task, images: ImageDataset
) -> LabelMaps | BoxTargets | None:
    """Returns the preparation of targets that are transformed with their pictures; None for other targets."""
    if not isinstance(preprocessing, Preprocessing):
        return None
    source: Any = images
    if task.maps:
        return LabelMaps(preprocessing, source.label_map)
    return BoxTargets(preprocessing, source.targets) if task.boxes else None


def _load(
    images: ImageDataset,
    indices: list[int],
    prepare: Callable[[Iterable[Any]], Inputs],
    task: Task,
    place: Callable[[Sequence[Any], Sequence[Sides]], Tensor] | None = None,
) -> Batch | Failure:
    targets, sizes = list[Any](), list[Sides]()

    def one_by_one() -> Iterator[Any]:
        for index in indices:
            image, target = images[index]
            targets.append(target)
            if place is not None:
                sizes.append(_height_and_width(image))
            yield image

    try:
        batch = prepare(one_by_one())
        if place is None or targets[0] == NO_TARGET:
            return batch, task.collate(targets)
        return batch, place(targets, sizes)
    except ConfigError as error:
        trace = "".join(traceback.format_exception(error))
        return Failure(error.key, str(error.value), error.problem, trace)


def _height_and_width(image: Any) -> Sides:
    if isinstance(image, Tensor):
        return image.shape[-2], image.shape[-1]
    width, height = image.size
    return height, width


class EpochSampler(Sampler[_Key]):
    """A sampler of this rank's share of each epoch's permutation of the images.

    All ranks get the same number of images: images after the last whole step are left out of the epoch. To
    continue an epoch, its first `skip` images, counted over all ranks, are left out too.

    Args:
        indices: indices of the training images.
        seed: seed of the order.
        rank: index of this rank, below `world_size`.
        world_size: number of ranks.
        step: number of images of an optimizer step over all ranks; by default one per rank.
    """

    def __init__(
        self, indices: Sequence[int], seed: int, rank: int, world_size: int, step: int | None = None
    ) -> None:
        self.indices, self.seed, self.rank, self.world_size = indices, seed, rank, world_size
        self.step = step or world_size
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return len(self.indices) // self.step * self.step // self.world_size

    def __iter__(self) -> Iterator[_Key]:
        order = seeded_permutation(len(self.indices), "epoch", self.seed, self.epoch)
        share = order[self.skip : len(self) * self.world_size][self.rank :: self.world_size]
        return iter([(self.epoch, self.indices[position]) for position in share])


class TrainLoader(ImageLoader):
    """A loader of training batches; `state_dict` saves its position, and `load_state_dict` restores it.

    The loader counts epochs itself, one per pass: Lightning's own counter is off by one after some resumes
    (from a checkpoint written at the end of an epoch of a run with `max_steps`), and Lightning
    calls `set_epoch` only after the pass has begun. A pass starts when its first batch is requested.

    A batch counts as consumed once it is returned. Save the state between training steps, as callbacks do
    after a batch, not during a step.

    Attributes:
        passes: the passes begun since the loader was created, with their times.
    """

    def __init__(self, dataset: TrainImages, sampler: EpochSampler, batch_size: int, workers: int) -> None:
        super().__init__(dataset, batch_size, workers, persistent=True, sampler=sampler, drop_last=True)
        self._order = sampler
        self._batch_size = batch_size
        self._epoch, self._images = 0, 0
        self.passes: list[Pass] = []
        self._continues = True  # the next pass continues from (_epoch, _images)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yields the batches of the next epoch or, after `load_state_dict`, the rest of the restored one."""
        of_all = self._batch_size * self._order.world_size
        if not self._continues or self._images >= len(self) * of_all:
            self._epoch, self._images = self._epoch + 1, 0
        self._continues = False
        self._order.epoch, self._order.skip = self._epoch, self._images
        now = Pass()
        self.passes.append(now)
        batches = super().__iter__()
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            handed = time.monotonic()
            if batch is None:
                return
            self._images += of_all
            yield batch
            now.images += of_all
            now.waited += handed - asked
            now.spent += time.monotonic() - asked

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, and the settings that define the order of the images."""
        return {"epoch": self._epoch, "images": self._images, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position after the last batch that `state` includes.

        Raises:
            ConfigError: a setting that defines the batches differs from the setting in `state`.
        """
        for key, value in self._settings().items():
            if (saved := state["settings"][key]) == value:
                continue
            typed, given = key, value
            if key == _STEP:  # reported as the setting that the user can change
                typed, given, saved = "data.batch_size", self._batch_size, saved * self._batch_size / value
            raise ConfigError(typed, given, f"{saved:.15g}, as in the resumed checkpoint")
        self._epoch, self._images, self._continues = state["epoch"], state["images"], True

    def _settings(self) -> dict[str, int]:
        return {
            "seed": self._order.seed,
            "data.train_images": len(self._order.indices),
            _STEP: self._order.step,
        }


def steps_per_epoch(images: int, size: int, batches: int, samples: str) -> int:
    """Returns the number of optimizer steps of an epoch.

    Args:
        images: number of images.
        size: size of a batch, `data.batch_size`.
        batches: batches per step: number of processes times accumulated batches.
        samples: the name of the images in messages (`TaskNames.samples`).

    Raises:
        ConfigError: there are not enough images for one step.
    """
    if size > images:
        raise ConfigError("data.batch_size", size, f"at most {images}, the number of training {samples}")
    if batches * size > images:
        uses = f"a step uses {batches} batches (processes times trainer.accumulate)"
        there = f"the number of training {samples} is {images}"
        if batches > images:
            reason = f"{uses}, but {there}; use fewer processes or a smaller trainer.accumulate"
            raise ConfigError("data.batch_size", size, reason=reason)
        raise ConfigError("data.batch_size", size, f"at most {images // batches}, since {uses} and {there}")
    return images // (batches * size)
