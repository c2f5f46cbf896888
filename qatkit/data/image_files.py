"""A dataset of image files (read by `qatkit_verify.pictures`), and the report's note on files that are left out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from PIL import Image

from qatkit_verify.pictures import read_picture

_SHOWN = 4


class ImageFiles:
    """A dataset of image files. If a source returns it, the files are checked before any long work.

    Args:
        samples: (path, label) of each image.
        upright: whether images are turned upright by their EXIF data. torchvision does not turn them, and
            published accuracies on ImageNet were measured without it.
        complete: whether every class must have a readable image.

    Attributes:
        targets: the label of each image.
    """

    def __init__(
        self, samples: Sequence[tuple[str, int]], *, upright: bool = False, complete: bool = False
    ) -> None:
        self.samples, self.upright, self.complete = list(samples), upright, complete
        self.targets = [label for _, label in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Returns the image, grey or RGB, and its label.

        Raises:
            ConfigError: the file cannot be read to its end; the message names it.
        """
        path, label = self.samples[index]
        return read_picture(path, "data.root", upright=self.upright), label


def printable(path: str) -> str:
    """Returns a path as one line that UTF-8 can encode, since a name may contain any bytes."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def left_out_note(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the report's note on paths that were left out because of their names; empty if there are none."""
    if not paths:
        return ()
    names = sorted({printable(os.path.basename(path)) for path in paths})
    more = ", ..." if len(names) > _SHOWN else ""
    return (f"files and folders left out by name: {len(paths)} ({', '.join(names[:_SHOWN])}{more})",)
