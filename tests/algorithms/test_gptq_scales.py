"""Tests of GPTQ's scales against NumPy: a search over all candidates, and a least-squares solver."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from chain import noise
from torch import Tensor

from qatkit.algorithms.gptq_columns import Columns
from qatkit.algorithms.gptq_scales import fitted, searched
from qatkit.quant import numerics
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel, PerTensor
from qatkit.quant.spec import QuantSpec

FOUR = QuantSpec("int4", granularity=PerBlock(16))


def rounding(row: np.ndarray, scale: float, zero: int, low: int, high: int) -> np.ndarray:
    found: np.ndarray = (np.clip(np.round(row / scale) + zero, low, high) - zero) * scale
    return found


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("granularity", [PerBlock(16), PerChannel(0), PerTensor()], ids=str)
def test_no_candidate_costs_less_than_the_one_found(granularity: Granularity, symmetric: bool) -> None:
    spec = replace(FOUR, granularity=granularity, symmetric=symmetric)
    weight, importance = noise(3, 40), noise(1, 40).exp()
    scale, zero = searched(weight, importance, spec)
    index = torch.arange(scale.numel()).reshape(scale.shape)
    range_scale, range_zero = numerics.weight_scale(weight, spec), numerics.weight_zero_point(weight, spec)
    spread, zeros, groups, first, origin = (
        granularity.spread(one, weight.shape).expand_as(weight).numpy()
        for one in (scale, zero.float(), index, range_scale, range_zero.float())
    )
    costs, ends = np.broadcast_to(importance.numpy(), weight.shape), (spec.quant_min, spec.quant_max)
    for group in range(scale.numel()):
        here = groups == group
        row, cost = weight.numpy()[here], costs[here]
        found = (cost * (rounding(row, spread[here][0], zeros[here][0], *ends) - row) ** 2).sum()
        shifts = (0,) if symmetric else (-1, 0, 1)
        tried = [
            (cost * (rounding(row, share * first[here][0], moved, *ends) - row) ** 2).sum()
            for share, shift in product(np.linspace(1.05, 0.5, 23), shifts)
            if ends[0] <= (moved := origin[here][0] + shift) <= ends[1]
        ]
        assert found <= min(tried) * (1 + 1e-4)


def rounded(weight: Tensor, form: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Returns GPTQ's integers, and the scales that follow from the weight ranges."""
    rows = weight.flatten(0, 1)
    scale = numerics.weight_scale(rows, spec)
    spread, low, high = (
        torch.as_tensor(one).expand_as(rows).reshape(weight.shape)
        for one in (spec.granularity.spread(scale, rows.shape), *numerics.weight_ends(rows, spec))
    )
    return Columns(form, order=True, damping=0.01).rounded(weight, spread, (low, high)), scale


@pytest.mark.parametrize("granularity", [PerBlock(16), PerChannel(0)], ids=str)
def test_fitted_scales_solve_the_least_squares(granularity: Granularity) -> None:
    spec = replace(FOUR, granularity=granularity)
    weight = noise(2, 5, 40)
    inputs = noise(2, 200, 40) * torch.linspace(0.5, 2, 40)
    form = inputs.mT @ inputs / 200
    integers, scale = rounded(weight, form, spec)
    found = fitted(weight, form, integers, scale, spec).reshape(2, 5, -1)
    size = 16 if isinstance(granularity, PerBlock) else 40
    for group, row in np.ndindex(2, 5):
        blocks = [slice(start, start + size) for start in range(0, 40, size)]
        columns = [inputs[group][:, one] @ integers[group, row, one] for one in blocks]
        wanted = inputs[group] @ weight[group, row]
        solved = np.linalg.lstsq(
            torch.stack(columns, 1).double().numpy(), wanted.double().numpy(), rcond=None
        )
        np.testing.assert_allclose(found[group, row].numpy(), solved[0], rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_no_row_is_worse_with_fitted_scales(dtype: str) -> None:
    spec = replace(FOUR, dtype="int3", scale_dtype=dtype)
    weight, inputs = noise(1, 24, 70), noise(1, 300, 70)
    inputs = inputs * torch.linspace(0.05, 3, 70)
    form = inputs.mT @ inputs / 300
    integers, scale = rounded(weight, form, spec)
    after = fitted(weight, form, integers, scale, spec)

    def lost(scales: Tensor) -> Tensor:
        values = integers[0] * spec.granularity.spread(scales, weight[0].shape)
        return ((inputs[0] @ (weight[0] - values).mT) ** 2).mean(0)

    assert bool((lost(after) <= lost(scale) * (1 + 1e-5)).all())
    assert float(lost(after).mean()) < 0.98 * float(lost(scale).mean())


def test_one_scale_for_the_tensor_stays() -> None:
    weight, scale = noise(1, 4, 16), torch.tensor(0.1)
    spec = replace(FOUR, granularity=PerTensor())
    assert fitted(weight, torch.eye(16)[None], weight.round(), scale, spec) is scale
