"""Tests of float16 scales, and of scales that are 15-bit integers times powers of two, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.granularity import PerChannel
from qatkit.quant.observers import MinMaxObserver, MSEObserver, Observer
from qatkit.quant.scale_types import nearest, rounded_up
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

KINDS = ("float16", "int16")


def is_of(kind: str, scale: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns whether scales are exact in a type, by NumPy's float16 or by their 15 leading bits."""
    if kind == "float16":
        return np.asarray(scale.astype(np.float16).astype(np.float64) == scale)
    whole = np.frexp(scale.astype(np.float64))[0] * 2**15
    return np.asarray((whole == np.round(whole)) & (whole < 2**15))


def values() -> torch.Tensor:
    drawn = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    return torch.exp2(drawn * 30 - 20)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_the_nearest_and_the_next(kind: str) -> None:
    spec, given = QuantSpec("int8", scale_type=kind), values().clamp(2.0**-24, 65504.0)
    near, up = nearest(given, spec).double().numpy(), rounded_up(given, spec).double().numpy()
    exact = given.double().numpy()
    assert is_of(kind, near).all() and is_of(kind, up).all() and (up >= exact).all()
    if kind == "float16":
        np.testing.assert_array_equal(near, exact.astype(np.float16).astype(np.float64))
        below = np.nextafter(up.astype(np.float16), np.float16(0)).astype(np.float64)
        assert (below < exact).all()
    else:
        unit = 2.0 ** (np.floor(np.log2(exact)) - 14)
        assert (np.abs(near - exact) <= unit / 2).all() and (up - exact < unit).all()


def test_scales_beyond_float16_get_its_ends() -> None:
    found = nearest(torch.tensor([1e-12, 1e9]), QuantSpec("int8", scale_type="float16"))
    assert found.tolist() == [2.0**-24, 65504.0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("observer", [MinMaxObserver, MSEObserver])
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_is_kept_with_a_scale_of_the_type(
    kind: str, observer: type[Observer], symmetric: bool
) -> None:
    for seed in range(20):
        drawn = np.random.default_rng(seed)
        x = torch.from_numpy(
            (drawn.normal(size=4000) * drawn.uniform(0.1, 9) + drawn.uniform(-2, 2)).astype(np.float32)
        )
        found, plain = (
            FakeQuantize(QuantSpec("int8", symmetric=symmetric, scale_type=one), observer())
            for one in (kind, "float")
        )
        for one in (found, plain):
            assert one.observer is not None
            one.observer.update(x.min(), x.max(), x)
            one.finish()
            one.settle()
        scale = found.scale.double().numpy()
        assert is_of(kind, scale)
        np.testing.assert_allclose(scale, float(plain.scale), rtol=2.1 * 2.0**-10)
        assert abs(int(found.zero_point) - int(plain.zero_point)) <= 1
        if observer is MinMaxObserver:
            record = found.range_record()
            assert (
                float(record["low"]) <= float(x.min()) + scale
                and float(record["high"]) >= float(x.max()) - scale
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_weights_scale_is_the_better_neighbour(kind: str) -> None:
    weight = torch.randn(32, 9, generator=torch.Generator().manual_seed(0))
    found = WeightFakeQuantize(QuantSpec("int8", True, PerChannel(0), scale_type=kind), weight.shape).scale(
        weight
    )
    wanted = weight.abs().amax(1).double().numpy() / 127
    assert is_of(kind, found.double().numpy()).all()
    unit = np.exp2(np.floor(np.log2(wanted)) - (10 if kind == "float16" else 14))
    down = np.floor(wanted / unit) * unit
    rows = weight.double().numpy()
    errors = []
    for scale in (found.double().numpy(), down, down + unit):
        steps = np.clip(np.round(rows / scale[:, None]), -127, 127)
        errors.append(((steps * scale[:, None] - rows) ** 2).sum(1))
    assert (errors[0] <= np.minimum(errors[1], errors[2]) * (1 + 1e-5)).all()
