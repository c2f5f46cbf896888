"""Granularity: the number of scales of a tensor, and the elements that share each of them.

    PerTensor         one for the tensor                               scale []
    PerChannel(axis)  one for each index along `axis`                  scale [channels]
    PerBlock(size)    for a weight: one for each `size` neighbours     scale [out, ceil(inputs / size)]
                      among the inputs of an output channel
    AlongAxis(size, axis)   one for each `size` neighbours along   scale as the tensor, except for that
                            an axis, as in number formats          axis: ceil(values / size)

The inputs of an output channel are all its values in order: the row of a Linear, or the input channels times
the kernel of a Conv. These are the granularities that ONNX's DequantizeLinear (blocks of a matrix from opset
21 on) and ONNX Runtime's MatMulNBits support. Code that needs the shape of the scales, the scale of an
element or a reduction over elements that share a scale asks the type for it. The module does not import
torch, so that the command line can check settings without waiting for torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


BLOCK_SIZES = (16, 32, 64, 128, 256)  # supported by ONNX Runtime's kernels


class Granularity(ABC):
    """The base class of all granularities; `str` returns the text that configurations use."""

    @abstractmethod
    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of a tensor of `shape`."""

    @abstractmethod
    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns `scale`, reshaped or repeated so that it broadcasts against a tensor of `shape`."""

    @abstractmethod
    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """Returns `x`, reshaped if needed, and the dimensions over which to reduce it to the scales' shape.

        A shorter last block is filled up with zeros.
        """

    @abstractmethod
    def separates(self, axis: int) -> bool:
        """Returns whether no two indices of `axis` (not negative) share a scale."""


@dataclass(frozen=True)
class PerTensor(Granularity):
    """A granularity with one scale for the tensor."""

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return ()

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        return scale

    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return x, list(range(x.ndim))

    def separates(self, axis: int) -> bool:
        return False

    def __str__(self) -> str:
        return "per_tensor"


@dataclass(frozen=True)
class PerChannel(Granularity):
    """A granularity with one scale for each index along an axis; weights use axis 0, the output channels.

    Attributes:
        axis: the axis; negative values count from the last one.
    """

    axis: int

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[self.axis],)

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        return along(scale, self.axis, len(shape))

    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return x, [d for d in range(x.ndim) if d != self.axis % x.ndim]

    def separates(self, axis: int) -> bool:
        return axis == self.axis

    def __str__(self) -> str:
        return "per_channel" if self.axis == 0 else f"per_channel(axis={self.axis})"


@dataclass(frozen=True)
class PerBlock(Granularity):
    """A granularity with one scale for each block of inputs of an output channel; the last block may be shorter.

    Attributes:
        size: number of elements in a block.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: expected 1 or more elements")

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0], -(-math.prod(shape[1:]) // self.size))

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        return scale.repeat_interleave(self.size, 1)[:, : math.prod(shape[1:])].reshape(*shape)

    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        from torch.nn.functional import pad

        rows = x.flatten(1)
        return pad(rows, [0, -rows.shape[1] % self.size]).unflatten(1, (-1, self.size)), [2]

    def separates(self, axis: int) -> bool:
        return axis == 0

    def __str__(self) -> str:
        return f"{{{_BLOCK}: {self.size}}}"


@dataclass(frozen=True)
class AlongAxis(Granularity):
    """A granularity with one scale for each block of neighbours along an axis; the last block may be shorter.

    Attributes:
        size: number of elements in a block.
        axis: the axis; negative values count from the last one.
    """

    size: int
    axis: int

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        at = self.axis % len(shape)
        return (*shape[:at], -(-shape[at] // self.size), *shape[at + 1 :])

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        return scale.repeat_interleave(self.size, self.axis).narrow(self.axis, 0, shape[self.axis])

    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        from torch.nn.functional import pad

        at = self.axis % x.ndim
        behind = [0, 0] * (x.ndim - 1 - at)
        return pad(x, [*behind, 0, -x.shape[at] % self.size]).unflatten(at, (-1, self.size)), [at + 1]

    def separates(self, axis: int) -> bool:
        return axis != self.axis

    def __str__(self) -> str:
        return f"{{{_BLOCK}: {self.size}, axis: {self.axis}}}"


_BLOCK = "block"  # the key of a configuration
_BY_TEXT: dict[str, Granularity] = {str(one): one for one in (PerTensor(), PerChannel(0))}
# Granularities of weights, as written in configurations.
GRANULARITIES = tuple(_BY_TEXT)
BLOCKS = f"{{{_BLOCK}: {' | '.join(map(str, BLOCK_SIZES))}}}"


def granularity_of(asked: Any) -> Granularity:
    """Returns the granularity of a weight from its setting, a word or {block: SIZE}.

    Raises:
        ValueError: the setting is neither one of `GRANULARITIES` nor a block of one of `BLOCK_SIZES`.
    """
    if isinstance(asked, Mapping) and set(asked) == {_BLOCK} and asked[_BLOCK] in BLOCK_SIZES:
        return PerBlock(int(asked[_BLOCK]))
    if not isinstance(asked, str) or asked not in _BY_TEXT:
        raise ValueError(f"granularity={asked}: expected one of {', '.join(GRANULARITIES)}, {BLOCKS}")
    return _BY_TEXT[asked]


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """Reshapes `values` [] or [C] to broadcast along `axis` of a tensor of `rank` dimensions."""
    return values if values.ndim == 0 else values.view([-1 if d == axis % rank else 1 for d in range(rank)])
