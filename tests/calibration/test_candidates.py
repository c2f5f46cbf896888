"""Tests of candidate ranges, ranked by the tensor's own error plus the output error of its readers."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from chain import Chain, noise, settle
from torch import Tensor, fx
from torch.nn import functional as F

from qatkit.calibration import calibrate
from qatkit.calibration.candidates import METHODS, apply, best_of_each, candidates, output_errors
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM
from qatkit.quant.observers import MSEObserver
from qatkit.quant.qat_layers import QATConv2d
from qatkit.quant.weight_fake_quantize import Quantizers


def chain() -> tuple[fx.GraphModule, Tensor]:
    """Returns a net of three convolutions, calibrated on one batch, and this batch."""
    torch.manual_seed(0)
    model, x = settle(Chain(), 3, 12, 12), noise(8, 3, 12, 12)
    graph = prepare_qat(
        stub(fuse(model, x[:2]).graph, x[:2]).graph,
        FBGEMM,
        x[:2],
        quantizers=Quantizers(observer=MSEObserver),
    ).graph.eval()
    calibrate(graph, [x])
    return graph, x


def quantized(x: Tensor, low: float, high: float) -> Tensor:
    """Quantizes to uint8 and back, in NumPy."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255)
    zero = np.clip(np.round(-low / scale), 0, 255)
    q = np.clip(np.round(x.numpy() / scale) + zero, 0, 255)
    return torch.from_numpy(((q - zero) * scale).astype(np.float32))


@pytest.mark.parametrize("method", ["min-max", "percentile 99.9", "entropy", "distribution"])
def test_error_adds_the_next_output_error_and_that_of_all_values(method: str) -> None:
    graph, x = chain()
    offered = candidates(graph)
    found = output_errors(graph, offered, [x])[method]["input"]
    conv = cast(QATConv2d, graph.get_submodule("conv1"))
    weight, _ = conv.effective()

    def run(v: Tensor) -> Tensor:
        return F.conv2d(v, weight, None, conv.stride, conv.padding)

    error = quantized(x, *offered[method]["input"]) - x
    with torch.no_grad():
        behind = float(run(error).square().sum() / run(x).square().sum())
    of_all = float(error.square().sum() / x.square().sum())
    assert found == pytest.approx(behind + of_all, rel=0.02)


def test_the_mix_takes_each_tensors_best_and_its_scales_follow() -> None:
    graph, x = chain()
    offered = candidates(graph)
    errors = output_errors(graph, offered, [x])
    mixed = best_of_each(offered, errors)
    for name, ends in mixed.items():
        least = min(errors[title][name] for title in METHODS)
        assert [t for t in METHODS if offered[t][name] == ends and errors[t][name] == least]
    apply(graph, mixed)
    for name, quantizer in fake_quantizers(graph).items():
        low, high = (min(mixed[name][0], 0.0), max(mixed[name][1], 0.0))
        assert (high - low) / 255 <= float(quantizer.scale) * (1 + 1e-6) <= 1.031 * (high - low) / 255
    assert all(q.enabled and not q.observing for q in fake_quantizers(graph).values())
