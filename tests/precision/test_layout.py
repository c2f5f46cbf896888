"""What is quantized where a set of operators is float: by placement alone, against modules that were prepared."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from qatkit.analysis.records import ACTIVATION, ONLY, SensitivityRow
from qatkit.analysis.switches import switches
from qatkit.backends import FBGEMM
from qatkit.config.schema import OverrideConfig
from qatkit.module import QATModule
from qatkit.precision.layout import Layouts, Losses


class Residual(nn.Module):
    """A stem with a pool, a block with a shortcut and one of a transformer's kind, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.pool = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(x + self.conv2(torch.relu(self.conv1(x))))
        x = x.flatten(2).transpose(1, 2).mean(1)
        return cast(Tensor, self.head(nn.functional.gelu(self.up(self.norm(x)))))


EXAMPLE = torch.randn(2, 3, 12, 12)
OPERATORS = ("stem", "conv1", "conv2", "up", "head")


@pytest.fixture(scope="module")
def int8() -> QATModule:
    return QATModule(Residual(), EXAMPLE)


@pytest.fixture(scope="module")
def layouts(int8: QATModule) -> Layouts:
    return Layouts(int8.opened(Residual()).graph, FBGEMM)


def of(floats: tuple[str, ...]) -> QATModule:
    return QATModule(Residual(), EXAMPLE, overrides={one: OverrideConfig(float=True) for one in floats})


def subsets(least: int = 0) -> list[tuple[str, ...]]:
    return [one for n in range(least, 5) for one in itertools.combinations(OPERATORS, n)]


def test_the_operators_are_those_with_a_weight(layouts: Layouts) -> None:
    assert layouts.operators == OPERATORS


@pytest.mark.parametrize("floats", subsets())
def test_a_layout_has_what_the_prepared_module_has(layouts: Layouts, floats: tuple[str, ...]) -> None:
    """All 31 sets that leave something in int8."""
    real = switches(of(floats).graph)
    layout = layouts(floats)
    tensors = {s.site for s in real if s.kind == ACTIVATION}
    assert set(layout.weights) == {s.site for s in real if s.kind != ACTIVATION}
    assert set(layout.tensors) == tensors and len(layout.tensors) == len(tensors)
    assert layout.floats == frozenset(floats)


def test_losses_add_up_over_what_is_left(int8: QATModule, layouts: Layouts) -> None:
    """Every switch loses a power of two, so that a sum says which ones it has."""
    sites = switches(int8.graph)
    rows = [
        SensitivityRow(s.site, s.kind, ONLY, None, float(2**i), None, exact=False)
        for i, s in enumerate(sites)
    ]
    losses, known = Losses(layouts, rows), {(row.site, row.kind): row.loss for row in rows}
    for floats in subsets():
        left = switches(of(floats).graph)
        if all((s.site, s.kind) in known for s in left):
            assert losses(layouts(floats)) == sum(known[s.site, s.kind] for s in left)
    assert losses(layouts(())) == 2 ** len(rows) - 1
    assert losses(layouts(OPERATORS)) == 0
    assert losses.of_operator("conv2") == sum(row.loss for row in rows if row.site == "conv2")


def test_a_tensor_that_is_quantized_in_a_mixture_alone_loses_what_its_source_does(layouts: Layouts) -> None:
    """A float stem and its float pool: what is quantized is the pool's output, in int8 the stem's."""
    assert "pool" in layouts(("stem",)).tensors and "pool" not in layouts(()).tensors
    rows = [SensitivityRow("stem", ACTIVATION, ONLY, None, 3.0, None, exact=False)]
    known = {row.site for row in rows}
    assert layouts.source("pool", known) == "stem" and layouts.source("input", known) is None
    rows += [SensitivityRow(one, ACTIVATION, ONLY, None, 0.0, None, exact=False) for one in OPERATORS[1:]]
    rows += [
        SensitivityRow(one, ACTIVATION, ONLY, None, 0.0, None, exact=False) for one in ("norm", "gelu", "add")
    ]
    assert Losses(layouts, rows)(layouts(("stem",))) == 3.0  # of the pool's output, and of no other tensor


def test_borders_are_where_a_type_changes(layouts: Layouts) -> None:
    """By hand. An image has 3*12*12 values, the stem's output 8*10*10, from the pool on 8*5*5, at the end 8 and 16."""
    image, small = 3 * 12 * 12, 8 * 5 * 5
    int8 = layouts(())
    assert image in int8.quantized and small not in int8.quantized  # inside, int8 follows int8
    alone = layouts(("conv1",))
    assert sorted(alone.quantized) == sorted([*int8.quantized, small])  # its output, for conv2
    assert len(alone.dequantized) == len(int8.dequantized) + 1  # its input
    assert layouts(OPERATORS).quantized == layouts(OPERATORS).dequantized == ()
