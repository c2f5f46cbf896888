"""The splits of a source as a run uses them: checked, capped, with held-out images and one preprocessing.

    source ── splits ── checked ── files surveyed ── capped ──> train ── held out ──> train, held_out
                                                            └─> test

`PreparedSplits` finds mistakes in the data's configuration when it is built.
`qatkit.data.module.DataModule` reads batches from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qatkit.config.fields import check_limits
from qatkit.config.schema import DataConfig
from qatkit.data import checked
from qatkit.data.arrays import ArrayBatches, Port
from qatkit.data.fingerprint import digest, fingerprint
from qatkit.data.image_files import ImageFiles
from qatkit.data.image_loader import at_once
from qatkit.data.inputs import ImageInputs, Inputs
from qatkit.data.loading import capped, held_out_of
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.ram_cache import Block, cached_images, check_cache
from qatkit.data.recordings import Recordings
from qatkit.data.request import Request
from qatkit.data.resolve import resolve_preprocessing
from qatkit.data.rollout import Rollout, States, rolled_out
from qatkit.data.sources import Source
from qatkit.data.survey import survey
from qatkit.tasks import CLASSIFICATION, Task
from qatkit_verify.fitting import as_typed
from qatkit_verify.free_run import StepSequence

_IMAGES = "images"  # the name of samples that do not have one of their own (`TaskNames.samples`)


class PreparedSplits:
    """The checked and capped splits of a source, with their classes, their preprocessing and the model's inputs.

    Args:
        config: the data group.
        source: the source, which is called as `source(config.root, config.download, seed)`, with a `request`
            if it has such a parameter.
        seed: seed of the split, the subsets, the order and the augmentation.
        weights_preprocessing: preprocessing of the pretrained weights; `config` overrides it, and it
            overrides the source's default.
        progress: whether a progress bar is shown while files are checked.
        held_out: number of training images left out of training and calibration, balanced over the classes
            until a fifth of each class is used; None: a fifth of all training images, at most 1000.
        task: the task, which defines targets and their batches.
        ports: the model's inputs, if they are known; they apply to samples that are arrays.
        states: the states of a model that feeds outputs back into its next step; None if samples hold all
            inputs.
        image_size: size of the model's images, if the model declares it; unused with `weights_preprocessing`.
        about: facts from the model's file in addition to its graph (`Request.about`).

    Attributes:
        splits: the splits of the source; for a model with states, their items include the states.
        request: the request that the source gets if it has such a parameter.
        task: the task, with the statistics of the training targets that it needs.
        inputs: the inputs of the model.
        notes: the report's notes on the images.
        fingerprint: hex digits that identify the training and held-out images, their order and their labels.
        held_out: indices of the held-out images in `splits.train`, in ascending order.
        recordings: the preparation of recordings; None for other samples.
        of_pictures: whether samples are images.

    Raises:
        ConfigError: a value is out of range, the source returns something unexpected, or files cannot be read.
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
        super().__init__()  # Lightning's constructor, in `DataModule`
        check_limits(config, "data")
        checked.check_augmentation(config, task)
        self.config, self.seed = config, seed
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
        upright = isinstance(test, ImageFiles) and test.upright  # the source decides how files are opened
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
        self.held_out = held_out_of(
            self._train, self._train_images.groups, held_out, seed, self.task.names.samples
        )
        left_out = set(self.held_out)
        self._train = [index for index in self._train if index not in left_out]
        self.inputs = self._inputs()

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
    def task(self) -> Task:
        """The task; where it calls its samples images, but the data are of another kind, it has another name."""
        return self._task

    @task.setter
    def task(self, task: Task) -> None:
        if not self.of_pictures and task.names.samples == _IMAGES:
            task = task.of_samples("recordings" if self.recordings else "samples")
        self._task = task

    @property
    def of_arrays(self) -> bool:
        """Returns whether samples are mappings of arrays by name rather than images."""
        return self._arrays is not None

    def one_at_a_time(self) -> bool:
        """Limits batches to one sample from now on, and returns whether that changes anything.

        It changes nothing if samples are not arrays, if the inputs are unknown, or if batches already have
        one sample.
        """
        if self._arrays is None or not self._arrays.ports or not self._arrays.batched:
            return False
        ports = tuple(replace(port, axis=None) for port in self._arrays.ports)
        self._arrays = replace(self._arrays, ports=ports)
        self._train_images.arrays = self._test_images.arrays = self._arrays
        self.inputs = self._inputs()
        self.notes = (*self.notes, "the model accepts only one sample at a time, whatever its file declares")
        return True

    @property
    def states(self) -> Mapping[str, str]:
        """Returns the output that feeds each state input in the next step, by input name; {} for none."""
        return {} if self._arrays is None else self._arrays.states

    def sequences(self) -> Iterator[StepSequence]:
        """Yields the test sequences of a model with states, at most `data.test_images` steps in all."""
        assert isinstance(self.splits.test, Rollout)
        return self.splits.test.sequences(self.config.test_images)

    def calibration_sequences(self, limit: int) -> Iterator[StepSequence]:
        """Yields the calibration sequences of a model with states, at most `limit` steps in all."""
        assert isinstance(self.splits.train, Rollout)
        return self.splits.train.sequences(limit)

    def about_inputs(self) -> dict[str, Any]:
        """Returns the description of the preprocessing for model.json."""
        return self._prepared.as_dict()

    def rows(self, wanted: int) -> int:
        """Returns the number of samples per batch: `wanted`, or 1 if the model accepts only one sample."""
        return wanted if self._arrays is None or self._arrays.batched else 1

    @property
    def eval_rows(self) -> int:
        """Number of test samples per batch: `data.eval_batch_size`, reduced by `rows` and `at_once`."""
        wanted = self.rows(self.config.eval_batch_size)
        return wanted if self.of_arrays else at_once(wanted, self.inputs.shape)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each label."""
        return self.splits.classes

    @property
    def labelled(self) -> bool:
        """Returns whether the images have targets; without them only agreement with the float model is measured."""
        return self.task.labelled(self.splits.classes, self._train_images.targets)

    @property
    def num_classes(self) -> int | None:
        """Number of output values per image, such as one per class; None if the model itself defines it."""
        return self.task.width(self.splits.classes)

    @property
    def test_count(self) -> int:
        """Number of test images."""
        return len(self._test)

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of images; arrays and recordings have none."""
        assert self._images is not None
        return self._images

    @property
    def validation_count(self) -> int:
        """Number of validation images: the held-out images or, if there are none, the test images."""
        return len(self.held_out or self._test)

    def array_axes(self) -> dict[str, int | None]:
        """Returns the batch axis of each input of a model whose samples are arrays; None for an input without one."""
        assert self._arrays is not None
        return self._arrays.axes(self._test_images[self._test[0]][0])

    def digests(self, indices: Sequence[int]) -> list[str]:
        """Returns digests that identify items of `splits.train`, as hex digits."""
        return [digest(self._train_images, index) for index in indices]
