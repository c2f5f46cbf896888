"""Tests of ranges from a histogram against NumPy on all values.

The references sort the values, loop over thresholds, or search a grid of ranges.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.quant.observers import MSE, Distribution, Entropy, Histogram, Method, MinMax, Percentile
from qatkit.quant.spec import QuantSpec
from qatkit_verify.errors import ConfigError

Values = NDArray[np.float64]
UINT8, INT8 = QuantSpec("uint8"), QuantSpec("int8", symmetric=True)
SPECS = {"affine": UINT8, "symmetric": INT8, "reduced": QuantSpec("uint8", reduce_range=True)}


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


TENSORS: dict[str, Tensor] = {
    "normal": noise(50_000),
    "relu": (noise(60_000) - 0.3).relu(),
    "outlier": torch.cat([noise(40_000), torch.tensor([90.0])]),
    "outliers below": torch.cat([noise(40_000).abs(), torch.full((8,), -30.0)]),
    "two modes": torch.cat([noise(20_000) * 0.05 - 4, noise(20_000, 1) * 0.05 + 4]),
    "two modes apart": torch.cat([noise(30_000) * 0.01, noise(3000, 1) * 0.01 + 6]),
    "heavy tails": noise(60_000) / (noise(60_000, 1).abs() + 0.1),
    "gelu": torch.nn.functional.gelu(noise(60_000) * 2),
    "negative": -noise(30_000).abs() - 0.5,
    "far from zero": noise(5000) * 0.01 + 100,
    "uniform": torch.rand(60_000, generator=torch.Generator().manual_seed(0)),
    "constant": torch.full((100,), -2.5),
    "zeros": torch.zeros(50),
    "denormal": noise(1000) * 1e-41,
    "one": torch.tensor([3.0]),
    "two": torch.tensor([-1.0, 4.0]),
    "tiny": torch.tensor([0.1, -0.7, 2.0, 0.0, 0.3]),
    "huge": noise(1000) * 5e37,
}
METHODS: dict[str, Method] = {
    "minmax": MinMax(),
    "percentile": Percentile(),
    "percentile 60": Percentile(60.0),
    "entropy": Entropy(),
    "mse": MSE(),
    "distribution": Distribution(),
    "distribution 0.5": Distribution(0.5),
}


def histogram(x: Tensor) -> Histogram:
    result = Histogram()
    result.add(x, *torch.aminmax(x))
    assert result.total == x.numel()
    return result


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", TENSORS)
def test_a_range_is_finite_and_within_the_values(name: str, method: Method, spec: QuantSpec) -> None:
    x = TENSORS[name]
    low, high = method.range_of(histogram(x), spec)
    assert math.isfinite(low) and math.isfinite(high)
    assert x.min().item() <= low <= high <= x.max().item()


@pytest.mark.parametrize("percentile", [60.0, 95.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("name", TENSORS)
def test_percentile_is_that_of_the_sorted_values(name: str, percentile: float) -> None:
    x = TENSORS[name].double().numpy()
    made = histogram(TENSORS[name])
    if x.min() >= 0:
        expected = (x.min(), np.percentile(x, percentile))
    elif x.max() <= 0:
        expected = (np.percentile(x, 100 - percentile), x.max())
    else:
        outside = (100 - percentile) / 2
        expected = (np.percentile(x, outside), np.percentile(x, 100 - outside))
    assert Percentile(percentile).range_of(made, UINT8) == pytest.approx(expected, rel=1e-6, abs=made.width)


@pytest.mark.parametrize("percentile", [60.0, 99.0, 99.99])
@pytest.mark.parametrize("name", TENSORS)
def test_a_symmetric_percentile_is_that_of_the_magnitudes(name: str, percentile: float) -> None:
    x = TENSORS[name].double().numpy()
    made = histogram(TENSORS[name])
    low, high = Percentile(percentile).range_of(made, INT8)
    expected = np.percentile(np.abs(x), percentile)
    assert max(-low, high) == pytest.approx(expected, rel=1e-6, abs=made.width)


@pytest.mark.parametrize("deviations", [0.5, 3.0, 6.0])
@pytest.mark.parametrize("name", TENSORS)
def test_distribution_is_mean_and_deviation(name: str, deviations: float) -> None:
    x = TENSORS[name].double().numpy()
    made = histogram(TENSORS[name])
    ends = (x.mean() - deviations * x.std(), x.mean() + deviations * x.std())
    expected = np.clip(ends, x.min(), x.max())
    tolerance = (0.5 + 0.5 * deviations) * made.width
    assert Distribution(deviations).range_of(made, UINT8) == pytest.approx(expected, rel=1e-6, abs=tolerance)


def quantization_error(x: Values, low: float, high: float, spec: QuantSpec) -> float:
    """Returns the mean squared error of quantizing `x` with the range from `low` to `high`."""
    low, high = min(low, 0.0), max(high, 0.0)
    if spec.symmetric:
        scale, zero, ends = max(-low, high) / 127, 0, (-128, 127)
    else:
        levels = spec.quant_max - spec.quant_min
        scale = (high - low) / levels
        zero, ends = round(-low / scale), (0, 255)
    q = np.clip(np.round(x / scale) + zero, *ends)
    return float((((q - zero) * scale - x) ** 2).mean())


def least_error(x: Values, spec: QuantSpec) -> float:
    """Returns the smallest error over a plain grid of ranges."""
    factors = np.concatenate([np.linspace(0.02, 1, 50), 1 / np.array([64, 100, 160])])
    one_sided = spec.symmetric or x.min() >= 0 or x.max() <= 0
    pairs = [(f, f) for f in factors] if one_sided else [(a, b) for a in factors[::3] for b in factors]
    return min(quantization_error(x, x.min() * a, x.max() * b, spec) for a, b in pairs)


@pytest.mark.parametrize("spec", [UINT8, INT8], ids=["affine", "symmetric"])
@pytest.mark.parametrize("name", [n for n in TENSORS if n not in ("zeros", "denormal", "huge")])
def test_mse_is_as_good_as_a_grid_of_all_ranges(name: str, spec: QuantSpec) -> None:
    x = TENSORS[name].double().numpy()[:20_000] if "outlier" not in name else TENSORS[name].double().numpy()
    made = histogram(torch.from_numpy(x).float())
    found = quantization_error(x, *MSE().range_of(made, spec), spec)
    # The method sees bin centres instead of values, hence the tolerance of one bin.
    assert math.sqrt(found) <= 1.02 * math.sqrt(least_error(x, spec)) + made.width


def reference_entropy(x: Values, width: float, levels: int) -> tuple[float, Values]:
    """Returns the threshold of Migacz's search and the divergences, computed threshold by threshold.

    A divergence's index is the number of bins that are kept; it is infinite where that number is not tried.
    """
    counts = np.histogram(np.abs(x), np.arange(math.floor(np.abs(x).max() / width) + 2) * width)[0].astype(
        float
    )
    counts[0] = 0
    n = len(counts)
    divergences = np.full(n + 1, np.inf)
    step = math.ceil((n - levels) / 512)
    for i in range(n, levels - 1, -step):
        p = counts[:i].copy()
        p[-1] += counts[i:].sum()
        level = np.arange(i) * levels // i
        total, bins = np.bincount(level, counts[:i]), np.bincount(level, p > 0)
        q = np.where(p > 0, total[level] / np.maximum(bins[level], 1), 0.0)
        filled = p > 0
        if counts[:i].sum() > 0 and (q[filled] > 0).all():
            p, q = p / p.sum(), q / q.sum()
            divergences[i] = (p[filled] * np.log(p[filled] / q[filled])).sum()
    best = n - int(np.argmin(divergences[::-1]))
    return best * width, divergences


@pytest.mark.parametrize(
    "name", ["normal", "relu", "outlier", "two modes", "heavy tails", "gelu", "negative", "uniform"]
)
def test_entropy_is_the_search_spelled_out(name: str) -> None:
    x = TENSORS[name].double().numpy()
    made = histogram(TENSORS[name])
    both = x.min() < 0 < x.max()
    width = made.width
    while math.floor(np.abs(x).max() / width) + 1 > 2048:
        width *= 2
    expected, divergences = reference_entropy(x, width, 128 if both else 256)
    low, high = Entropy().range_of(made, UINT8)
    reach = max(-low, high)
    at = divergences[min(round(reach / width), len(divergences) - 1)]
    # The same threshold, or one that is equal up to rounding errors (the last one is clipped to the extreme).
    if reach < np.abs(x).max():
        assert at <= np.nanmin(divergences) + 1e-12
    assert reach == pytest.approx(min(expected, np.abs(x).max()), abs=width)


def test_percentile_100_clips_nothing_of_a_huge_tensor() -> None:
    x = torch.rand(600_001, generator=torch.Generator().manual_seed(0)) - 0.25
    x[12_345], x[54_321] = 50.0, -7.0
    made = Histogram()
    made.add(x, *torch.aminmax(x))
    assert made.total < x.numel()
    assert Percentile(100.0).range_of(made, UINT8) == (-7.0, 50.0)


@pytest.mark.parametrize(
    "values", [[-0.4242, 2.8215], [0.0, 0.25, 0.5, 0.75, 1.0], [-1.0, 0.0, 1.0], [0.0, 3.0]], ids=str
)
def test_entropy_of_a_few_values_keeps_them_all(values: list[float]) -> None:
    """For a few values, many thresholds have the same KL divergence up to rounding; the largest is chosen."""
    made = histogram(torch.tensor(values).repeat_interleave(1000))
    assert Entropy().range_of(made, UINT8) == pytest.approx((min(values), max(values)), abs=made.width)


def test_what_the_methods_are_for() -> None:
    """Known answers: a uniform tensor is not clipped; a single outlier that would make steps too large is."""
    uniform, normal = histogram(TENSORS["uniform"]), histogram(noise(100_000))
    assert Entropy().range_of(uniform, UINT8)[1] > 0.95
    assert MSE().range_of(uniform, UINT8)[1] > 0.98
    # Banner et al., 2019, table 1: the best 8-bit clipping of a normal distribution is at 3.92 deviations.
    assert MSE().range_of(normal, INT8)[1] == pytest.approx(3.92, abs=0.25)
    outlier = histogram(torch.cat([noise(100_000), torch.tensor([60.0])]))
    assert Percentile(99.9).range_of(outlier, UINT8)[1] < 5
    assert Distribution().range_of(outlier, UINT8)[1] < 5
    assert Entropy().range_of(outlier, UINT8)[1] < 10


@pytest.mark.parametrize("percentile", [50.0, 0.0, -1.0, 100.01, float("nan"), float("inf")])
def test_a_percentile_out_of_range_is_named(percentile: float) -> None:
    with pytest.raises(ConfigError) as raised:
        Percentile(percentile)
    assert str(raised.value) == f"calibration.percentile={percentile}: expected a number above 50, up to 100"


@pytest.mark.parametrize("deviations", [0.0, -1.0, float("nan"), float("inf")])
def test_deviations_out_of_range_are_named(deviations: float) -> None:
    with pytest.raises(ConfigError, match=r"calibration.deviations=.*: expected a number above 0"):
        Distribution(deviations)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_range_takes_milliseconds(method: Method) -> None:
    made = histogram(TENSORS["normal"])
    times = []
    for _ in range(5):
        start = time.process_time()
        method.range_of(made, UINT8)
        times.append(time.process_time() - start)
    assert min(times) < 0.1
