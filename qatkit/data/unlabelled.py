"""A folder of pictures and nothing else: what calibrates, and what a file is held against its float model on.

    DIR/**/*  ─ sorted by path ─>  0 1 2 3 4 5 ...   even ones calibrate (and train, by distillation alone)
                                                     odd ones verify

No labels: every target is `NO_LABEL`, and `Splits.classes` is empty. Pictures may be of any size and of any mode
that Pillow reads; they are turned upright as their EXIF data say.
"""

from __future__ import annotations

import os
from pathlib import Path

from qatkit.data.image_files import ImageFiles, left_out_note
from qatkit.data.sources import NO_LABEL, Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import files_below

_LAYOUT = "a folder of pictures (jpg, png, webp, bmp, ...), at least two, in it or in folders below"


def pictures(root: str | None, download: bool, seed: int) -> Splits:
    """Every file in `root` and in the folders below it, whatever its name; hidden files and folders are left out.

    Which one calibrates and which one verifies depends on nothing but the sorted paths: not on which can be read.

    Raises:
        ConfigError: no such folder, or fewer than two files.
    """
    if root is None or not Path(root).is_dir():
        raise ConfigError("data.root", root, f"{_LAYOUT}; there is no such folder")
    found, left_out = files_below(Path(root), lambda name: True, "data.root")
    if len(found) < 2:
        raise ConfigError("data.root", root, f"{_LAYOUT}; it has {len(found)}")
    samples = [(path, NO_LABEL) for path in sorted(found, key=lambda path: path.split(os.sep))]
    train, test = (ImageFiles(samples[first::2], upright=True) for first in (0, 1))
    return Splits(train, test, classes=(), notes=left_out_note(left_out))
