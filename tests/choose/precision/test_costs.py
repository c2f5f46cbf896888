"""Tests of predicted latencies on a made-up machine: known times of kernels, type changes and profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from qatkit.choose.precision.costs import Costs, Measured
from qatkit.choose.precision.layout import Layout
from qatkit.verify.site_kernels import DEQUANTIZE, QUANTIZE, SiteKernel, site_of

OPERATORS = tuple(f"conv{i}" for i in range(8))
_RNG = np.random.default_rng(0)
FLOAT_US = dict(zip(OPERATORS, _RNG.uniform(40, 200, 8), strict=True))
INT8_US = {one: time / 3 for one, time in FLOAT_US.items()}
VALUES = dict(zip(OPERATORS, (10000 * _RNG.uniform(0.5, 4, 8)).astype(int).tolist(), strict=True))
_PROFILER = 2.5  # microseconds that the profiler adds to a kernel
_BESIDE = 1.2  # factor on the time of an operator between two neighbours of the other type


def layout(floats: Sequence[str]) -> Layout:
    """Returns the layout of a chain; tensors are (de)quantized only between float and int8 neighbours."""
    eight = [one not in floats for one in OPERATORS]
    pairs = list(zip(OPERATORS[1:], itertools.pairwise(eight), strict=True))
    quantized = [VALUES[one] for one, (before, here) in pairs if here and not before]
    dequantized = [VALUES[one] for one, (before, here) in pairs if before and not here]
    if eight[0]:
        quantized.append(VALUES[OPERATORS[0]])
    left = tuple(one for one in OPERATORS if one not in floats)
    moved = (*quantized, *dequantized)
    return Layout(frozenset(floats), frozenset(left), left, {}, tuple(quantized), tuple(dequantized), moved)


def true_kernels(floats: Sequence[str]) -> list[SiteKernel]:
    """Returns the kernels with their true times."""
    found, one_layout = [], layout(floats)
    for i, one in enumerate(OPERATORS):
        beside = [OPERATORS[j] for j in (i - 1, i + 1) if 0 <= j < len(OPERATORS)]
        others = sum((other in floats) != (one in floats) for other in beside) / len(beside)
        time = (FLOAT_US if one in floats else INT8_US)[one] * (1 + (_BESIDE - 1) * others)
        found.append(SiteKernel(one, "", VALUES[one], time))
    for kind, sizes in ((QUANTIZE, one_layout.quantized), (DEQUANTIZE, one_layout.dequantized)):
        found += [SiteKernel(None, kind, size, 1.0 + size / 4000) for size in sizes]
    return found


def milliseconds(floats: Sequence[str]) -> float:
    return sum(one.microseconds for one in true_kernels(floats)) / 1e3


def file(floats: Sequence[str]) -> Measured:
    seen = [SiteKernel(k.site, k.border, k.values, k.microseconds + _PROFILER) for k in true_kernels(floats)]
    return Measured(layout(floats), seen, milliseconds(floats))


@pytest.fixture(scope="module")
def costs() -> Costs:
    return Costs(
        [file(()), file(OPERATORS), file(OPERATORS[0::2]), file(OPERATORS[1::2])], OPERATORS, OPERATORS
    )


def test_both_ends_are_as_measured(costs: Costs) -> None:
    assert costs(layout(())) == pytest.approx(milliseconds(()))
    assert costs(layout(OPERATORS)) == pytest.approx(milliseconds(OPERATORS))


def test_every_mixture_is_within_two_percent(costs: Costs) -> None:
    """Checks all 256 sets of float operators, of which four were measured."""
    off = [
        costs(layout(one)) / milliseconds(one) - 1
        for n in range(9)
        for one in itertools.combinations(OPERATORS, n)
    ]
    assert np.abs(off).max() < 0.02


@pytest.mark.parametrize("seed", range(50))
def test_a_clock_that_contradicts_itself_gives_times_above_zero(seed: int) -> None:
    """When a run takes only microseconds, other processes may dominate what clock and profiler measure.

    Their times may then contradict each other.
    """
    rng = np.random.default_rng(seed)
    sets = (), OPERATORS, OPERATORS[0::2], OPERATORS[1::2], OPERATORS[:3], OPERATORS[:6]
    files = [file(one) for one in sets]
    for i, seen in enumerate(files):
        factors = rng.choice([0.0, 0.01, 1.0, 30.0], len(seen.kernels))
        kernels = [
            replace(k, microseconds=k.microseconds * x) for k, x in zip(seen.kernels, factors, strict=True)
        ]
        files[i] = replace(seen, kernels=kernels, ms=seen.ms * rng.choice([0.02, 1.0, 50.0]))
    found = Costs(files, OPERATORS, OPERATORS)
    found.learn([(layout(OPERATORS[:4]), 1e-4), (layout(OPERATORS[2:5]), 100.0)])
    for n in range(9):
        for one in itertools.combinations(OPERATORS, n):
            assert 0 < found(layout(one)) < math.inf


def test_the_share_is_that_of_the_float_time(costs: Costs) -> None:
    whole = sum(FLOAT_US.values())
    assert costs.share(layout(("conv1", "conv5"))) == pytest.approx(
        (FLOAT_US["conv1"] + FLOAT_US["conv5"]) / whole, rel=1e-3
    )


def test_a_node_of_a_file_belongs_to_the_module_above_it() -> None:
    sites = {"layer1.conv1", "head"}
    assert site_of("layer1.conv1/Conv", sites) == "layer1.conv1"
    assert site_of("layer1.conv1.barrier/Sum", sites) == "layer1.conv1"
    assert site_of("layer2.conv1/Conv", sites) is None


def test_what_was_timed_since_corrects_the_sets_that_are_like_it() -> None:
    """Here mixtures are up to 20 % slower than the sum of their operators; corrections must learn this."""

    def crowded(floats: Sequence[str]) -> float:
        return milliseconds(floats) * (1 + 0.2 * math.sin(math.pi * len(floats) / len(OPERATORS)))

    ends = [replace(file(one), ms=crowded(one)) for one in ((), OPERATORS, OPERATORS[0::2], OPERATORS[1::2])]
    costs = Costs(ends, OPERATORS, OPERATORS)
    sets = [OPERATORS[:n] for n in range(1, 8)]
    before = [abs(costs(layout(one)) / crowded(one) - 1) for one in sets]
    known = [(layout(one), crowded(one)) for one in sets[1::2]]
    costs.learn(known)
    after = [abs(costs(layout(one)) / crowded(one) - 1) for one in sets]
    assert max(after[1::2]) < 0.01  # the timed sets
    assert max(after[0::2]) < 0.5 * max(before[0::2]) < 0.1  # their neighbours
    for one in ((), OPERATORS):
        assert costs(layout(one)) == pytest.approx(crowded(one), rel=0.01)


def test_the_correction_is_kriging(costs: Costs) -> None:
    """Compares with the textbook formula, with distances from the shares of the float time."""
    files = [(), OPERATORS, OPERATORS[0::2], OPERATORS[1::2], OPERATORS[:3]]
    own, new = Costs([file(one) for one in files[:4]], OPERATORS, OPERATORS), layout(OPERATORS[:4])

    def likeness(one: Layout, other: Layout) -> float:
        return float(np.exp(-sum(own.share(layout([name])) for name in one.floats ^ other.floats) / 0.3))

    layouts = [layout(one) for one in files]
    near = np.array([[likeness(one, other) for other in layouts] for one in layouts])
    off = np.log([milliseconds(one) for one in files[:4]]) - np.log([plain(own, one) for one in layouts[:4]])
    off = np.append(off, np.log(1.3))
    asked = np.array([likeness(new, one) for one in layouts])
    wanted = plain(own, new) * np.exp(asked @ np.linalg.solve(near + 0.02 * np.eye(5), off))
    own.learn([(layouts[4], 1.3 * plain(own, layouts[4]))])
    assert own(new) == pytest.approx(wanted, rel=1e-9)


def plain(costs: Costs, one: Layout) -> float:
    """Returns the predicted latency without corrections: the sum over operators and type changes."""
    return float(costs._summed(one))
