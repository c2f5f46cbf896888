"""Resizing of stacked images, bit for bit as in `qatkit_verify.preprocess`.

Images are shrunk in 8 bits by ATen's kernels, and enlarged in float32 by this module.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nn_functional
from torch import Tensor

from qatkit_verify.fitting import Fitting, Sides, is_whole
from qatkit_verify.preprocess import Taps, taps

_CACHED = 2**20  # bytes that are enlarged at a time, so that they stay in a core's cache for the second pass


def resized(array: Tensor, how: Fitting, interpolation: str) -> Tensor:
    """Resizes uint8 `array` (N, channels, height, width) to `how.scaled`, and returns the kept part.

    Values stay in 0..255. They are float32 if a side is enlarged or has one pixel afterwards, otherwise uint8.
    """
    height, width = array.shape[-2:]
    (top, left), (rows, columns) = how.start, how.kept
    cut = slice(top, top + rows), slice(left, left + columns)
    if how.scaled == (height, width):
        return array[..., cut[0], cut[1]]
    if is_whole(height, width, how.scaled):
        return _shrunk(array, how.scaled, interpolation)[..., cut[0], cut[1]]
    along = [taps(*ends, interpolation) for ends in zip((height, width), how.scaled, strict=True)]
    return _enlarged(array, along[0].cut(top, rows), along[1].cut(left, columns))


def _shrunk(array: Tensor, size: Sides, interpolation: str) -> Tensor:
    """Resizes uint8 (N, channels, height, width) to `size` in 8 bits.

    torchvision's `resize` is not used, because it computes in float32 on CPUs without AVX2, where its results
    differ by up to 1.
    """
    if interpolation == "nearest":
        return nn_functional.interpolate(array, size, mode="nearest")
    return nn_functional.interpolate(array, size, mode=interpolation, align_corners=False, antialias=True)


def _enlarged(array: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """Resizes uint8 (N, channels, height, width) in float32, as defined in `qatkit_verify.preprocess`."""
    shape = (*array.shape[:2], len(rows.index), len(columns.index))
    found = torch.empty(shape)
    images = max(1, _CACHED // (4 * math.prod(shape[1:])))
    for part, place in zip(array.split(images), found.split(images), strict=True):
        flat = part.float().reshape(-1, part.shape[-1])
        wide = _resample(flat, columns, 1, flat.new_empty(len(flat), shape[-1]))
        _resample(wide.view(*part.shape[:-1], shape[-1]), rows, 2, place)
    return found


def _resample(array: Tensor, axis: Taps, dim: int, into: Tensor) -> Tensor:
    """Resizes float32 `array` along `dim`; products and sums are rounded separately, without fused operations."""
    index, weights = torch.from_numpy(axis.index), torch.from_numpy(axis.float32)
    weights = weights[:, None] if dim == 2 else weights
    torch.mul(array.index_select(dim, index[:, 0]), weights[..., 0], out=into)
    for tap in range(1, index.shape[1]):
        into.add_(array.index_select(dim, index[:, tap]).mul_(weights[..., tap]))
    return into
