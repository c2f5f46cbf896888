"""Tests of power-of-two scales of activations against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import MinMaxObserver, MSEObserver, Observer, PercentileObserver
from qatkit.quant.spec import QuantSpec


def quantizer(observer: Observer, x: torch.Tensor, *, symmetric: bool = False) -> FakeQuantize:
    found = FakeQuantize(QuantSpec("int8", symmetric=symmetric, scale_type="pow2"), observer)
    observer.update(x.min(), x.max(), x)
    found.finish()
    found.settle()
    return found


def error(x: np.ndarray, scale: float, zero: int) -> float:
    q = np.clip(np.round(x / scale), -128 - zero, 127 - zero)
    return float(((q * scale - x) ** 2).mean())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_exponent_has_a_smaller_error_than_the_chosen(seed: int, symmetric: bool) -> None:
    """NumPy tries every fourth zero_point on the exact values; the histogram may be off by a bin."""
    drawn = np.random.default_rng(seed)
    x = (drawn.standard_t(4, 40_000) * drawn.uniform(0.2, 5) + drawn.uniform(-1, 1)).astype(np.float32)
    for observer in (MSEObserver(), PercentileObserver()):
        found = quantizer(observer, torch.from_numpy(x), symmetric=symmetric)
        assert np.frexp(float(found.scale))[0] == 0.5
        zeros = [0] if symmetric else range(-128, 128, 4)
        least = min(error(x, 2.0**e, zero) for e in range(-9, 3) for zero in zeros)
        chosen = error(x, float(found.scale), int(found.zero_point))
        assert chosen <= 1.15 * least


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_without_a_histogram_clips_nothing(symmetric: bool) -> None:
    for factor in np.linspace(0.9, 2.2, 40):
        x = torch.tensor([-0.7, 1.0]) * factor
        found = quantizer(MinMaxObserver(), x, symmetric=symmetric)
        record = found.range_record()
        half = float(found.scale) / 2
        assert np.frexp(float(found.scale))[0] == 0.5 and int(found.zero_point) % 2 == 0
        assert float(record["low"]) <= float(x[0]) + half and float(record["high"]) >= float(x[1]) - half
        assert float(x[1] - x[0]) > 254 * half or symmetric  # the next smaller scale would clip


def test_a_sigmoid_has_256_steps_between_0_and_1() -> None:
    found = FakeQuantize(QuantSpec("uint8", scale_type="pow2"), None, (0.0, 1.0))
    assert (float(found.scale), int(found.zero_point)) == (2.0**-8, 0)
