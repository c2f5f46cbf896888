"""Data sources, each a function with the signature `(root, download, seed) -> Splits`.

A source only lists images and labels. Small data sets are kept as one uint8 tensor; folders are read image by
image. Missing data are reported before any long work, with advice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as nn_functional
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import datasets

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.data.image_files import ImageFiles, left_out_note
from qatkit.data.preprocessing import Preprocessing
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import class_folders, files_below, is_image_name

_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NO_LABEL = NO_TARGET
_SYNTHETIC_CLASSES, _SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 10, 2000, 500


class ImageDataset(Protocol):
    """A map-style dataset of pairs (input, target).

    An input is an image, arrays by name or the samples of a recording. The task defines the targets; by
    default, they are class labels.
    """

    @property
    def targets(self) -> Sequence[Any]:
        """The targets of all images in order, without opening an image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(
        self, index: int, /
    ) -> tuple[Image.Image | Tensor | Mapping[str, Any] | NDArray[Any], Any]: ...


@dataclass(frozen=True)
class Splits:
    """The splits that a source returns.

    Args:
        train: images for training and calibration.
        test: images for verification only.
        classes: name of each label; empty for tasks without classes, and if every target is `NO_LABEL`.
        default_preprocessing: the preprocessing that is used if neither the configuration nor the model's
            weights define one.
        notes: the report's notes on the images, one line each.
        arrays: whether items are (arrays by the names of the model's inputs, target) instead of images
            (`qatkit.data.arrays`).
        batched: whether a batch may hold several samples; False if the axis that the model's file declares as
            the batch has another meaning.
        recordings: whether items are (samples [T] of a recording at `data.rate`, target) instead of images:
            float32 in -1..1, or int16 (`qatkit.data.recordings`).
        drawn: whether samples were drawn at random, so that no figure is meaningful for real data.
        advice: the end of a message about a model that fails on the samples: the settings that may help.
    """

    train: ImageDataset
    test: ImageDataset
    classes: tuple[str, ...]
    default_preprocessing: Preprocessing | None = None
    notes: tuple[str, ...] = ()
    arrays: bool = False
    batched: bool = True
    drawn: bool = False
    recordings: bool = False
    advice: str = ""


Source = Callable[[str | None, bool, int], Splits]


class TensorImages:
    """Images held in memory: uint8 (N, channels, height, width), and N labels.

    Raises:
        ValueError: the numbers of labels and images differ.
    """

    def __init__(self, images: Tensor, targets: Sequence[int]) -> None:
        if len(images) != len(targets):
            raise ValueError(
                f"expected one label per image, got {len(targets)} labels for {len(images)} images"
            )
        self.images, self.targets = images, [int(target) for target in targets]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]


def digits(root: str | None, download: bool, seed: int) -> Splits:
    """Returns scikit-learn's 1,797 handwritten digits, 8x8 grey.

    They are part of scikit-learn, so `root` and `download` are unused. A fifth of each class, drawn by
    `seed`, is the test split. By default the images are enlarged to 32x32 and repeated over three channels,
    as torchvision's models require; `data.mean` with one number keeps one channel.
    """
    # scikit-learn takes a second to import, and only this source needs it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.from_numpy(np.round(bunch.images * (255 / 16)).astype(np.uint8))[:, None]
    everything = np.arange(len(images))
    train, test = train_test_split(everything, test_size=0.2, stratify=bunch.target, random_state=seed)

    def part(indices: np.ndarray[Any, np.dtype[np.int64]]) -> TensorImages:
        return TensorImages(images[torch.from_numpy(indices)], bunch.target[indices])

    preprocessing = Preprocessing(32, 32, (0.5,) * 3, (0.5,) * 3)
    return Splits(part(train), part(test), tuple(map(str, range(10))), preprocessing)


def synthetic(root: str | None, download: bool, seed: int) -> Splits:
    """Returns ten classes of 32x32 colour images, each a smooth pattern of its class with noise; needs no files."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(_SYNTHETIC_CLASSES, 3, 4, 4, generator=generator)
    patterns = nn_functional.interpolate(coarse, size=(32, 32), mode="bilinear")

    def part(count: int) -> TensorImages:
        targets = torch.arange(count) % _SYNTHETIC_CLASSES
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        noisy = patterns[targets] + 0.25 * noise
        return TensorImages((noisy.clamp(0, 1) * 255).to(torch.uint8), targets.tolist())

    names = tuple(f"class_{index}" for index in range(_SYNTHETIC_CLASSES))
    preprocessing = Preprocessing(32, 32, (0.5,) * 3, (0.25,) * 3)
    return Splits(part(_SYNTHETIC_TRAIN), part(_SYNTHETIC_TEST), names, preprocessing)


def image_folder(root: str | None, download: bool, seed: int) -> Splits:
    """Returns images in ImageNet's layout: `root/train/CLASS/*.jpg` and `root/val/CLASS/*.jpg` (or `root/test/...`).

    If `val` and `test` exist, `val` is used. Classes and files are those of torchvision's `ImageFolder`, in
    its order, except hidden ones and files that operating systems add. The layout does not define
    preprocessing, which comes from the weights or from the configuration.

    Raises:
        ConfigError: the folder or its class folders are missing, a class folder has no image, or the two
            splits have different classes.
    """
    source = "qatkit.data.image_folder"
    layout, top = FOLDERS[source], data_folder(source, root)
    folders = [top / name for name in ("train", "val", "test")]
    found = [folder for folder in folders if folder.is_dir()]
    if folders[0] not in found or len(found) < 2:
        has = f"only {', '.join(folder.name for folder in found)}" if found else "none of them"
        raise ConfigError("data.root", root, f"{layout}; it has {has}")
    classes, other = class_folders(found[0]), class_folders(found[1])
    if not classes or classes != other:
        allowed = (
            _class_difference(found, classes, other) if classes else f"{layout}; train has no class folder"
        )
        raise ConfigError("data.root", root, allowed)
    (train, train_left), (test, test_left) = (_split(folder, classes, str(root)) for folder in found[:2])
    return Splits(train, test, tuple(classes), notes=left_out_note([*train_left, *test_left]))


def _split(folder: Path, classes: Sequence[str], root: str) -> tuple[ImageFiles, list[str]]:
    """Returns the images of the class folders in `folder`, and the paths that were left out."""
    samples, left_out, empty = list[tuple[str, int]](), list[str](), list[str]()
    for label, name in enumerate(classes):
        paths, left = files_below(folder / name, is_image_name, "data.root")
        samples += [(path, label) for path in paths]
        left_out += left
        empty += [] if paths else [name]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        allowed = f"images in every class folder; {folder.name} has none in {', '.join(empty[:5])}{more}"
        raise ConfigError("data.root", root, allowed)
    return ImageFiles(samples, complete=True), left_out


def _class_difference(folders: Sequence[Path], train: Sequence[str], test: Sequence[str]) -> str:
    """Returns a description of the classes that only one split has, with at most five names each."""
    parts = []
    for folder, mine, other in ((folders[0], train, test), (folders[1], test, train)):
        if extra := sorted(set(mine) - set(other)):
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            parts.append(f"only {folder.name} has {', '.join(extra[:5])}{more}")
    return f"the same class folders in both splits; {', and '.join(parts)}"


def cifar10(root: str | None, download: bool, seed: int) -> Splits:
    """Returns CIFAR-10 as published (32x32 colour, 50,000 and 10,000 images), through torchvision.

    Raises:
        ConfigError: no folder is given, or the files are missing or damaged, or cannot be fetched.
    """
    cls = datasets.CIFAR10
    place = f"{cls.url} into {root}"
    train, test = _torchvision_splits(cls, root, download, place)
    # torchvision keeps (N, height, width, channels).
    images = [TensorImages(torch.from_numpy(p.data).permute(0, 3, 1, 2), p.targets) for p in (train, test)]
    preprocessing = Preprocessing(32, 32, _CIFAR_MEAN, _CIFAR_STD)
    return Splits(images[0], images[1], tuple(train.classes), preprocessing)


def fashion_mnist(root: str | None, download: bool, seed: int) -> Splits:
    """Returns Fashion-MNIST (28x28 grey, 60,000 and 10,000 images), through torchvision.

    By default the images are enlarged to 32x32 and repeated over three channels.

    Raises:
        ConfigError: as for `cifar10`.
    """
    cls = datasets.FashionMNIST
    names = " ".join(name for name, _ in cls.resources)
    place = f"{names} from {cls.mirrors[0]} into {Path(root or '.', cls.__name__, 'raw')}"
    train, test = _torchvision_splits(cls, root, download, place)
    images = [TensorImages(part.data[:, None], part.targets) for part in (train, test)]
    preprocessing = Preprocessing(32, 32, (0.2860,) * 3, (0.3530,) * 3)
    return Splits(images[0], images[1], tuple(train.classes), preprocessing)


def _torchvision_splits(
    cls: Callable[..., Any], root: str | None, download: bool, place: str
) -> tuple[Any, Any]:
    """Returns the train and test parts of a torchvision dataset.

    Args:
        cls: the dataset's class.
        root: folder of the files.
        download: whether missing files are fetched.
        place: advice for messages that names the files and the folder to put them into.

    Raises:
        ConfigError: no folder is given, or the files are missing or damaged, or cannot be fetched.
    """
    if root is None:
        other = ", or one to download them into" if download else ""
        raise ConfigError("data.root", root, f"the folder with the files{other}")
    try:
        return cls(root, train=True, download=download), cls(root, train=False, download=download)
    except (OSError, RuntimeError, EOFError) as error:  # URLError is an OSError
        told = "cannot be fetched" if download else "are missing or damaged"
        advice = f"put {place}" if download else f"set data.download=true, or put {place}"
        reason = f"the files {told} ({' '.join(str(error).split())[:120]}); {advice}"
        raise ConfigError("data.root", root, reason=reason) from error
