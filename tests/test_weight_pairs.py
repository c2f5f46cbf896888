"""Tests of weights guarded by `QuantSpec.pairs`: sums of two products with uint8 cannot exceed 16 bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.quant import numerics
from qatkit.quant.granularity import PerChannel, along, granularity_of
from qatkit.quant.pairs import fitted, least_scale
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

SHAPES = [
    (8, 6),
    (8, 7),
    (8, 4, 3, 3),
    (8, 3, 3, 3),
    (8, 1, 5, 5),
    (6, 5, 2, 3, 3),
    (8, 3, 1, 1),
    (8, 3, 7),
    (8, 1),
]
SPEC = QuantSpec("int8", symmetric=True, granularity=PerChannel(0), pairs=True)


def by_hand(weight: NDArray[np.float64], *, across: bool) -> list[float]:
    """Returns the pair sums of a row [channels, positions] in channels-last order.

    `across` lets pairs span two positions.
    """
    channels, positions = weight.shape
    rows = [[weight[c, p] for c in range(channels)] for p in range(positions)]
    runs = [list(itertools.chain(*rows))] if across else rows
    sums = []
    for run in runs:
        even = run + [0.0] * (len(run) % 2)
        sums += [even[i] + even[i + 1] for i in range(0, len(even), 2)]
    return sums


def saturates(integers: Tensor) -> bool:
    """Returns whether the sum of two products can overflow 16 bits; it suffices to try activations of 0 and 255."""
    for row in integers.reshape(len(integers), integers.shape[1], -1).double().numpy():
        for across in (False, True):
            flat = row.T.reshape(1, -1) if across else row.T
            padded = np.pad(flat, [(0, 0), (0, flat.shape[1] % 2)]).reshape(-1, 2)
            for pair in padded:
                products = [pair @ ends for ends in itertools.product((0, 255), repeat=2)]
                if max(products) > 2**15 - 1 or min(products) < -(2**15):
                    return True
    return False


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_least_scale_is_of_the_largest_sum_of_neighbours(shape: tuple[int, ...]) -> None:
    weight = drawn(shape)
    rows = weight.double().reshape(shape[0], shape[1], -1).numpy()
    largest = [max(abs(s) for across in (False, True) for s in by_hand(row, across=across)) for row in rows]
    np.testing.assert_allclose(least_scale(weight, per_channel=True), np.array(largest) / 127.99, rtol=1e-6)
    np.testing.assert_allclose(least_scale(weight, per_channel=False), max(largest) / 127.99, rtol=1e-6)


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_rounding_of_a_guarded_weight_saturates(shape: tuple[int, ...], granularity: str) -> None:
    """Covers rounding to nearest and by an algorithm, a fixed scale, clipping, and a weight changed later."""
    weight = drawn(shape)
    spec = QuantSpec("int8", symmetric=True, granularity=granularity_of(granularity), pairs=True)
    scale = numerics.weight_scale(weight, spec)
    plain = WeightFakeQuantize(spec, shape)
    up, small, clipped, moved = (WeightFakeQuantize(spec, shape) for _ in range(4))
    up.fix(scale, weight, torch.floor(weight / along(scale, 0, weight.ndim)) + 1)
    small.fix(scale / 2)
    clipped.clip_to_least_error(weight)
    moved.fix(scale)
    cases = [
        (plain, weight),
        (up, weight),
        (small, weight),
        (clipped, weight),
        (moved, 3 * drawn(shape, seed=1)),
    ]
    for quantizer, given in cases:
        quantizer.enabled = True
        integers = quantizer.whole(given)
        assert not saturates(integers)
        column = along(quantizer.scale(given), 0, given.ndim)
        torch.testing.assert_close(quantizer(given)[0], integers * column)
        torch.testing.assert_close(quantizer.integers(given, None, torch.ones(())).weight.float(), integers)


@pytest.mark.parametrize("shape", SHAPES)
def test_fitted_pairs_are_the_nearest(shape: tuple[int, ...]) -> None:
    """A changed pair is compared with all pairs at the limit; a pair that fits must stay unchanged."""
    steps = 90 * drawn(shape).clamp(-1.4, 1.4)
    whole = torch.round(steps).clamp(-127, 127)
    found = fitted(whole, steps)
    assert not saturates(found)
    assert bool((found.abs() <= whole.abs()).all())
    if len(shape) == 2 and shape[1] % 2 == 0:
        pairs, wanted = found.reshape(-1, 2), steps.reshape(-1, 2)
        for (a, b), (x, y), before in zip(
            pairs.tolist(), wanted.tolist(), whole.reshape(-1, 2).tolist(), strict=True
        ):
            if abs(sum(before)) <= 128:
                assert [a, b] == before
                continue
            sign = 1 if before[0] > 0 else -1
            options = [(sign * k, sign * (128 - k)) for k in range(1, 128)]
            least = min((x - p) ** 2 + (y - q) ** 2 for p, q in options)
            assert (x - a) ** 2 + (y - b) ** 2 == pytest.approx(least)


def test_every_pair_overflows_and_none_does_guarded() -> None:
    """Equal weights all become 127 in plain 8 bits, so that each pair saturates; guarded, they become 64."""
    weight = torch.ones(4, 6, 3, 3)
    plain = WeightFakeQuantize(QuantSpec("int8", symmetric=True, granularity=PerChannel(0)), weight.shape)
    assert saturates(plain.whole(weight))
    guarded = WeightFakeQuantize(SPEC, weight.shape)
    assert set(guarded.whole(weight).unique().tolist()) == {64}


@pytest.mark.parametrize("dtype", ["int4", "int3", "int2"])
def test_few_bits_need_no_guard(dtype: str) -> None:
    spec = QuantSpec(dtype, symmetric=True, granularity=PerChannel(0), pairs=True)
    assert not spec.guards_pairs
    weight = drawn((4, 6))
    plain = QuantSpec(dtype, symmetric=True, granularity=PerChannel(0))
    assert torch.equal(numerics.weight_scale(weight, spec), numerics.weight_scale(weight, plain))


def test_a_weight_of_opposite_signs_keeps_its_scale() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, -0.9], [1.0, 0.2, 0.0, -1.0]])
    plain = QuantSpec("int8", symmetric=True, granularity=PerChannel(0))
    guarded, own = (numerics.weight_scale(weight, spec) for spec in (SPEC, plain))
    assert guarded[0] == own[0]
    assert guarded[1] == pytest.approx(1.2 / 127.99)
