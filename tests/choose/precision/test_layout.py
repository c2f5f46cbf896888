"""Tests of layouts (what is quantized when a set of operators is float) against prepared modules."""

from __future__ import annotations

import pytest
from residual import EXAMPLE, OPERATORS, Residual, of, subsets

from qatkit.analysis.switches import switches
from qatkit.choose.precision.layout import Layouts, Losses
from qatkit.graph.nodes import site
from qatkit.quant.backends import FBGEMM
from qatkit.records.analysis import ACTIVATION, ONLY, SensitivityRow
from qatkit.train.module import QATModule


@pytest.fixture(scope="module")
def int8() -> QATModule:
    return QATModule(Residual(), EXAMPLE)


@pytest.fixture(scope="module")
def layouts(int8: QATModule) -> Layouts:
    return Layouts(int8.opened(Residual()).graph, FBGEMM)


def test_the_operators_are_those_with_a_weight(layouts: Layouts) -> None:
    assert layouts.operators == OPERATORS


@pytest.mark.parametrize("floats", subsets())
def test_a_layout_has_what_the_prepared_module_has(layouts: Layouts, floats: tuple[str, ...]) -> None:
    """Checks all sets that leave something in int8; a residual stream may be read in both types."""
    real = switches(of(floats).graph)
    layout = layouts(floats)
    tensors = {s.site for s in real if s.kind == ACTIVATION}
    assert set(layout.weights) == {s.site for s in real if s.kind != ACTIVATION}
    assert set(layout.readers) == tensors
    users = {s.site: {site(user) for user in s.node.users} for s in real if s.kind == ACTIVATION}
    assert layout.readers == users
    assert layout.floats == frozenset(floats)


def test_losses_add_up_over_what_is_left(int8: QATModule, layouts: Layouts) -> None:
    """Each tensor's quantization loses a different power of two, so that a sum shows which ones it includes."""
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


def test_a_tensor_quantized_only_when_mixed_loses_as_its_source(layouts: Layouts) -> None:
    """After a float stem, the pool's output is quantized; with everything in int8, the stem's output is."""
    assert "pool" in layouts(("stem",)).readers and "pool" not in layouts(()).readers
    rows = [SensitivityRow("stem", ACTIVATION, ONLY, None, 3.0, None, exact=False)]
    known = {row.site for row in rows}
    assert layouts.way_back("pool", known)[:: len(layouts.way_back("pool", known)) - 1] == ("pool", "stem")
    assert layouts.way_back("input", known) == () and layouts.way_back("stem", known) == ("stem",)
    rows += [SensitivityRow(one, ACTIVATION, ONLY, None, 0.0, None, exact=False) for one in OPERATORS[1:]]
    rows += [
        SensitivityRow(one, ACTIVATION, ONLY, None, 0.0, None, exact=False) for one in ("norm", "gelu", "add")
    ]
    assert Losses(layouts, rows)(layouts(("stem",))) == 3.0  # only the pool's output loses


def test_borders_are_where_a_type_changes(layouts: Layouts) -> None:
    """Sizes: an image has 3*12*12 values, the stem's output 8*10*10, the pool's 8*5*5, later ones 8 or 16."""
    image, small = 3 * 12 * 12, 8 * 5 * 5
    int8 = layouts(())
    assert image in int8.quantized and small not in int8.quantized  # inside, int8 follows int8
    alone = layouts(("conv1",))
    assert sorted(alone.quantized) == sorted([*int8.quantized, small])  # its output, for conv2
    assert len(alone.dequantized) == len(int8.dequantized) + 1  # its input
    assert layouts(OPERATORS).quantized == layouts(OPERATORS).dequantized == ()
