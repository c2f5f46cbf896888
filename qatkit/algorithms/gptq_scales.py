"""Scales for GPTQ: searched before columns are rounded, fitted to the integers afterwards.

Search. An error e of one weight, compensated as well as possible by the weights that are free to move, costs
e² / [H⁻¹]_ii. Each block therefore takes, from a few candidates, the scale and zero point with the least sum
of these costs when its weights are rounded to the nearest.

Fit. Once the integers q are known, the error is a quadratic function of the scales. For a row w with integers
q_b in block b (0 elsewhere) the best scales s solve

    Σ_c (q_b · H · q_c) s_c = q_b · H · w        for every block b

Rows are independent of each other. Gains of search and fit: docs/decisions/0058-weight-scales-and-bits.md.

Source: the cost of an error is that of optimal brain surgery (Frantar et al., "GPTQ", 2023, equation 2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.quant import numerics
from qatkit.quant.granularity import PerBlock
from qatkit.quant.held_scales import held
from qatkit.quant.spec import QuantSpec

# Shares of the range that are tried, and limits for the change of a fitted scale.
_SHARES = torch.linspace(1.05, 0.5, 23).tolist()
_LEAST, _MOST = 0.5, 1.5
_VALUES = 2**20  # size of the largest temporary tensors


def searched(weight: Tensor, importance: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Returns the scales and the zero points, of the granularity's shape, with the least weighted squared error.

    Args:
        weight: the weight, [out, ...].
        importance: the cost of each squared error, not negative, broadcastable to the weight.
        spec: spec of the weight.
    """
    full, first = numerics.weight_scale(weight, spec), numerics.weight_zero_point(weight, spec)
    scale, zero, least = full.clone(), first.clone(), torch.full_like(full, torch.inf)
    for share in _SHARES:
        tried = full * share if spec.any_scale else held(full * share, spec)
        spread = spec.granularity.spread(tried, weight.shape)
        for shift in (-1, 0, 1) if spec.has_zero_point else (0,):
            moved = (first + shift).clamp(spec.quant_min, spec.quant_max) if shift else first
            steps = numerics.clamped(torch.round(weight / spread), numerics.weight_ends(weight, spec, moved))
            values, dims = spec.granularity.grouped((steps * spread).sub_(weight).square_().mul_(importance))
            cost = values.sum(dims)
            better = cost < least
            scale, zero = torch.where(better, tried, scale), torch.where(better, moved, zero)
            least = torch.minimum(cost, least)
    return held(scale, spec), zero


def fitted(wanted: Tensor, form: Tensor, integers: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the scales, in the shape of `scale`, with which these integers have the least error.

    A row keeps its scales if new scales, as stored in the file, are no better.

    Args:
        wanted: the float weight that the integers represent, [groups, rows, inputs].
        form: the second moments or covariance of the inputs, [groups, inputs, inputs], positive.
        integers: the integers, [groups, rows, inputs].
        scale: the current scales, [groups · rows] or in blocks [groups · rows, blocks]; a single scale for
            the tensor is not changed.
        spec: spec of the weight.
    """
    if not spec.granularity.separates(0):
        return scale
    groups, rows, inputs = wanted.shape
    by_row = scale.reshape(groups, rows, -1)
    blocks = by_row.shape[2]
    size = spec.granularity.size if isinstance(spec.granularity, PerBlock) else inputs
    found = torch.empty_like(by_row)
    for group in range(groups):
        filled = F.pad(form[group], [0, blocks * size - inputs] * 2)
        for part in _slices(rows, blocks * blocks * size):
            given = wanted[group, part], integers[group, part], by_row[group, part]
            found[group, part] = _fitted(*given, filled, size)
    # Scales in uint8 have a unit for each row, so the stored scales are compared, and kept or not, row by row.
    found = held(found.reshape(scale.shape), spec).reshape(by_row.shape)
    spread = [one.repeat_interleave(size, 2)[..., :inputs] for one in (found, by_row)]
    after, before = (_cost(wanted - integers * one, form) for one in spread)
    return torch.where((after < before)[..., None], found, by_row).reshape(scale.shape)


def _fitted(wanted: Tensor, integers: Tensor, scale: Tensor, form: Tensor, size: int) -> Tensor:
    """Returns the scales [rows, blocks] of one group's rows, by the equations above."""
    fill = len(form) - wanted.shape[1]
    steps = F.pad(integers, [0, fill]).unflatten(1, (-1, size))
    towards = (F.pad(wanted, [0, fill]) @ form).unflatten(1, (-1, size))
    joined = torch.einsum("rbi,bik->rbk", steps, form.unflatten(0, (-1, size)))
    system = torch.einsum("rbci,rci->rbc", joined.unflatten(2, (-1, size)), steps).double()
    aim = (steps * towards).sum(2).double()
    # Solves for the change of the current scales, so that blocks of zeros and undetermined blocks stay
    # unchanged.
    lacking = aim - (system @ scale.double()[..., None])[..., 0]
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += 1e-4 * diagonal.mean(1, keepdim=True) + 1e-30
    step = torch.linalg.solve(system, lacking[..., None])[..., 0]
    return torch.clamp((scale + step).to(scale.dtype), _LEAST * scale, _MOST * scale)


def _cost(error: Tensor, form: Tensor) -> Tensor:
    """Returns error · form · error of each row, [groups, rows]."""
    return ((error @ form) * error).sum(2)


def _slices(rows: int, values: int) -> Iterator[slice]:
    """Splits rows of `values` values each into slices of at most `_VALUES` values, but at least one row."""
    each = max(1, _VALUES // values)
    return (slice(start, start + each) for start in range(0, rows, each))
