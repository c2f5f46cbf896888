"""Splits as the loaders read them: every item is checked against what the source declared.

A source may be user code. Its exceptions, items of a wrong type, and items whose target differs from the
entry in the dataset's `targets` are reported in one line with the index of the item, in workers and in the
main process.
"""

from __future__ import annotations

from typing import Any, cast

from PIL import Image
from torch import Tensor

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import AUDIO, PICTURE_AUGMENTATIONS, RECORDINGS, SOUND_AUGMENTATIONS
from qatkit.data.arrays import ArrayBatches
from qatkit.data.image_files import printable
from qatkit.data.preprocessing import Preprocessing, is_image_tensor
from qatkit.data.recordings import Recordings, recordings_of
from qatkit.data.request import Request, check_own_settings, is_asked
from qatkit.data.sources import ImageDataset, Source, Splits
from qatkit.tasks import CLASSIFICATION, Task
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.foreign import calling, check_call
from qatkit_verify.pictures import as_eight_bits, check_size, reason

_SHOWN = 60  # characters of a value in a message


class CheckedImages:
    """A dataset of checked items (image, target), or (sample, target) if samples are arrays or recordings.

    Images are Pillow images (L or RGB) or uint8 tensors (C, H, W).

    Args:
        dataset: the dataset of a source.
        part: "train" or "test", for messages.
        source: dotted path of the source, for messages.
        task: the task of the targets.
        arrays: the preparation that checks arrays or recordings; None if items are images.

    Attributes:
        targets: the target of each image, as converted by the task; plain ints for labels.
        groups: the group of each image, such as its label; choices of images are balanced over groups.

    Raises:
        ConfigError: the dataset has no images or no `targets`, the number of targets differs from the number
            of images, a target does not suit the task, or the source raised an exception.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        part: str,
        source: str,
        task: Task = CLASSIFICATION,
        arrays: ArrayBatches | Recordings | None = None,
    ) -> None:
        self.dataset, self.part, self.source, self.task, self.arrays = dataset, part, source, task, arrays
        self._sample = "image" if arrays is None else "sample"  # the name in messages
        with calling("data.source", source, dataset):
            count, targets = len(dataset), getattr(dataset, "targets", None)
            values = (
                [] if targets is None else targets.tolist() if hasattr(targets, "tolist") else list(targets)
            )
        if targets is None:
            raise self._wrong(f"{part}.targets is missing; it must list the label of each {self._sample}")
        if len(values) != count or not values:
            told = f"{part}.targets has {counted(len(values), 'label')} for {counted(count, self._sample)}"
            raise self._wrong(f"{told}; it must have one label per {self._sample}, and at least one label")
        self.targets = [self._target(value, f"{part}.targets[{i}]") for i, value in enumerate(values)]
        self.groups = [task.group(target) for target in self.targets]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Returns (sample, target); the sample is an image, a mapping of tensors by name, or a recording.

        Raises:
            ConfigError: the source raised an exception, or the item is not such a pair, has another target than
                `targets`, or has a sample that cannot be used.
        """
        with calling("data.source", self.source, self.dataset):
            item: Any = self.dataset[index]
        name = f"{self.part}[{index}]"
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self._wrong(f"{name} must be a pair ({self._sample}, label), not {_kind(item)}")
        label = self._target(item[1], f"the label of {name}")
        if label != self.targets[index]:
            told = f"{name} has the label {label}, but {self.part}.targets[{index}] is {self.targets[index]}"
            raise self._wrong(f"{told}; both must be the same")
        if self.arrays is not None:
            return self.arrays.checked(item[0], name), label
        return self._image(item[0], name), label

    def label_map(self, target: Any) -> Tensor:
        """Returns the label map of a target, uint8 [1, height, width], for a task with `maps`.

        Raises:
            ConfigError: the source has no maps, a map cannot be read, or it is not a uint8 tensor of that shape.
        """
        dataset: Any = self.dataset
        if not hasattr(dataset, "label_map"):
            told = f"{self.part} must have a method label_map(target) for {self.task.names.description}"
            raise self._wrong(f"{told}, as data=label_pictures has")
        with calling("data.source", self.source, dataset):
            found = dataset.label_map(target)
        if not is_image_tensor(found) or found.shape[0] != 1:
            raise self._wrong(f"label_map({target!r}) must be a uint8 tensor (1, H, W), not {_kind(found)}")
        return cast(Tensor, found)

    def _image(self, image: Any, name: str) -> Image.Image | Tensor:
        if is_image_tensor(image):
            width, height = image.shape[2], image.shape[1]
        elif isinstance(image, Image.Image):
            width, height = image.size
        else:
            wanted = "images must be Pillow images or uint8 tensors (C, H, W)"
            raise self._wrong(f"{name} is {_kind(image)}; {wanted}")
        try:
            check_size(width, height)
            return as_eight_bits(image) if isinstance(image, Image.Image) else image
        except Exception as error:  # a lazy image is read only now, and damaged bytes may raise anything
            raise self._wrong(f"{name} can't be read as an image ({reason(error)})") from error

    def _target(self, value: Any, name: str) -> Any:
        """Converts a target from Python, NumPy or torch as the task requires, such as a label to an int."""
        try:
            return self.task.target(value)
        except (TypeError, ValueError) as error:
            told = f"{name} is {str(value)[:_SHOWN]!r} ({type(value).__name__})"
            raise self._wrong(f"{told}; {error}") from error

    def _wrong(self, told: str) -> ConfigError:
        return ConfigError("data.source", self.source, reason=told)


def _kind(value: Any) -> str:
    parts = (type(value).__name__, getattr(value, "dtype", ""), getattr(value, "shape", ""))
    return " ".join(str(tuple(part) if isinstance(part, tuple) else part) for part in parts if str(part))


def splits_of(source: Source, config: DataConfig, seed: int, request: Request | None = None) -> Splits:
    """Calls a source and returns its splits; `request` is passed to a source that has this parameter.

    Raises:
        ConfigError: the source has the wrong parameters or raised an exception, or a setting of `config` applies
            only to other sources.
    """
    check_call("data.source", config.source, source, "root", "download", "seed")
    check_own_settings(config, source)
    with calling("data.source", config.source, source):
        if is_asked(source):
            return source(config.root, config.download, seed, request=request)  # type: ignore[call-arg]
        return source(config.root, config.download, seed)


def checked_splits(
    splits: Splits, source: str, task: Task = CLASSIFICATION, arrays: ArrayBatches | Recordings | None = None
) -> tuple[CheckedImages, CheckedImages]:
    """Returns the checked train and test splits of a source.

    Raises:
        ConfigError: the source did not return valid `Splits`, or its targets do not suit the task.
    """
    if not isinstance(splits, Splits):
        raise ConfigError(
            "data.source", source, f"a function that returns qatkit.data.Splits, not {type(splits).__name__}"
        )
    classes, default = splits.classes, splits.default_preprocessing
    if not isinstance(classes, tuple | list) or not all(isinstance(name, str) for name in classes):
        listed = isinstance(classes, tuple | list)
        wrong = next(name for name in classes if not isinstance(name, str)) if listed else classes
        told = f"classes must be a tuple of names, not {'of ' if listed else ''}{_kind(wrong)}"
        raise ConfigError("data.source", source, reason=told)
    if unwritten := [name for name in classes if name != name.encode("utf-8", "ignore").decode()]:
        told = (
            f"classes must have names that UTF-8 can encode, not {', '.join(map(printable, unwritten[:3]))}"
        )
        raise ConfigError("data.source", source, reason=told)
    if not isinstance(default, Preprocessing | None):
        told = f"default_preprocessing must be a qatkit.data.Preprocessing, not {_kind(default)}"
        raise ConfigError("data.source", source, reason=told)
    train = CheckedImages(splits.train, "train", source, task, arrays)
    test = CheckedImages(splits.test, "test", source, task, arrays)
    for part in (train, test):
        if problem := task.check_targets(part.part, classes, part.targets):
            raise ConfigError("data.source", source, reason=problem)
    return train, test


def check_array_settings(config: DataConfig) -> None:
    """Raises ConfigError for a setting that does not apply to samples that are arrays."""
    plain = {"augment": "none", "policy": "none", "cache": "none"}
    if config.source != AUDIO:  # audio files can be skipped
        plain["bad"] = "refuse"
    resolved = (
        "image_size",
        "resize",
        "mean",
        "std",
        "fit",
        "pad_value",
        "align",
        "channels",
        "layout",
        "pixels",
    )
    of_images = dict.fromkeys(resolved) | plain
    for key, allowed in of_images.items():
        value = getattr(config, key)
        if value != allowed:
            told = "null" if allowed is None else allowed
            raise ConfigError(
                f"data.{key}", value, f"{told} with data.source={config.source}, which gives arrays"
            )


def recordings_in(splits: Splits, config: DataConfig, task: Task) -> Recordings | None:
    """Returns the preparation of recordings; None if the samples are not recordings.

    Raises:
        ConfigError: a setting does not apply to the samples, or the task or the augmentation needs recordings
            and the samples are pictures.
    """
    if getattr(splits, "recordings", False):
        return recordings_of(config)
    if getattr(splits, "arrays", False):
        check_array_settings(config)
        return None
    if task.names.samples == "recordings":
        names = ", ".join(f"data={one.rpartition('.')[2]}" for one in RECORDINGS)
        allowed = f"a source of recordings ({names}) or of arrays for {task.names.description}"
        raise ConfigError("data.source", config.source, allowed)
    if config.augment in SOUND_AUGMENTATIONS:
        choices = ", ".join(("none", *PICTURE_AUGMENTATIONS))
        allowed = f"one of {choices} with data.source={config.source}, which gives images"
        raise ConfigError("data.augment", config.augment, allowed)
    return None


def check_augmentation(config: DataConfig, task: Task) -> None:
    """Raises ConfigError for an augmentation or a policy that would make targets wrong."""
    kept = task.augmentations
    if kept is not None and config.augment not in kept:
        choices = f"one of {', '.join(kept)}" if len(kept) > 1 else kept[0]
        allowed = (
            f"{choices} for {task.names.description}, since other augmentations would make its targets wrong"
        )
        raise ConfigError("data.augment", config.augment, allowed)
    if (task.maps or task.boxes) and config.policy != "none":
        allowed = f"none for {task.names.description}, since a policy moves pixels without their labels"
        raise ConfigError("data.policy", config.policy, allowed)
