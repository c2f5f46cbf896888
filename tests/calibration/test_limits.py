"""Tests of range limits: a range ends where the function that reads it is flat, so its steps are finer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qatkit import QATModule
from qatkit.config.schema import OverrideConfig
from qatkit.graph.quantizers import fake_quantizers

FUNCTIONS = {
    "silu": (nn.SiLU, -5.0),
    "gelu": (nn.GELU, -2.3),
    "sigmoid": (nn.Sigmoid, -6.0),
    "hardsigmoid": (nn.Hardsigmoid, -2.9),
}


def _net(function: Callable[[], nn.Module], low: float = -60.0) -> nn.Sequential:
    """Returns a Conv with outputs from `low` to 20, a function, and a second Conv."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), function(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        y = net[0](_images())
        factor = (20 - low) / (y.amax() - y.amin())
        net[0].weight *= factor
        net[0].bias *= factor
        net[0].bias += low - factor * y.amin()
    return net


def _images() -> Tensor:
    return torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def _calibrated(net: nn.Module) -> QATModule:
    module = QATModule(net, _images()[:2])
    module.calibrate([_images()])
    return module


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_range_ends_where_the_function_is_flat(name: str) -> None:
    function, flat = FUNCTIONS[name]
    net = _net(function)
    quantizers = list(fake_quantizers(_calibrated(net).graph).values())
    record = quantizers[1].range_record()
    y = net[1](net[0](_images())).detach()
    step = float(quantizers[-2].scale)
    low = torch.linspace(-60, float(record["low"]), 1000)
    assert -12 < float(record["low"]) < flat
    assert (net[1](low) - net[1](low[-1])).abs().max() <= step / 2
    assert float(y.amax()) <= float(quantizers[-2].range_record()["high"]) + step


def test_a_function_that_goes_on_at_both_ends_has_none() -> None:
    quantizers = list(fake_quantizers(_calibrated(_net(lambda: nn.LeakyReLU(0.1))).graph).values())
    assert all(one.range_limits is None for one in quantizers)


def test_a_flat_place_with_another_value_behind_it_is_no_end() -> None:
    net = _net(nn.SiLU, low=-1.3)  # ends near SiLU's minimum, which training may pass
    quantizers = list(fake_quantizers(_calibrated(net).graph).values())
    assert quantizers[1].range_limits is None


def test_a_second_reader_that_needs_the_values_keeps_them() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = _net(nn.SiLU)
            self.first, self.silu, self.last = net[0], net[1], net[2]

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(self.silu(y)) + self.last(y)  # type: ignore[no-any-return]

    quantizers = list(fake_quantizers(_calibrated(Both().eval()).graph).values())
    assert quantizers[1].range_limits is None
    assert quantizers[1].range_record()["low"] == pytest.approx(-60, abs=1)


def test_simulation_is_closer_to_float_by_half() -> None:
    net, images = _net(nn.SiLU, low=-400.0), _images()
    module = _calibrated(net)
    exact = net(images)

    def error() -> float:
        with torch.no_grad():
            return float((module.graph.eval()(images) - exact).square().mean())

    limited = error()
    for quantizer in fake_quantizers(module.graph).values():
        quantizer.range_limits = None
        quantizer.settle()
    assert limited < error() / 2


def test_a_float_result_keeps_the_whole_range() -> None:
    net = _net(nn.Sigmoid)[:2]  # a reader of the float output may take its logarithm
    module = QATModule(net, _images()[:2], overrides={"1": OverrideConfig(float=True)})
    module.calibrate([_images()])
    quantizers = list(fake_quantizers(module.graph).values())
    assert [one.range_limits for one in quantizers] == [None, None]


def test_limits_are_part_of_a_checkpoint_and_hold_in_training() -> None:
    net = _net(nn.SiLU)
    module, other = _calibrated(net), QATModule(net, _images()[:2])
    other.graph.load_state_dict(module.graph.state_dict())
    for graph in (module.graph, other.graph):
        graph.train()
        for quantizer in fake_quantizers(graph).values():
            quantizer.set_phase(observe=True, quantize=True)
        graph(_images())
    first, second = (
        [float(one.range_record()["low"]) for one in fake_quantizers(graph).values()]
        for graph in (module.graph, other.graph)
    )
    assert first == pytest.approx(second, rel=0.01)
    assert first[1] > -12
