"""Pictures, each with a label picture that holds a class number for every pixel.

    ROOT/train/NAME.jpg  ROOT/train_labels/NAME.png      ROOT/val/...  ROOT/test/...      (train_masks, trainannot, ...)
    ROOT/images/train/NAME.jpg  ROOT/labels/train/NAME.png                                (masks, annotations, ...)

`train` trains and calibrates, and `test` (or `val`, if there is no `test`) verifies. Class names are the lines of
`classes.txt` in ROOT, one per number. Without this file, they are the numbers up to the largest one that
occurs. Pixels with a number in `data.ignored` (255 by default) count neither as right nor as wrong. Label
pictures are read before any long work. The run ends with a message if one of them differs in size from its
picture, has colours, or has a number that is not a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema.model import MAPS
from qatkit.data.image_files import ImageFiles
from qatkit.data.sources import Splits
from qatkit.progress import shown
from qatkit.tasks.segmentation import IGNORED
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.pictures import check_size, is_image_name, is_litter, open_regular_file, reason

if TYPE_CHECKING:
    from qatkit.data.request import Request

_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_LABELS = ("_labels", "_masks", "_annotations", "labels", "masks", "annot", "annotations")
_PICTURE_FOLDERS, _LABEL_FOLDERS = ("images", "img_dir"), ("labels", "masks", "annotations", "ann_dir")
_CLASSES, _THREADS, _PART, _SHOWN, _MANY = "classes.txt", 8, 64, 3, 1000


class LabelPictures(ImageFiles):
    """A dataset of pictures and their label pictures.

    Args:
        samples: (path of the picture, path of the label picture below `root`).
        root: folder of all label pictures.
        ignored: class numbers whose pixels are ignored.
    """

    samples: list[Any]
    targets: list[Any]

    def __init__(self, samples: Sequence[tuple[str, str]], root: Path, ignored: Sequence[int]) -> None:
        super().__init__(samples)  # type: ignore[arg-type]
        self.root, self.ignored = root, tuple(ignored)

    def label_map(self, target: Any) -> Tensor:
        """Returns the class numbers of a label picture, uint8 [1, height, width]; ignored ones become `IGNORED`.

        Raises:
            ConfigError: the file cannot be read, has colours, or has a number above 255; the message names it.
        """
        found = label_numbers(self.root / str(target))
        return torch.from_numpy(np.where(np.isin(found, self.ignored), np.uint8(IGNORED), found))[None]


def label_pictures(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the pictures and label pictures of a folder, in one of the layouts of this module.

    Raises:
        ConfigError: the folder does not exist or has another layout; a picture has no label picture or
            several; a label picture cannot be read, differs in size from its picture, or has a number without
            a class; or all numbers are ignored.
    """
    top = data_folder(MAPS, root)
    train, test = _pairs(top, _TRAIN), _pairs(top, _TEST)
    if train is None or test is None:
        part = "train" if train is None else "test or val"
        raise ConfigError("data.root", root, f"{FOLDERS[MAPS]}; there is no folder {part} with labels")
    given = None if request is None else request.settings.ignored
    ignored = [IGNORED] if given is None else given
    largest = largest_label(top, [*train, *test], ignored)
    classes = _classes(top, largest)
    return Splits(LabelPictures(train, top, ignored), LabelPictures(test, top, ignored), classes)


def _pairs(top: Path, parts: Sequence[str]) -> list[tuple[str, str]] | None:
    """Returns sorted pairs (path of a picture, path of its label picture relative to `top`) of a split.

    `parts` are the possible names of the split's folders; the first name with both folders is used. None
    means that no name has both.
    """
    for part in parts:
        beside = [(top / part, top / f"{part}{labels}") for labels in _LABELS]
        apart = [
            (top / first / part, top / second / part)
            for first in _PICTURE_FOLDERS
            for second in _LABEL_FOLDERS
        ]
        for pictures, labels in (*beside, *apart):
            if pictures.is_dir() and labels.is_dir():
                return _matched(top, pictures, labels)
    return None


def _matched(top: Path, pictures: Path, labels: Path) -> list[tuple[str, str]]:
    """Returns sorted pairs of pictures and label pictures with the same name.

    The name of a label picture may have a suffix after _ or -.

    Raises:
        ConfigError: a picture has no label picture or several, or there are no pictures.
    """
    known: dict[str, list[Path]] = {}
    for path in sorted(labels.iterdir()):
        if is_image_name(path.name) and not is_litter(path.name):
            known.setdefault(path.stem, []).append(path)
    found, missing = [], []
    for path in sorted(pictures.iterdir()):
        if not is_image_name(path.name) or is_litter(path.name):
            continue
        own = known.get(path.stem) or [
            one
            for stem in known
            if stem.startswith((f"{path.stem}_", f"{path.stem}-"))
            for one in known[stem]
        ]
        if len(own) == 1:
            found.append((str(path), own[0].relative_to(top).as_posix()))
        else:
            missing.append(f"{path.name} ({'none' if not own else f'{len(own)} found'})")
    if missing or not found:
        both = [folder.relative_to(top).as_posix() for folder in (labels, pictures)]
        allowed = f"one label picture in {both[0]} for each picture in {both[1]}"
        count = counted(len(missing), "picture")
        told = f"it is missing or ambiguous for {count}: {', '.join(missing[:_SHOWN])}"
        raise ConfigError("data.root", str(top), f"{allowed}; {told if missing else 'there are no pictures'}")
    return found


def largest_label(top: Path, pairs: Sequence[tuple[str, str]], ignored: Sequence[int]) -> int:
    """Returns the largest class number in all label pictures, without ignored numbers.

    Raises:
        ConfigError: a label picture cannot be read or does not fit its picture, or all numbers are ignored.
    """

    def look(pair: tuple[str, str]) -> int:
        numbers = label_numbers(top / pair[1])
        with open_regular_file(pair[0]) as stream, Image.open(stream) as picture:
            size = picture.size
        if size != numbers.shape[::-1]:
            own = " x ".join(map(str, numbers.shape[::-1]))
            told = f"{pair[1]} has {own} pixels, but its picture has {size[0]} x {size[1]}"
            allowed = f"label pictures with the sizes of their pictures; {told}"
            raise ConfigError("data.root", str(top), allowed)
        kept = numbers[~np.isin(numbers, ignored)]
        return int(kept.max()) if kept.size else -1

    largest = -1
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [pairs[start : start + _PART] for start in range(0, len(pairs), _PART)]
        for part, _ in shown(
            [(part, part) for part in parts], "checking labels", len(pairs) >= _MANY, "files"
        ):
            largest = max(largest, *pool.map(look, part))
    if largest < 0:
        allowed = "label pictures with at least one number that data.ignored does not list"
        raise ConfigError("data.root", str(top), f"{allowed}; it lists {', '.join(map(str, ignored))}")
    return largest


def _classes(top: Path, largest: int) -> tuple[str, ...]:
    """Returns the names of the classes.

    Raises:
        ConfigError: a number has no name.
    """
    path = top / _CLASSES
    if not path.is_file():
        if largest >= IGNORED - 1:
            allowed = f"label pictures with numbers below {IGNORED - 1} or a {_CLASSES}; the number {largest} occurs"
            raise ConfigError("data.root", str(top), allowed)
        return tuple(map(str, range(largest + 1)))
    names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not names:
        raise ConfigError("data.root", str(top), f"a {_CLASSES} with one class name per line; it has none")
    if largest >= len(names):
        allowed = f"label pictures with numbers from 0 to {len(names) - 1}, one for each line of {_CLASSES}"
        told = f"the number {largest} occurs (data.ignored lists the numbers to ignore)"
        raise ConfigError("data.root", str(top), f"{allowed}; {told}")
    return tuple(names)


def label_numbers(path: Path) -> NDArray[np.uint8]:
    """Returns the class numbers of a label picture, uint8 [height, width].

    Raises:
        ConfigError: the file cannot be read, has colours, or has a number above 255.
    """
    try:
        with open_regular_file(str(path)) as stream, Image.open(stream) as image:
            check_size(*image.size)
            mode, values = image.mode, np.array(image)
    except Exception as error:  # damaged bytes may raise anything in Pillow's readers
        raise ConfigError(
            "data.root", str(path), reason=f"the label picture can't be read ({reason(error)})"
        ) from error
    if values.ndim != 2 or values.dtype.kind not in "uib":
        allowed = f"label pictures with one number per pixel, grey or with a palette; the file is {mode}"
        raise ConfigError("data.root", str(path), allowed)
    if values.size and int(values.max()) > IGNORED:
        allowed = f"label pictures with numbers from 0 to {IGNORED}; the file has {values.max()}"
        raise ConfigError("data.root", str(path), allowed)
    found: NDArray[np.uint8] = values.astype(np.uint8)
    return found
