"""Tests of simulated losses against modules with the same float operators and ranges."""

from __future__ import annotations

import pytest
import torch
from residual import OPERATORS, Residual, of, subsets
from torch import Tensor

from qatkit.choose.precision.layout import Layouts
from qatkit.choose.precision.simulate import simulated_losses
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.transplant import transplant
from qatkit.quant.backends import FBGEMM
from qatkit.train.module import QATModule

IMAGES = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(1))
BATCHES = [(part, torch.zeros(16)) for part in IMAGES.split(16)]


def outputs(module: QATModule, *, quantize: bool) -> Tensor:
    with inference(module.graph):
        set_phase(module.graph, observe=False, quantize=quantize)
        return torch.cat([module.graph(images) for images, _ in BATCHES]).double()


@pytest.fixture(scope="module")
def int8() -> QATModule:
    module = of(())
    module.calibrate([images for images, _ in BATCHES])
    return module


def test_a_set_loses_what_its_module_does(int8: QATModule) -> None:
    layouts, exact, sets = (
        Layouts(int8.opened(Residual()).graph, FBGEMM),
        outputs(int8, quantize=False),
        subsets(),
    )
    found = simulated_losses(int8.graph, layouts, [layouts(one) for one in sets], BATCHES)
    compared = 0
    for floats, loss in zip(sets, found, strict=True):
        module = of(floats)
        if not transplant(int8.graph, module.graph):  # otherwise it has a range that was never calibrated
            wanted = float((outputs(module, quantize=True) - exact).square().sum(1).mean())
            assert loss == pytest.approx(wanted, rel=1e-5)
            compared += 1
    assert compared >= len(sets) // 2 and len(set(found)) == len(sets)
    assert int8.graph.get_submodule("conv1").weight_fake_quant.enabled  # type: ignore[union-attr]


def test_a_tensor_behind_a_float_pool_has_the_values_before_it(int8: QATModule) -> None:
    """A pool after a float stem only selects values, so that its output gets the range of the stem."""
    layouts, exact = Layouts(int8.opened(Residual()).graph, FBGEMM), outputs(int8, quantize=False)
    module, state = of(("stem",)), int8.state_dict()
    new = transplant(int8.graph, module.graph)
    assert new == ["pool_quant"]
    module.load_state_dict(
        {
            key: state[key.replace("pool_quant", "stem_quant")]
            for key in module.state_dict()
            if "pool_quant" in key
        },
        strict=False,
    )
    wanted = float((outputs(module, quantize=True) - exact).square().sum(1).mean())
    (found,) = simulated_losses(int8.graph, layouts, [layouts(("stem",))], BATCHES)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_nothing_is_lost_where_all_is_float(int8: QATModule) -> None:
    layouts = Layouts(int8.opened(Residual()).graph, FBGEMM)
    assert simulated_losses(int8.graph, layouts, [layouts(OPERATORS)], BATCHES) == [0.0]
