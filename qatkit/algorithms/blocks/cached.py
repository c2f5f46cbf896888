"""A cache of the tensors between blocks, by chunk, for all images: exact where that is cheap, bounded in memory.

    a quantizer's output        its integers (exact, 1 or 2 bytes each); also after operators that only move values
    other floats                float16 where its range suffices (relative error 2^-11), else float32
    integers, masks             unchanged, like the inputs of the model

A chunk is one batch of images as the graph ran it. It is never split, so that the batch axis of a tensor need
not be known (windows or tokens may come first, and masks may have none). All tensors are in the host's
memory, whatever device the model is on. Beyond `limit` bytes, chunks are files in a temporary folder, read on
demand.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qatkit.quant.fake_quantize import FakeQuantize

# The largest float16. A tensor whose largest value is below the second bound has values too small for
# float16.
_LARGEST, _SMALLEST = 65504.0, 2.0**-7


@dataclass(frozen=True)
class _Packed:
    values: Tensor | Path
    dtype: torch.dtype
    grid: tuple[Tensor, Tensor] | None  # scale, zero point
    size: int  # bytes in memory

    def read(self) -> Tensor:
        values = (
            self.values if isinstance(self.values, Tensor) else torch.load(self.values, weights_only=True)
        )
        if self.grid is None:
            return values.to(self.dtype, copy=True)
        scale, zero = self.grid
        return values.to(self.dtype).sub_(zero).mul_(scale)


class Cache:
    """A store of tensors by name and chunk. Tuples of tensors stay tuples; other values are stored unchanged.

    Args:
        limit: the largest number of bytes in memory; further tensors are written to disk.

    Attributes:
        held: the current number of bytes in memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._kept: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._names = itertools.count()

    def put(
        self, name: Any, chunk: int, value: Any, quantizer: FakeQuantize | None = None, *, exact: bool = False
    ) -> None:
        """Stores a value, without rounding if `exact`; `quantizer` is the quantizer that rounded it, if any."""
        self._kept[name][chunk] = self._packed(value, quantizer, exact)

    def get(self, name: Any, chunk: int) -> Any:
        """Returns a stored value; its tensors are copies."""
        return _read(self._kept[name][chunk])

    def drop(self, name: Any) -> None:
        """Removes all values stored under a name."""
        for packed in self._kept.pop(name, {}).values():
            self._forget(packed)

    def close(self) -> None:
        """Removes all values and their files."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _packed(self, value: Any, quantizer: FakeQuantize | None, exact: bool) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self._packed(part, None, exact) for part in value)
        if not isinstance(value, Tensor):
            return value  # a size
        value = value.detach().cpu()
        small, grid = (value, None) if exact else _small(value, quantizer)
        if small is value:  # other code may write into it, and it may be a view of a larger tensor
            small = value.clone()
        size = small.numel() * small.element_size()
        if self.held + size <= self.limit:
            self.held += size
            return _Packed(small, value.dtype, grid, size)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="qatkit_blocks_")
        path = Path(self._folder.name) / f"{next(self._names)}.pt"
        torch.save(small, path)
        return _Packed(path, value.dtype, grid, 0)

    def _forget(self, packed: Any) -> None:
        if isinstance(packed, tuple):
            for part in packed:
                self._forget(part)
        if not isinstance(packed, _Packed):
            return
        self.held -= packed.size
        if isinstance(packed.values, Path):
            packed.values.unlink()


def _read(packed: Any) -> Any:
    if isinstance(packed, _Packed):
        return packed.read()
    return tuple(map(_read, packed)) if isinstance(packed, tuple) else packed


def _small(value: Tensor, quantizer: FakeQuantize | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    if value.dtype != torch.float32:
        return value, None
    if quantizer is not None and quantizer.enabled and quantizer.spec.form is None:
        scale, zero = quantizer.scale.cpu().clone(), quantizer.zero_point.cpu().clone()
        steps = value.div(scale).round_().add_(zero)
        return steps.to(quantizer.spec.torch_dtype), (scale, zero)
    largest = float(value.abs().max()) if value.numel() else 0.0
    return (value.half() if _SMALLEST <= largest <= _LARGEST else value), None
