"""Reads picture files of limited size with Pillow, and recognises names in a folder that are not pictures.

    path ── stat: a regular file? ── open, without waiting ── header: size, mode ── pixels ── grey or RGB, 8 bits

A name may lead to anything: a pipe that blocks its reader, an endless device, or a kilobyte that unpacks
to gigabytes. So only regular files are opened, and nothing larger than `MOST_PIXELS` is unpacked.
Pillow is an extra of this package (`qatkit-verify[pictures]`) and is imported only when a picture is opened.
"""

from __future__ import annotations

import functools
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError, first_line

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 89_478_485  # a quarter of a gigabyte in RGB, where Pillow warns of a decompression bomb
MOST_UNEVEN = 200  # maximum ratio of the sides, since the shorter one is scaled to a few hundred pixels
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each exists only on some systems
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Names that systems add next to images, besides hidden files: macOS archives, Windows and Synology.
_LITTER = ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin")
_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)  # as in torchvision


def open_picture(path: Path, *, upright: bool) -> NDArray[np.uint8]:
    """Returns the pixels of a picture file as uint8 [H, W, 1] or [H, W, 3], read as in training.

    Args:
        path: the file.
        upright: whether to rotate the picture as its EXIF data say (`Preprocess.upright`).

    Raises:
        ConfigError: the file cannot be read as a picture, or Pillow is missing; the message names the file.
    """
    found = np.array(read_picture(str(path), "pictures", upright=upright))
    return found[..., None] if found.ndim == 2 else found


def picture_files(folder: Path) -> list[Path]:
    """Returns the picture files in `folder` and in folders below it, sorted as in torchvision.

    Raises:
        ConfigError: a folder cannot be listed.
    """
    return [Path(path) for path in files_below(folder, is_image_name, "pictures")[0]]


def read_picture(path: str, key: str, *, upright: bool = False) -> Image.Image:
    """Returns the image at `path` in grey or RGB; the first frame if it has several.

    Transparent pixels have the colour that the file stores for them. 16-bit pixels are reduced to their upper 8
    bits.

    Args:
        path: the file.
        key: the key that named the path, for messages.
        upright: whether to rotate the image as its EXIF data say.

    Raises:
        ConfigError: the file cannot be read as an image, or Pillow is missing; the message names the file.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        needed = "opening pictures needs Pillow: pip install 'qatkit-verify[pictures]'"
        raise ConfigError(key, path, reason=needed) from None
    try:
        with open_regular_file(path) as stream, Image.open(stream) as image:
            check_size(*image.size)
            return as_eight_bits(ImageOps.exif_transpose(image) if upright else image)
    except Exception as error:  # disk errors, and any error of Pillow's readers
        raise ConfigError(key, path, reason=f"the file is not a readable image ({reason(error)})") from error


@contextmanager
def open_regular_file(path: str) -> Iterator[io.BufferedReader]:
    """Opens the regular file at `path` for reading.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: the path leads to something else; a pipe is rejected without waiting for it.
    """
    with open(os.open(path, os.O_RDONLY | _NO_WAITING), "rb") as stream:
        check_kind(os.fstat(stream.fileno()).st_mode)
        yield stream


def check_kind(mode: int) -> None:
    """Raises ValueError, which names the kind of file, unless `mode` belongs to a regular file."""
    if not stat.S_ISREG(mode):
        raise ValueError(next((name for is_one, name in _KINDS if is_one(mode)), "not a regular file"))


def check_size(width: int, height: int) -> None:
    """Raises ValueError for an image without pixels, or one whose unpacked or resized pixels need too much memory."""
    if min(width, height) < 1:
        raise ValueError("no pixels")
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MOST_PIXELS:,} in all")
    if max(width, height) > MOST_UNEVEN * min(width, height):
        raise ValueError(f"{width} x {height} pixels; one side is more than {MOST_UNEVEN} times the other")


def reason(error: Exception) -> str:
    """Returns a phrase that says why a file is not an image."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "Pillow does not know its format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return first_line(error)


@functools.cache
def check_mode(mode: str) -> None:
    """Raises ValueError for pixel modes that cannot be reduced to 8 bits of grey or colour."""
    from PIL import Image

    as_eight_bits(Image.new(mode, (1, 1)))


def as_eight_bits(image: Image.Image) -> Image.Image:
    """Returns the image in grey or RGB, by Pillow's own conversion except where it would clip at 255 or warn.

    Raises:
        ValueError: the pixels cannot be reduced to 8 bits; reading the image may raise other errors.
    """
    from PIL import Image

    image.load()
    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"integers from {values.min()} to {values.max()}, which exceed 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("float pixels of unknown range")
    if image.mode in ("P", "PA"):  # to the palette's colours first: it may contain transparency
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")


def is_litter(name: str) -> bool:
    """Returns whether a file or folder is hidden, or is one that systems add next to images."""
    return name.startswith(".") or name.lower() in _LITTER


def is_image_name(name: str) -> bool:
    """Returns whether a file name has an extension that torchvision accepts for images."""
    return name.lower().endswith(_EXTENSIONS)


def class_folders(folder: Path) -> list[str]:
    """Returns the names of the folders in `folder`, sorted, in the order in which torchvision numbers classes."""
    return sorted(name for name in os.listdir(folder) if not is_litter(name) and (folder / name).is_dir())


def files_below(folder: Path, is_wanted: Callable[[str], bool], key: str) -> tuple[list[str], list[str]]:
    """Returns the wanted files in `folder` and in folders below it, and the paths that were left out.

    Files are sorted by folder and then by name, as in torchvision. Unwanted names and litter are left out.
    Links are followed, except from a folder to one that contains it. Anything that is neither a file nor a
    folder counts as a file. `key` is the key that named the folder, for messages.

    Raises:
        ConfigError: a folder cannot be listed.
    """
    found, left_out, waiting = (
        list[tuple[str, str]](),
        list[str](),
        [(str(folder), frozenset[tuple[int, int]]())],
    )
    while waiting:
        place, above = waiting.pop()
        try:
            status = os.stat(place)
            identity = status.st_dev, status.st_ino
            names = os.listdir(place) if identity not in above else []
        except OSError as error:
            raise ConfigError(key, place, f"a folder that can be read ({reason(error)})") from error
        if identity in above:
            left_out.append(place)
        for name in names:
            path = os.path.join(place, name)
            if is_litter(name):
                left_out.append(path)
            elif os.path.isdir(path):
                waiting.append((path, above | {identity}))
            elif is_wanted(name):
                found.append((place, name))
            else:
                left_out.append(path)
    return [os.path.join(*one) for one in sorted(found)], sorted(left_out)
