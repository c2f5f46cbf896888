"""Weights whose products cannot saturate where a kernel adds two of them in 16 bits.

On x86 without VNNI, ONNX Runtime multiplies uint8 activations by int8 weights with vpmaddubsw, which adds the products
of two neighbours along the depth of a matrix product and saturates at 16 bits (docs/onnxruntime-qdq.md, 3f):

    x0·w0 + x1·w1 with x0, x1 in 0..255 fits      ⇔      |w0 + w1| <= 128

if both weights have one sign, and always if they have not. So a weight is exact on every processor if no two
neighbours add up to more, which asks for a larger scale in few channels, and by less than the bit that 7-bit weights
cost all of them (figures: docs/decisions/0042-guarded-weights.md).

The depth of a convolution runs over the positions of its kernel and, innermost, the channels of its group. Where these
are an odd number, pairs reach from one position into the next, unless channels of zeros are added on the way to the
file (`qatkit.graph.pad_channels`): such weights fit both ways.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.quant.spec import PAIR_LIMIT as LIMIT

# A little below: a sum of two integers that were rounded to the nearest reaches 129 from 128 steps on.
_STEPS = 127.99


def least_scale(weight: Tensor, *, per_channel: bool) -> Tensor:
    """The smallest scale at which no pair of `weight`, rounded to the nearest integers, exceeds the limit.

    Args:
        weight: [out, in / groups, ...], of a convolution or a Linear.
        per_channel: one scale per output channel.

    Returns:
        [out], or [] without `per_channel`.
    """
    sums = [(pairs[..., 0] + pairs[..., 1]).abs().amax(1) for pairs in _arranged(weight)]
    largest = torch.stack(sums).amax(0) if len(sums) > 1 else sums[0]
    return (largest if per_channel else largest.max()) / _STEPS


def fitted(integers: Tensor, steps: Tensor) -> Tensor:
    """`integers` with the pairs that exceed the limit moved to the nearest ones that do not.

    Args:
        integers: float, of the weight's shape.
        steps: what they are the rounding of, not necessarily to the nearest: the weight over its scale.

    Returns:
        Of the same shape and memory format. No absolute value grows.
    """
    for within in (True, False) if _is_odd(integers) else (True,):
        pairs, wanted = _pairs(integers, within=within), _pairs(steps, within=within)
        over = (pairs[..., 0] + pairs[..., 1]).abs() > LIMIT
        pairs = torch.where(over[..., None], _nearest(pairs, wanted), pairs)
        # In the weight's own memory format, which convolutions go by.
        integers = torch.empty_like(integers).copy_(_restored(pairs, integers.shape, within=within))
    return integers


def _nearest(integers: Tensor, steps: Tensor) -> Tensor:
    """The pairs [..., 2] nearest to `steps` whose sum is at the limit; of `integers` that have one sign."""
    sign = integers[..., :1].sign()
    most = integers * sign
    wanted = steps * sign
    first = torch.round(wanted[..., 0] + (LIMIT - wanted.sum(-1)) / 2)
    first = torch.minimum(torch.maximum(first, LIMIT - most[..., 1]), most[..., 0])
    return torch.stack([first, LIMIT - first], -1) * sign


def _arranged(weight: Tensor) -> Iterator[Tensor]:
    """The pairs [out, pairs, 2] of each order in which the weight may be multiplied."""
    yield _pairs(weight, within=True)
    if _is_odd(weight):
        yield _pairs(weight, within=False)


def _is_odd(weight: Tensor) -> bool:
    """Whether pairs can reach from one position of the kernel into the next."""
    return weight.ndim > 2 and weight.shape[1] % 2 == 1 and weight.shape[2:].numel() > 1


def _pairs(weight: Tensor, *, within: bool) -> Tensor:
    """[out, pairs, 2]: neighbours along the depth; `within` one position of the kernel, or across positions."""
    rows = weight.flatten(2).transpose(1, 2) if weight.ndim > 2 else weight[:, None]
    if not within:
        rows = rows.flatten(1)[:, None]
    return F.pad(rows, (0, rows.shape[2] % 2)).reshape(len(weight), -1, 2)


def _restored(pairs: Tensor, shape: torch.Size, *, within: bool) -> Tensor:
    """The inverse of `_pairs`."""
    out, channels, positions = shape[0], shape[1], shape[2:].numel()
    if within:
        rows = pairs.reshape(out, positions, -1)[..., :channels]
    else:
        rows = pairs.flatten(1)[:, : channels * positions].reshape(out, positions, channels)
    return rows.transpose(1, 2).reshape(shape)
