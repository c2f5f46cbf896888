"""How many scales a tensor has, and which of its elements each one serves.

    PerTensor             one in all                                    scale []
    PerChannel(axis)      one for each index along `axis`               scale [channels]
    PerBlock(axis, size)  one for each `size` neighbours along `axis`   scale of the tensor's shape but for `axis`,
                                                                        where it has ceil(n / size) entries

These are the forms that ONNX QuantizeLinear and DequantizeLinear know (blocks from opset 21 on). Whoever needs the
shape of the scales, the scale of an element or a reduction over what shares a scale asks the type for it. The module
loads no torch: the command line's checks read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Granularity(ABC):
    """What the three have in common; `str` gives the text that configurations hold."""

    @abstractmethod
    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of a tensor of `shape`."""

    @abstractmethod
    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns `scale` such that it broadcasts against a tensor of `shape`, each element beside its own."""

    @abstractmethod
    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the values of `x` and the dimensions to reduce, after which what is left has the scales' shape.

        Zeros fill up a last block that is shorter.
        """

    @abstractmethod
    def separates(self, axis: int) -> bool:
        """Returns whether no scale serves two indices of `axis` (not negative)."""


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the tensor."""

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
    """One scale for each index along an axis; of weights that of the output channels, 0.

    Attributes:
        axis: negative values count from the last one.
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
    """One scale for each block of neighbours along an axis; the last block may be shorter.

    Attributes:
        axis: not negative.
        size: elements of a block.
    """

    axis: int
    size: int

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise ValueError(f"axis={self.axis}: expected 0 or more")
        if self.size < 1:
            raise ValueError(f"size={self.size}: expected 1 or more elements")

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        blocks = -(-shape[self.axis] // self.size)
        return (*shape[: self.axis], blocks, *shape[self.axis + 1 :])

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        return scale.repeat_interleave(self.size, self.axis).narrow(self.axis, 0, shape[self.axis])

    def grouped(self, x: Tensor) -> tuple[Tensor, list[int]]:
        from torch.nn.functional import pad

        behind = [0, 0] * (x.ndim - 1 - self.axis)
        filled = pad(x, [*behind, 0, -x.shape[self.axis] % self.size])
        return filled.unflatten(self.axis, (-1, self.size)), [self.axis + 1]

    def separates(self, axis: int) -> bool:
        return axis != self.axis or self.size == 1

    def __str__(self) -> str:
        return f"per_block(axis={self.axis}, size={self.size})"


_BY_TEXT: dict[str, Granularity] = {str(one): one for one in (PerTensor(), PerChannel(0))}
# Of weights, as configurations say it.
GRANULARITIES = tuple(_BY_TEXT)


def granularity_of(text: str) -> Granularity:
    """Returns the granularity of a weight that a configuration names.

    Raises:
        ValueError: the text is none of `GRANULARITIES`.
    """
    if text not in _BY_TEXT:
        raise ValueError(f"granularity={text}: expected one of {', '.join(GRANULARITIES)}")
    return _BY_TEXT[text]


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """Reshapes `values` [] or [C] to broadcast along `axis` of a tensor of `rank` dimensions."""
    return values if values.ndim == 0 else values.view([-1 if d == axis % rank else 1 for d in range(rank)])
