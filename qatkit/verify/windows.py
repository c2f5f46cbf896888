"""Describes how a convolution reads its input: kernel, strides, dilations and pads, including `auto_pad`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Window:
    """The way in which a convolution reads its input.

    Attributes:
        kernel, strides, dilations: the sizes of the kernel, the strides and the dilations, one per axis.
        pads: the pads before all axes, then those after all axes. None: the pads for which the output size is
            the input size divided by the stride, rounded up.
        lower: whether the extra pad of an odd total is added before the axis.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...] | None
    lower: bool = False

    @property
    def _spread(self) -> list[int]:
        """The extent of the dilated kernel along each axis."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def _padding(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns the pads before and after each axis of an input of these sizes."""
        if self.pads is not None:
            rank = len(self.kernel)
            return list(zip(self.pads[:rank], self.pads[rank:], strict=True))
        found = []
        for size, step, covered in zip(sizes, self.strides, self._spread, strict=True):
            needed = max(0, (-(-size // step) - 1) * step + covered - size)
            before = (needed + self.lower) // 2
            found.append((before, needed - before))
        return found

    def columns(self, x: Array, fill: int) -> tuple[Array, tuple[int, ...]]:
        """Returns the columns [K, N * places] of an input [N, C, ...], and the sizes of the output's axes.

        K runs over the kernel's positions and, innermost, over the channels. Padding has the value `fill`.
        """
        rank = len(self.kernel)
        padded = np.pad(x, [(0, 0), (0, 0), *self._padding(x.shape[2:])], constant_values=fill)
        seen = sliding_window_view(padded, self._spread, axis=tuple(range(2, 2 + rank)))
        every = [slice(None, None, step) for step in (*self.strides, *self.dilations)]
        seen = seen[(slice(None), slice(None), *every)]
        places = seen.shape[2 : 2 + rank]
        order = (*range(2 + rank, 2 + 2 * rank), 1, 0, *range(2, 2 + rank))
        depth = int(np.prod(self.kernel)) * x.shape[1]
        return seen.transpose(order).reshape(depth, len(x) * int(np.prod(places))), places


def window_of(node: ir.Node, kernel: tuple[int, ...]) -> Window:
    """Returns the window of a convolution with a kernel of this shape."""
    rank = len(kernel)
    strides, dilations, pads = (
        tuple(node.attributes.get_ints(name, default) or default)
        for name, default in (("strides", (1,) * rank), ("dilations", (1,) * rank), ("pads", (0,) * 2 * rank))
    )
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = (0,) * 2 * rank
    same = mode in ("SAME_UPPER", "SAME_LOWER")
    return Window(kernel, strides, dilations, None if same else pads, mode == "SAME_LOWER")
