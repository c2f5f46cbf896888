"""Pascal VOC and Cityscapes for segmentation, as torchvision lists them; `train` trains and `val` verifies.

    ROOT/VOCdevkit/VOC2012/{JPEGImages,SegmentationClass,ImageSets/Segmentation}     data=voc_segmentation
    ROOT/leftImg8bit/{train,val}/CITY/*.png  ROOT/gtFine/{train,val}/CITY/*.png      data=cityscapes

`data.download` fetches VOC; Cityscapes requires an account and is never downloaded. All label pictures are
read before any long work, as in `label_pictures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import Cityscapes, VOCSegmentation

from qatkit.config.data_folders import data_folder
from qatkit.data.label_pictures import LabelPictures, label_numbers, largest_label
from qatkit.data.sources import Splits
from qatkit.tasks.segmentation import IGNORED
from qatkit_verify.errors import ConfigError, first_line

_VOC, _CITYSCAPES = (f"qatkit.data.segmentation_sets.{name}" for name in ("voc_segmentation", "cityscapes"))
_YEAR = "2012"
_VOC_FILE = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"
_VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


def voc_segmentation(root: str | None, download: bool, seed: int) -> Splits:
    """Returns Pascal VOC 2012: 1,464 pictures for training, 1,449 for verification, 20 classes and background.

    Borders (255) are ignored.

    Raises:
        ConfigError: the files are missing or cannot be fetched, or label pictures have unknown numbers.
    """
    top = data_folder(_VOC, root)
    base = top / "VOCdevkit" / f"VOC{_YEAR}"
    try:
        if download and not base.is_dir():
            VOCSegmentation(top, _YEAR, "train", download=True)
        parts = [VOCSegmentation(top, _YEAR, part) for part in ("train", "val")]
    except (OSError, RuntimeError) as error:
        other = "" if download else ", or set data.download=true"
        told = f"Pascal VOC {_YEAR} can't be read from {base} ({first_line(error)})"
        reason = f"{told}; fetch {_VOC_FILE} and unpack it into {top}{other}"
        raise ConfigError("data.root", root, reason=reason) from error
    train, test = (_below(top, part.images, part.targets) for part in parts)
    _check(top, [*train, *test], (IGNORED,), len(_VOC_CLASSES) - 1)
    return Splits(LabelPictures(train, top, (IGNORED,)), LabelPictures(test, top, (IGNORED,)), _VOC_CLASSES)


def cityscapes(root: str | None, download: bool, seed: int) -> Splits:
    """Returns Cityscapes with fine labels: 2,975 pictures for training, 500 for verification, 19 classes.

    Other labels are ignored.

    Raises:
        ConfigError: the files are missing, or label pictures have unknown numbers.
    """
    top = data_folder(_CITYSCAPES, root)
    try:
        parts = [Cityscapes(str(top), part, target_type="semantic") for part in ("train", "val")]
    except (OSError, RuntimeError) as error:
        told = f"leftImg8bit/ and gtFine/ can't be read ({first_line(error)})"
        what = "leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from cityscapes-dataset.com"
        reason = f"{told}; download {what}, which needs an account, and unpack both into the folder"
        raise ConfigError("data.root", root, reason=reason) from error
    train, test = (_below(top, part.images, [one[0] for one in part.targets]) for part in parts)
    ids = [one.id for one in Cityscapes.classes if one.id >= 0]
    _check(top, [*train, *test], (IGNORED,), max(ids))
    names = {one.train_id: one.name for one in Cityscapes.classes if 0 <= one.train_id < IGNORED}
    classes = tuple(names[number] for number in sorted(names))
    return Splits(CityLabels(train, top), CityLabels(test, top), classes)


class CityLabels(LabelPictures):
    """A dataset of pictures and of label pictures that hold Cityscapes' ids.

    Args:
        samples: (path of the picture, path of the label picture below `root`).
        root: folder of all label pictures.
    """

    def __init__(self, samples: Sequence[tuple[str, str]], root: Path) -> None:
        super().__init__(samples, root, (IGNORED,))
        table = np.full(IGNORED + 1, IGNORED, np.uint8)
        for one in Cityscapes.classes:
            if 0 <= one.train_id < IGNORED:
                table[one.id] = one.train_id
        self._table = table

    def label_map(self, target: Any) -> Tensor:
        """Returns the training ids of a label picture, uint8 [1, height, width].

        Ids without a training id become `IGNORED`.

        Raises:
            ConfigError: the file cannot be read, has colours, or has a number above 255.
        """
        return torch.from_numpy(self._table[label_numbers(self.root / str(target))])[None]


def _below(top: Path, pictures: Sequence[Any], labels: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns sorted pairs (path of a picture, path of its label picture relative to `top`)."""
    pairs = sorted(zip(map(str, pictures), map(str, labels), strict=True))
    return [(picture, Path(label).relative_to(top).as_posix()) for picture, label in pairs]


def _check(top: Path, pairs: Sequence[tuple[str, str]], ignored: Sequence[int], largest: int) -> None:
    """Raises ConfigError if a label picture is unreadable, differs in size, or has a number above `largest`."""
    found = largest_label(top, pairs, ignored)
    if found > largest:
        raise ConfigError(
            "data.root", str(top), f"label pictures with numbers up to {largest}; the number {found} occurs"
        )
