"""Tests of calibration: ranges are those of the float activations, and NaN and infinity are reported."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from chain import Chain, Mlp, Residual, noise, prepared, settle
from torch import Tensor, fx, nn

from qatkit.calibration import calibrate
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.stub import stub
from qatkit.quant import numerics
from qatkit.quant.backends import FBGEMM
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import (
    DistributionObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    PercentileObserver,
)
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit_verify.errors import ConfigError


def _batches() -> list[Tensor]:
    return [noise(4, 3, 12, 12, seed=i) * (1 + i) for i in range(3)]


def _residual(
    observer: type[MinMaxObserver] | type[MovingAverageMinMaxObserver],
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = settle(Residual(), 3, 12, 12)
    return model, prepare_qat(
        stub(fuse(model, noise(2, 3, 12, 12)).graph, noise(2, 3, 12, 12)).graph,
        FBGEMM,
        noise(2, 3, 12, 12),
        quantizers=Quantizers(observer=observer),
    ).graph


# Maps each FakeQuantize to whether a ReLU lies between the float module and it.
SITES = {"stem": True, "conv1": True, "conv2": False, "avgpool": False}


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_ranges_are_those_of_hooks_on_the_float_model(
    observer: type[MinMaxObserver] | type[MovingAverageMinMaxObserver],
) -> None:
    model, graph = _residual(observer)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in SITES}
    watched = {"stem": "stem", "conv1": "bn1", "conv2": "bn2", "avgpool": "avgpool"}
    for name, path in watched.items():

        def keep(_: nn.Module, __: object, out: Tensor, name: str = name) -> None:
            out = torch.relu(out) if SITES[name] else out
            seen[name].append((float(out.min()), float(out.max())))

        model.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        for batch in _batches():
            model(batch)
    assert calibrate(graph, _batches()) == 12  # type: ignore[arg-type]
    quantizers = fake_quantizers(graph)  # type: ignore[arg-type]
    for name, ends in seen.items():
        columns = list(zip(*ends, strict=True))
        if observer is MinMaxObserver:
            low, high = min(columns[0]), max(columns[1])
        else:  # each of the three batches has a weight of 1/3
            low, high = (sum(c) / 3 for c in columns)
        quantizer = quantizers[name]
        assert quantizer.observer is not None
        assert float(quantizer.observer.low) == pytest.approx(low, rel=1e-4, abs=1e-5)
        assert float(quantizer.observer.high) == pytest.approx(high, rel=1e-4)
        scale, zero_point = numerics.choose_qparams(
            quantizer.observer.low, quantizer.observer.high, FBGEMM.activation
        )
        assert quantizer.zero_point == zero_point
        assert 1 - 1e-6 <= float(quantizer.scale / scale) < 1.03  # moved up by alignment


def test_the_range_does_not_depend_on_how_images_are_batched() -> None:
    ends = []
    for size in (1, 4, 12):
        _, graph = _residual(MinMaxObserver)
        images = torch.cat(_batches())
        assert calibrate(graph, images.split(size)) == 12  # type: ignore[arg-type]
        ends.append(torch.stack([q.scale for q in fake_quantizers(graph).values()]))  # type: ignore[arg-type]
    assert torch.allclose(ends[0], ends[1], rtol=1e-5) and torch.allclose(ends[0], ends[2], rtol=1e-5)


def test_afterwards_everything_quantizes_and_nothing_observes() -> None:
    graph = prepared(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12)).train()
    calibrate(graph, _batches())
    assert graph.training  # as it was
    fakes = [m for m in graph.modules() if isinstance(m, FakeQuantize)]
    assert fakes and all(m.enabled and not m.observing for m in fakes)
    assert all(m.enabled for m in graph.modules() if isinstance(m, WeightFakeQuantize))


def test_batchnorm_statistics_are_not_touched() -> None:
    graph = prepared(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12), batch_norm="train").train()
    before = graph.get_buffer("conv1.bn.running_mean").clone()
    calibrate(graph, _batches())
    assert torch.equal(graph.get_buffer("conv1.bn.running_mean"), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_image_is_told_as_the_input(bad: float) -> None:
    graph = prepared(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12))
    images = noise(4, 3, 12, 12)
    images[2, 1, 3, 3] = bad
    with pytest.raises(ConfigError, match="calibration=input: the tensor contains NaN or infinity"):
        calibrate(graph, [noise(4, 3, 12, 12), images])


def test_the_first_bad_site_in_graph_order_is_told() -> None:
    model = settle(Chain(), 3, 12, 12)
    graph = prepared(model, noise(2, 3, 12, 12))
    with torch.no_grad():
        graph.get_parameter("conv2.bias")[0] = float("nan")
    with pytest.raises(ConfigError, match="calibration=conv2: the tensor contains NaN or infinity") as caught:
        calibrate(graph, _batches())
    assert "\n" not in str(caught.value)


def test_no_images_are_refused() -> None:
    graph = prepared(Mlp().eval(), noise(2, 12))
    with pytest.raises(ConfigError, match=r"calibration.images=0"):
        calibrate(graph, [])


class Sometimes(nn.Module):
    """A head whose batches may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(x))


def test_empty_batches_observe_nothing_and_unseen_ones_are_named() -> None:
    graph = prepared(Sometimes(), torch.randn(2, 4))
    seen = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    calibrate(graph, [torch.zeros(0, 4), seen])
    (quantizer,) = fake_quantizers(graph).values()
    assert quantizer.observer is not None
    assert (quantizer.observer.low.item(), quantizer.observer.high.item()) == (-2.0, 3.0)
    fresh = prepared(Sometimes(), torch.randn(2, 4))
    with pytest.raises(
        ConfigError, match="calibration=input: the quantizer has seen no values; use calibration data"
    ):
        calibrate(fresh, [torch.zeros(0, 4)])


@pytest.mark.parametrize(
    "observer",
    [MinMaxObserver, MovingAverageMinMaxObserver, MSEObserver, PercentileObserver, DistributionObserver],
)
def test_large_images_go_through_in_parts_and_count_as_one_batch(
    observer: type[MinMaxObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, divided = (cast("fx.GraphModule", _residual(observer)[1]) for _ in range(2))
    calls: list[int] = []
    divided.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    assert calibrate(whole, _batches()) == 12
    monkeypatch.setattr("qatkit.calibration.observe._VALUES", 3 * 3 * 12 * 12)
    assert calibrate(divided, _batches()) == 12
    assert calls == [3, 1] * 3
    for a, b in zip(fake_quantizers(whole).values(), fake_quantizers(divided).values(), strict=True):
        torch.testing.assert_close(a.scale, b.scale, rtol=1e-5, atol=0)
        assert torch.equal(a.zero_point, b.zero_point)
