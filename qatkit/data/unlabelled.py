"""A folder of pictures and nothing else: what calibrates, and what a file is held against its float model on.

    DIR/**/*  ─ sorted by path ─>  0 1 2 3 4 5 ...   even ones calibrate (and train, by distillation alone)
                                                     odd ones verify

No labels: every target is `NO_LABEL`, and `Splits.classes` is empty. Pictures may be of any size and of any mode
that Pillow reads; they are turned upright as their EXIF data say. Each file's header is read when the source is
made, so that what is no picture is named before anything long.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from qatkit.data.sources import NO_LABEL, Splits
from qatkit.errors import ConfigError

_LAYOUT = "a folder of pictures (jpg, png, webp, bmp, ...), at least two, in it or in folders below"
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class Pictures:
    """Pictures by their paths, without labels.

    Attributes:
        samples: (path, `NO_LABEL`) of each, as torchvision's folders have them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.samples = [(str(path), NO_LABEL) for path in paths]
        self.targets = [NO_LABEL] * len(paths)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """The picture, grey or RGB, upright.

        Raises:
            ConfigError: the file cannot be read to its end; names it.
        """
        path, label = self.samples[index]
        return read_picture(path), label


def pictures(root: str | None, download: bool, seed: int) -> Splits:
    """Every picture in `root` and in the folders below it; hidden files and folders are left out.

    Which one calibrates and which one verifies depends on nothing but the sorted paths.

    Raises:
        ConfigError: no such folder, fewer than two pictures, or a file that is no picture (names the file).
    """
    if root is None or not Path(root).is_dir():
        raise ConfigError("data.root", root, f"{_LAYOUT}; there is no such folder")
    found = sorted(path for path in Path(root).rglob("*") if path.is_file() and not _hidden(path, Path(root)))
    if len(found) < 2:
        raise ConfigError("data.root", root, f"{_LAYOUT}; it has {len(found)}")
    for path in found:
        _check_header(path)
    return Splits(Pictures(found[0::2]), Pictures(found[1::2]), classes=())


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _check_header(path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a large picture's size: nothing is decoded here
            Image.open(path).close()
    except _UNREADABLE as error:
        raise _no_picture(str(path), error) from error


def read_picture(path: str) -> Image.Image:
    """The picture at `path`, grey or RGB, upright; of several frames the first.

    Transparent parts have the colour that the file gives them. 16 bits a pixel become the upper 8 of them.

    Raises:
        ConfigError: the file cannot be read as a picture; names the file.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return _eight_bits(ImageOps.exif_transpose(image))
    except _UNREADABLE as error:
        raise _no_picture(path, error) from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow's own conversion, but where it would clip at 255 or warn."""
    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"whole numbers from {values.min()} to {values.max()}, not 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("float pixels, whose white is not known")
    if image.mode in ("P", "PA"):  # by way of its colours: a palette may hold transparency too
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")


def _no_picture(path: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reason = reason.replace(f" {path!r}", "")
    return ConfigError("data.root", path, f"every file must be a readable picture ({reason})")
