"""Tests of observers with a histogram: independent of batch order, fixed once calibration ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from chain import Chain, noise, settle
from torch import fx

from qatkit.calibration import calibrate
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.backends import FBGEMM
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import (
    DistributionObserver,
    EntropyObserver,
    Histogram,
    HistogramObserver,
    Method,
    MinMaxObserver,
    MSEObserver,
    PercentileObserver,
)
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit_verify.errors import ConfigError

KINDS = [PercentileObserver, EntropyObserver, MSEObserver, DistributionObserver]
BATCHES = [noise(4, 3, 12, 12, seed=i) * (1 + i) for i in range(4)]


def prepared(kind: type[HistogramObserver] | type[MinMaxObserver]) -> fx.GraphModule:
    torch.manual_seed(0)
    return prepare_qat(
        fuse(settle(Chain(), 3, 12, 12), BATCHES[0]).graph,
        FBGEMM,
        noise(2, 3, 12, 12),
        quantizers=Quantizers(observer=kind),
    ).graph


def ends(graph: fx.GraphModule) -> list[tuple[float, float]]:
    observers = [q.observer for q in fake_quantizers(graph).values()]
    return [(o.low.item(), o.high.item()) for o in observers if o is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_lie_within_min_max_whatever_the_batch_order(kind: type[HistogramObserver]) -> None:
    forward, backward, widest = prepared(kind), prepared(kind), prepared(MinMaxObserver)
    calibrate(forward, BATCHES)
    calibrate(backward, BATCHES[::-1])
    calibrate(widest, BATCHES)
    assert ends(forward) == ends(backward)
    for (low, high), (least, most) in zip(ends(forward), ends(widest), strict=True):
        assert least <= low <= high <= most
    assert ends(forward) != ends(widest)


def test_the_range_is_chosen_once_when_calibration_ends() -> None:
    calls = []

    @dataclass(frozen=True)
    class Counted(Method):
        def range_of(self, histogram: Histogram, spec: QuantSpec) -> tuple[float, float]:
            calls.append(spec)
            return -1.0, 2.0

    torch.manual_seed(0)
    fused = fuse(settle(Chain(), 3, 12, 12), BATCHES[0]).graph
    example = noise(2, 3, 12, 12)
    graph = prepare_qat(
        fused, FBGEMM, example, quantizers=Quantizers(observer=lambda: HistogramObserver(Counted()))
    ).graph
    calibrate(graph, BATCHES)
    assert calls == [FBGEMM.activation] * 4
    assert ends(graph) == [(-1.0, 2.0)] * 4


def test_an_absorbed_relu_is_applied_to_what_is_counted() -> None:
    quantizer = FakeQuantize(QuantSpec(), PercentileObserver(90.0), (0.0, None))
    x = noise(10_000)
    quantizer.observe(x)
    quantizer.finish()
    assert isinstance(quantizer.observer, HistogramObserver)
    width = quantizer.observer.histogram.width
    assert quantizer.observer.low == 0
    assert quantizer.observer.high.item() == pytest.approx(x.relu().quantile(0.9).item(), abs=width)


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_leaves_the_ranges_where_they_are(kind: type[HistogramObserver]) -> None:
    graph = prepared(kind)
    calibrate(graph, BATCHES)
    before = ends(graph), [q.scale.item() for q in fake_quantizers(graph).values()]
    set_phase(graph, observe=True, quantize=True)
    graph(BATCHES[0] * 100)
    assert (ends(graph), [q.scale.item() for q in fake_quantizers(graph).values()]) == before


def test_the_chosen_range_and_histogram_are_in_the_state_dict() -> None:
    first, second = prepared(PercentileObserver), prepared(PercentileObserver)
    calibrate(first, BATCHES)
    second.load_state_dict(first.state_dict())
    assert ends(second) == ends(first)
    for a, b in zip(fake_quantizers(first).values(), fake_quantizers(second).values(), strict=True):
        assert isinstance(a.observer, HistogramObserver) and isinstance(b.observer, HistogramObserver)
        assert torch.equal(a.observer.histogram.counts, b.observer.histogram.counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_value_is_told_by_site(kind: type[HistogramObserver]) -> None:
    graph = prepared(kind)
    with torch.no_grad():
        graph.get_parameter("conv2.bias")[0] = float("nan")
    with pytest.raises(ConfigError, match="calibration=conv2: the tensor contains NaN or infinity"):
        calibrate(graph, BATCHES)
