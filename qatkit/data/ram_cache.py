"""The cache of decoded images in memory (`data.cache=ram`), as uint8 pixels at their original size.

    worker ── image 17 ── known? ── yes ── its pixels in shared memory
                              └──── no ─── decoded, and stored after the last one while there is room

One block of anonymous shared memory is mapped before workers are forked, so an image that one worker has
stored is not decoded again by others. Images for which there is no room are decoded at each use. Memory is
used only as pages are filled. Files in /dev/shm would have a separate limit (64 MB in a container) and would
remain after a kill.
"""

from __future__ import annotations

import mmap
import multiprocessing
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.data.checked import CheckedImages
from qatkit.data.preprocessing import as_tensor
from qatkit.data.sources import TensorImages
from qatkit_verify.errors import ConfigError, counted

_MB = 1_000_000
# Seconds to wait for a worker that stores an image. That takes microseconds, so after this time it is probably dead.
_PATIENCE = 1.0
# Columns of an image's row: its start in the block plus 1, its shape, and whether its channels are innermost.
_START, _CHANNELS, _HEIGHT, _WIDTH, _INNERMOST = range(5)


class Block:
    """Shared memory for the images of all splits.

    Args:
        megabytes: capacity of the memory, in units of 10^6 bytes.

    Raises:
        ConfigError: the system cannot map that much memory.
    """

    def __init__(self, megabytes: int) -> None:
        self.size = megabytes * _MB
        try:
            self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, self.size), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            reason = f"the system cannot reserve so much memory ({error}); set a smaller number"
            raise ConfigError("data.cache_mb", megabytes, reason=reason) from error
        self._used = np.frombuffer(mmap.mmap(-1, 16), np.int64)  # numbers of used bytes and of stored images
        forks = "fork" in multiprocessing.get_all_start_methods()
        self.lock = multiprocessing.get_context("fork" if forks else None).Lock()

    @property
    def note(self) -> str:
        """The number of stored images and their size, for the report."""
        used, images = self._used.tolist()
        return f"{counted(images, 'decoded image')} kept in {used / _MB:,.0f} MB"

    def take(self, size: int) -> int | None:
        """Reserves `size` bytes and returns their offset, or None if there is no room; the caller holds the lock."""
        start = int(self._used[0])
        if start + size > self.size:
            return None
        self._used += (size, 1)
        return start


class KeptImages:
    """A dataset of images, uint8 (channels, height, width), which it stores in memory while there is room.

    Args:
        images: a dataset that returns the same item at every call.
        block: the memory, shared with other splits.
    """

    def __init__(self, images: CheckedImages, block: Block) -> None:
        self.images, self.targets, self.block = images, images.targets, block
        self._rows = np.frombuffer(mmap.mmap(-1, 40 * len(images)), np.int64).reshape(-1, 5)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns the image and its label.

        Raises:
            ConfigError: as for `CheckedImages`.
        """
        row = self._rows[index].tolist()
        if row[_START]:
            return self._stored(row), self.targets[index]
        image, label = self.images[index]
        found = as_tensor(image)
        self._store(index, found)
        return found, label

    def label_map(self, target: Any) -> Tensor:
        """Returns the map of a target, as `CheckedImages` does."""
        return self.images.label_map(target)

    def _stored(self, row: list[int]) -> Tensor:
        start, channels, height, width, innermost = row
        values = self.block.bytes[start - 1 :][: channels * height * width]
        shape = (height, width, channels) if innermost else (channels, height, width)
        found = torch.from_numpy(values).view(shape)
        return found.permute(2, 0, 1) if innermost else found

    def _store(self, index: int, image: Tensor) -> None:
        """Stores an image if there is room, in its memory order, which differs between Pillow images and tensors."""
        innermost = not image.is_contiguous()
        values = (image.permute(1, 2, 0) if innermost else image).contiguous().numpy().reshape(-1)
        if not self.block.lock.acquire(timeout=_PATIENCE):
            return
        try:
            start = None if self._rows[index, _START] else self.block.take(values.size)
            if start is not None:
                self.block.bytes[start : start + values.size] = values
                self._rows[index, _CHANNELS:] = (*image.shape, innermost)
                self._rows[index, _START] = (
                    start + 1
                )  # set last, since other processes read the image from now on
        finally:
            self.block.lock.release()


def check_cache(cache: str, workers: int) -> None:
    """Raises ConfigError for a cache if workers are spawned, not forked: each would then fill its own cache."""
    if cache == "ram" and workers and not sys.platform.startswith("linux"):
        allowed = f"none on {sys.platform} with data.workers={workers}, or data.workers=0"
        raise ConfigError("data.cache", cache, allowed)


def cached_images(images: CheckedImages, block: Block | None) -> CheckedImages | KeptImages:
    """Returns `images` with the cache; unchanged without a block, or if they are in memory already."""
    source: Any = images.dataset
    return images if block is None or isinstance(source, TensorImages) else KeptImages(images, block)
