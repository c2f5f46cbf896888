"""Expresses convolutions, BatchNorms and sums of one input as one convolution, as arithmetic on their parameters.

    bn(k * x + b)                 →  (k · f) * x + (b - μ) · f + β            f = γ / sqrt(σ² + ε)
    w * (k * x + b) + c           →  (w ∘ k) * x + Σ w · b + c                if w's padding has no effect
    (k * x + b) + (l * x + c)     →  (k + l) * x + (b + c)                    in a window that covers both

Nothing is computed here: a `Kernel` describes the arithmetic of its weight and bias as a tree of calls whose leaves are
tensors of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

Sizes = tuple[int, ...]
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Call:
    """A call of a function that returns a tensor; its arguments are sources, numbers, tuples or None."""

    function: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Settled:
    """The current value of a source, which becomes a parameter of its own."""

    source: Source


# A constant of the graph, the name of a tensor of the model, or a computation on them.
Source = fx.Node | str | Call | Settled


@dataclass(frozen=True)
class Kernel:
    """A convolution of one input.

    Attributes:
        weight: the source of the weight [out, in / groups, *kernel]; None if the convolution is the identity.
        shape: the shape of the weight.
        bias: the source of the bias [out], or None.
        groups: the number of groups.
        stride: the stride per axis of the image.
        before, after: the numbers of zeros padded at the beginning and at the end of each axis.
    """

    weight: Source | None
    shape: Sizes
    bias: Source | None
    groups: int
    stride: Sizes
    before: Sizes
    after: Sizes

    @property
    def size(self) -> Sizes:
        """The size of the window."""
        return self.shape[2:]

    @property
    def depthwise(self) -> bool:
        """True if each output reads only the input channel with its own number."""
        return self.shape[1] == 1 and self.groups == self.shape[0]


def itself(channels: int, rank: int) -> Kernel:
    """Returns the identity as a convolution of an input with `channels` channels and `rank` image axes."""
    ones, zeros = (1,) * rank, (0,) * rank
    return Kernel(None, (channels, 1, *ones), None, channels, ones, zeros, zeros)


def padded(kernel: Kernel, amounts: Sequence[int]) -> Kernel | None:
    """Pads the input of the identity with zeros.

    Returns None for any other kernel, or if batch or channels are padded too.

    Args:
        kernel: the kernel.
        amounts: the numbers of zeros, as in F.pad.
    """
    rank = len(kernel.size)
    pairs = [tuple(amounts[i : i + 2]) for i in range(0, len(amounts), 2)]
    if kernel.weight is not None or len(pairs) > rank:
        return None
    pairs = [*pairs, *[(0, 0)] * (rank - len(pairs))][::-1]
    before, after = (
        tuple(a + pair[i] for a, pair in zip(given, pairs, strict=True))
        for i, given in enumerate((kernel.before, kernel.after))
    )
    return replace(kernel, before=before, after=after)


def normalized(kernel: Kernel, norm: Any, path: str) -> Kernel:
    """Returns the kernel followed by the BatchNorm at `path` with its running statistics."""
    weight, shift = (None if getattr(norm, name) is None else f"{path}.{name}" for name in ("weight", "bias"))
    factor = Call(_factor, (f"{path}.running_var", weight, norm.eps))
    column = Call(_column, (factor, len(kernel.size)))
    return replace(
        kernel,
        weight=column if kernel.weight is None else Call(torch.mul, (kernel.weight, column)),
        bias=Call(_shifted, (kernel.bias, factor, f"{path}.running_mean", shift)),
    )


def convolved(first: Kernel, second: Kernel, dilation: Sizes) -> Kernel | None:
    """Returns `first` followed by the convolution `second`; None if that is not one convolution of the input.

    It is not if `second` pads and `first` has a bias, padding or a window of several values: such zeros correspond
    to no zeros around the input. Nor is it if the numbers of groups differ and neither convolution is depthwise.

    Args:
        first: the first convolution.
        second: the second convolution, as if it had no dilation.
        dilation: the dilation of `second`, per axis.
    """
    pads = any(second.before) or any(second.after)
    wide = math.prod(first.size) > 1 or any(first.before) or any(first.after)
    if pads and first.weight is not None and (wide or first.bias is not None):
        return None
    steps = tuple(s * d for s, d in zip(first.stride, dilation, strict=True))
    second = replace(
        second,
        weight=second.weight if set(steps) == {1} else Call(_dilated, (second.weight, steps)),
        shape=(*second.shape[:2], *((k - 1) * d + 1 for k, d in zip(second.size, steps, strict=True))),
    )
    stride = _each(math.prod, zip(first.stride, second.stride, strict=True))
    before, after = (
        tuple(a + s * b for a, s, b in zip(one, first.stride, two, strict=True))
        for one, two in ((first.before, second.before), (first.after, second.after))
    )
    if first.weight is None:
        return replace(second, stride=stride, before=before, after=after)
    groups = second.groups if first.depthwise else first.groups
    first_, second_ = in_groups(first, groups), in_groups(second, groups)
    if first_ is None or second_ is None:
        return None
    size = tuple(a + b - 1 for a, b in zip(first.size, second_.size, strict=True))
    bias = second.bias
    if first.bias is not None:
        bias = Call(_pushed, (second_.weight, first.bias, groups, second.bias))
    weight = Call(_chained, (first_.weight, second_.weight, groups))
    return Kernel(weight, (second_.shape[0], first_.shape[1], *size), bias, groups, stride, before, after)


def added(one: Kernel, other: Kernel) -> Kernel | None:
    """Returns the sum of two kernels; None if it is not one convolution of the input."""
    if one.weight is None and other.weight is None:
        return None
    groups = other.groups if one.depthwise else one.groups
    pair = [in_groups(kernel, groups) for kernel in (one, other)]
    if None in pair or one.stride != other.stride or one.shape[0] != other.shape[0]:
        return None
    like = next(kernel.weight for kernel in (one, other) if kernel.weight is not None)
    before = _each(max, zip(one.before, other.before, strict=True))
    behind = _each(max, zip(*(_behind(kernel) for kernel in (one, other)), strict=True))
    wide = [_widened(kernel, like, before, behind) for kernel in pair if kernel is not None]
    if wide[0].after != wide[1].after:
        return None
    biases = [kernel.bias for kernel in wide if kernel.bias is not None]
    weight = Call(torch.add, (wide[0].weight, wide[1].weight))
    return replace(
        wide[0],
        weight=weight,
        bias=Call(torch.add, tuple(biases)) if len(biases) == 2 else next(iter(biases), None),
    )


def in_groups(kernel: Kernel, groups: int) -> Kernel | None:
    """Returns the kernel with `groups` groups; None unless it has this number already or is depthwise."""
    if kernel.groups == groups:
        return kernel
    if not kernel.depthwise:
        return None
    channels = kernel.shape[0]
    weight = None if kernel.weight is None else Call(_spread, (kernel.weight, groups))
    return replace(kernel, weight=weight, shape=(channels, channels // groups, *kernel.size), groups=groups)


def _behind(kernel: Kernel) -> Sizes:
    """Returns, per axis, how far the first window reaches, counted from the beginning of the image."""
    return tuple(k - b for k, b in zip(kernel.size, kernel.before, strict=True))


def _widened(kernel: Kernel, like: Source, before: Sizes, behind: Sizes) -> Kernel:
    """Pads a weight with zeros, to a window that begins `before` pixels before the image and ends at `behind`."""
    front = tuple(b - a for a, b in zip(kernel.before, before, strict=True))
    back = tuple(b - a for a, b in zip(_behind(kernel), behind, strict=True))
    weight = (
        kernel.weight if kernel.weight is not None else Call(_ones, (like, kernel.shape[0], kernel.groups))
    )
    amounts = [amount for pair in zip(front, back, strict=True) for amount in pair]
    if any(amounts):
        flat = tuple(n for i in range(len(amounts) - 2, -1, -2) for n in amounts[i : i + 2])
        weight = Call(F.pad, (weight, flat))
    return replace(
        kernel,
        weight=weight,
        shape=(*kernel.shape[:2], *(f + k + b for f, k, b in zip(front, kernel.size, back, strict=True))),
        before=before,
        after=tuple(a + b for a, b in zip(kernel.after, back, strict=True)),
    )


def _each(function: Any, values: Any) -> Sizes:
    return tuple(function(one) for one in values)


def _factor(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    inverse = torch.rsqrt(variance + eps)
    return inverse if weight is None else inverse * weight


def _column(factor: Tensor, rank: int) -> Tensor:
    return factor.reshape(-1, 1, *[1] * rank)


def _shifted(bias: Tensor | None, factor: Tensor, mean: Tensor, shift: Tensor | None) -> Tensor:
    moved = (-mean if bias is None else bias - mean) * factor
    return moved if shift is None else moved + shift


def _ones(like: Tensor, channels: int, groups: int) -> Tensor:
    """Returns the weight of the identity, a 1x1 kernel [channels, channels / groups, 1, ...]."""
    weight = like.new_ones(channels, 1, *[1] * (like.ndim - 2))
    return weight if groups == channels else _spread(weight, groups)


def _spread(weight: Tensor, groups: int) -> Tensor:
    """Turns a depthwise weight [out, 1, *kernel] into [out, out / groups, *kernel]."""
    channels = len(weight)
    chosen = torch.eye(channels // groups, dtype=weight.dtype, device=weight.device).repeat(groups, 1)
    return weight * chosen.reshape(*chosen.shape, *[1] * (weight.ndim - 2))


def _dilated(weight: Tensor, steps: Sequence[int]) -> Tensor:
    """Returns the kernel of a dilated convolution, with zeros between the values along each axis."""
    sizes = [(k - 1) * s + 1 for k, s in zip(weight.shape[2:], steps, strict=True)]
    wide = weight.new_zeros(*weight.shape[:2], *sizes)
    every = [slice(None, None, step) for step in steps]
    wide[(slice(None), slice(None), *every)] = weight
    return wide


def _chained(first: Tensor, second: Tensor, groups: int) -> Tensor:
    """Returns the weight that applies `first` [mid, in / groups, ...], then `second` [out, mid / groups, ...]."""
    axes = tuple(range(2, first.ndim))
    outputs, middle = len(second) // groups, second.shape[1]
    turned = first.reshape(groups, middle, *first.shape[1:]).transpose(1, 2).flatten(0, 1).flip(axes)
    by_group = second.reshape(groups, outputs, *second.shape[1:]).transpose(0, 1).flatten(1, 2)
    pads = [size - 1 for size in first.shape[2:]]
    with torch.autocast(first.device.type, enabled=False):  # in bfloat16 training, weights stay float32
        found: Tensor = CONVOLUTIONS[len(axes) - 1](by_group, turned, padding=pads, groups=groups)
    return found.reshape(outputs, groups, -1, *found.shape[2:]).transpose(0, 1).flatten(0, 1)


def _pushed(weight: Tensor, bias: Tensor, groups: int, own: Tensor | None) -> Tensor:
    """Returns the bias [out] of a convolution that absorbs a constant added to its input.

    Args:
        weight: the weight of the convolution, [out, mid / groups, ...].
        bias: the constant of each input channel, [mid].
        groups: the number of groups.
        own: the convolution's own bias [out], or None.
    """
    given = bias.reshape(groups, 1, -1)
    moved = (weight.flatten(2).sum(2).reshape(groups, -1, weight.shape[1]) * given).sum(2).flatten()
    return moved if own is None else moved + own
