"""Tests of weights quantized in parts or by looked-up rows: values are those of the whole weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chain import noise

from qatkit.quant import weight_quantizer_state
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel, PerTensor
from qatkit.quant.qat_layers import QATEmbedding
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

GRANULARITIES = [PerTensor(), PerChannel(0), PerBlock(16)]


def quantizer(
    weight: torch.Tensor, granularity: Granularity, *, fixed: bool, dtype: str = "int4"
) -> WeightFakeQuantize:
    """Returns an enabled quantizer; `fixed` makes it round up instead of to the nearest."""
    fake = WeightFakeQuantize(QuantSpec(dtype, symmetric=True, granularity=granularity), weight.shape)
    if fixed:
        scale = fake.scale(weight)
        up = torch.ceil(weight / granularity.spread(scale, weight.shape))
        fake.fix(scale, weight, up.clamp(fake.spec.quant_min, fake.spec.quant_max))
    fake.set_phase(observe=False, quantize=True)
    return fake


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_pieces_of_a_weight_give_what_the_whole_gives(
    granularity: Granularity, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = noise(10, 48)
    whole = quantizer(weight, granularity, fixed=fixed)
    values, integers = whole(weight)[0], whole.integers(weight, None, torch.ones(())).weight
    monkeypatch.setattr(weight_quantizer_state, "_PIECE", 3 * 48)
    parts = quantizer(weight, granularity, fixed=fixed)
    assert len(parts.pieces(weight)) == (1 if granularity == PerTensor() else 4)
    made = torch.cat([parts.of_rows(rows)(weight[rows])[0] for rows in parts.pieces(weight)])
    assert torch.equal(made, values)
    assert torch.equal(parts.integers(weight, None, torch.ones(())).weight, integers)


@pytest.mark.parametrize(("dtype", "held"), [("int4", torch.int8), ("int8", torch.int16)])
def test_a_rounding_takes_a_byte_where_it_fits(dtype: str, held: torch.dtype) -> None:
    """The given integers are kept even at the largest possible distance from the weight."""
    weight = noise(4, 16)
    fake = quantizer(weight, PerChannel(0), fixed=False, dtype=dtype)
    scale = fake.scale(weight)
    low, high = fake.spec.quant_min, fake.spec.quant_max
    ends = torch.where(weight > 0, low, high).float()  # as far from the weight as possible
    fake.fix(scale, weight, ends)
    assert fake.rounding is not None and fake.rounding.dtype == held
    np.testing.assert_array_equal(fake.whole(weight).numpy(), ends.numpy())


def test_rows_that_are_looked_up_are_those_of_the_whole_table() -> None:
    """Without gradients, only the rows that are looked up are rounded; their values must be the same."""
    table = QATEmbedding(40, 32)
    table.weight_fake_quant = quantizer(table.weight.detach(), PerBlock(16), fixed=True)
    rows = torch.tensor([[3, 39, 3], [0, 7, 39]])
    trained = table(rows)
    with torch.no_grad():
        assert torch.equal(table(rows), trained)
