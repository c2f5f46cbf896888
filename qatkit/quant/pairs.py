"""Weights with which sums of two products cannot saturate in kernels that add them in 16 bits.

On x86 without VNNI, ONNX Runtime multiplies uint8 activations by int8 weights with vpmaddubsw, which adds the products
of two neighbours along the depth of a matrix product and saturates at 16 bits (docs/onnxruntime-qdq.md, 3f):

    x0·w0 + x1·w1 with x0, x1 in 0..255 fits      ⇔      |w0 + w1| <= 128

if both weights have the same sign, and always if their signs differ. A weight is therefore exact on every
processor if no two neighbours of the same sign add up to more than 128. Only a few channels need a larger
scale for this, and it costs them less than the one bit that 7-bit weights cost all channels (figures:
docs/decisions/0042-guarded-weights.md).

The depth of a convolution runs over the positions of its kernel and, innermost, the channels of its group. If
the number of channels is odd, pairs span two positions unless the export adds channels of zeros
(`qatkit.graph.pad_channels`). Such weights are fitted for pairs with and without these channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.quant.spec import PAIR_LIMIT as LIMIT

# A little below 128, since from 128 steps on the sum of two rounded weights can reach 129.
_STEPS = 127.99


def least_scale(weight: Tensor, *, per_channel: bool) -> Tensor:
    """Returns the smallest scale at which no pair of `weight`, rounded to nearest, exceeds the limit.

    Args:
        weight: the weight of a convolution or a Linear, [out, in / groups, ...].
        per_channel: whether each output channel has its own scale.

    Returns:
        The scales, [out], or [] without `per_channel`.
    """
    sums = [(pairs[..., 0] + pairs[..., 1]).abs().amax(1) for pairs in _arranged(weight)]
    largest = torch.stack(sums).amax(0) if len(sums) > 1 else sums[0]
    return (largest if per_channel else largest.max()) / _STEPS


def fitted(integers: Tensor, steps: Tensor) -> Tensor:
    """Returns `integers` with each pair that exceeds the limit moved to the nearest pair that does not.

    Args:
        integers: the integers, in float, in the weight's shape.
        steps: the weight over its scale, before rounding (which need not be to the nearest).

    Returns:
        Integers of the same shape and memory format. No absolute value grows.
    """
    for within in (True, False) if _is_odd(integers) else (True,):
        pairs, wanted = _pairs(integers, within=within), _pairs(steps, within=within)
        over = (pairs[..., 0] + pairs[..., 1]).abs() > LIMIT
        pairs = torch.where(over[..., None], _nearest(pairs, wanted), pairs)
        # Keeps the weight's memory format, which convolutions follow.
        integers = torch.empty_like(integers).copy_(_restored(pairs, integers.shape, within=within))
    return integers


def _nearest(integers: Tensor, steps: Tensor) -> Tensor:
    """Returns the pairs [..., 2] nearest to `steps` whose sum is at the limit.

    Both integers of a pair in `integers` must have the same sign. No absolute value grows.
    """
    sign = integers[..., :1].sign()
    most = integers * sign
    wanted = steps * sign
    first = torch.round(wanted[..., 0] + (LIMIT - wanted.sum(-1)) / 2)
    first = torch.minimum(torch.maximum(first, LIMIT - most[..., 1]), most[..., 0])
    return torch.stack([first, LIMIT - first], -1) * sign


def _arranged(weight: Tensor) -> Iterator[Tensor]:
    """Yields the pairs [out, pairs, 2] for each order in which the weight may be multiplied."""
    yield _pairs(weight, within=True)
    if _is_odd(weight):
        yield _pairs(weight, within=False)


def _is_odd(weight: Tensor) -> bool:
    """Returns whether pairs can span two positions of the kernel."""
    return weight.ndim > 2 and weight.shape[1] % 2 == 1 and weight.shape[2:].numel() > 1


def _pairs(weight: Tensor, *, within: bool) -> Tensor:
    """Returns pairs [out, pairs, 2] of neighbours along the depth, `within` one kernel position or across."""
    rows = weight.flatten(2).transpose(1, 2) if weight.ndim > 2 else weight[:, None]
    if not within:
        rows = rows.flatten(1)[:, None]
    return F.pad(rows, (0, rows.shape[2] % 2)).reshape(len(weight), -1, 2)


def _restored(pairs: Tensor, shape: torch.Size, *, within: bool) -> Tensor:
    """Returns a weight of `shape` from its pairs: the inverse of `_pairs`."""
    out, channels, positions = shape[0], shape[1], shape[2:].numel()
    if within:
        rows = pairs.reshape(out, positions, -1)[..., :channels]
    else:
        rows = pairs.flatten(1)[:, : channels * positions].reshape(out, positions, channels)
    return rows.transpose(1, 2).reshape(shape)
