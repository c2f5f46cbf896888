"""Tests of the predicted Pareto front against all subsets, and of which measured point is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qatkit.choose.precision.front import Choice, decide, not_beaten, predicted_front, runs, thinned
from qatkit.records.precision import Precision, PrecisionPoint

OPERATORS = [f"block{i // 3}.conv{i % 3}" for i in range(9)]
Floats = frozenset[str]


def subsets() -> list[Floats]:
    return [frozenset(one) for n in range(10) for one in itertools.combinations(OPERATORS, n)]


def summed(seed: int) -> Callable[[Floats], tuple[float, float]]:
    """Returns a function that computes (loss, ms): int8 operators add a loss each, float ones a time each."""
    loss, ms = np.random.default_rng(seed).lognormal(size=(2, 9))

    def cost(floats: Floats) -> tuple[float, float]:
        float_ones = np.array([one in floats for one in OPERATORS])
        return float(loss[~float_ones].sum()), float(10 + ms[float_ones].sum())

    return cost


def chained(seed: int) -> Callable[[Floats], tuple[float, float]]:
    """Returns a cost as in a network: tensors between float operators are exact; type changes take time."""
    weight, tensor, ms = np.random.default_rng(seed).lognormal(size=(3, 9))

    def cost(floats: Floats) -> tuple[float, float]:
        f = np.array([one in floats for one in OPERATORS])
        between = tensor[1:][~(f[1:] & f[:-1])].sum()
        borders = int((f[1:] != f[:-1]).sum() + f[0])
        return float(weight[~f].sum() + between), float(10 + ms[f].sum() + 0.5 * borders)

    return cost


def exact_front(cost: Callable[[Floats], tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns (loss, ms) of the subsets on the Pareto front, by comparing all with all."""
    prices = np.array([cost(one) for one in subsets()])
    beaten = [bool(((prices <= p).all(1) & (prices < p).any(1)).any()) for p in prices]
    return sorted({(float(a), float(b)) for (a, b), bad in zip(prices, beaten, strict=True) if not bad})


@pytest.mark.parametrize("seed", range(5))
def test_where_costs_are_sums_the_steps_are_on_the_exact_front(seed: int) -> None:
    """All corners of the lower convex hull of all 512 subsets must be found."""
    cost = summed(seed)
    found = {(one.loss, one.ms) for one in predicted_front(OPERATORS, cost, OPERATORS)}
    exact = exact_front(cost)

    def below(a: tuple[float, float], b: tuple[float, float], p: tuple[float, float]) -> bool:
        return (b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0]) < -1e-9

    corners = [
        p for p in exact if not any(a[0] < p[0] < b[0] and not below(a, b, p) for a in exact for b in exact)
    ]
    assert len(corners) > 5
    for corner in corners:
        assert any(np.allclose(corner, one) for one in found)


@pytest.mark.parametrize("seed", range(5))
def test_with_borders_it_stays_near_the_exact_front(seed: int) -> None:
    """The loss exceeds the exact front's at the same latency by under 3 % of the int8 loss on average."""
    cost = chained(seed)
    found = predicted_front(OPERATORS, cost, OPERATORS)
    exact, whole = exact_front(cost), cost(frozenset())[0]
    worse = []
    for loss, ms in exact:
        worse.append(min((one.loss for one in found if one.ms <= ms + 1e-9), default=whole) - loss)
    assert np.mean(worse) < 0.03 * whole
    for k in range(10):  # the first k operators never beat the front
        price = cost(frozenset(OPERATORS[:k]))
        assert any(one.loss <= price[0] + 1e-9 and one.ms <= price[1] + 1e-9 for one in found)


def test_steps_are_neighbours_and_modules() -> None:
    steps = runs(OPERATORS)
    assert frozenset(OPERATORS[3:6]) in steps and frozenset(OPERATORS[1:3]) in steps
    assert frozenset({OPERATORS[0], OPERATORS[2]}) not in steps
    branches = ["a.down", "b.conv", "a.conv"]
    assert frozenset({"a.down", "a.conv"}) in runs(branches)


def test_what_is_beaten_is_not_on_a_front() -> None:
    prices = [(3.0, 1.0), (2.0, 2.0), (2.0, 2.5), (2.5, 3.0), (0.0, 4.0), (0.0, 3.9)]
    assert not_beaten(prices, lambda one: one) == [(3.0, 1.0), (2.0, 2.0), (0.0, 3.9)]


def test_thinning_keeps_what_is_far_apart() -> None:
    def choice(ms: float, loss: float) -> Choice:
        return Choice(frozenset({str(ms)}), loss, ms)

    ends = (Choice(frozenset(), 1.0, 1.0), Choice(frozenset("all"), 0.0, 2.0))
    front = [choice(1.01, 0.9), choice(1.02, 0.8), choice(1.5, 0.1), choice(1.51, 0.099)]
    kept = thinned([ends[0], *front, ends[1]], ends, 2)
    assert [one.ms for one in kept] == [1.02, 1.51]
    assert thinned([*ends], ends, 2) == []


def point(
    number: int, ms: float, top1: float, sqnr: float | None, floats: tuple[str, ...] | None
) -> PrecisionPoint:
    return PrecisionPoint(number, floats, len(floats or ()), ms, ms, 4.0 / ms, top1, top1 / 100, sqnr)


FRONT = [
    point(0, 1.0, 70.0, 20.0, ()),
    point(1, 2.0, 75.0, 25.0, ("a",)),
    point(2, 3.0, 77.0, 30.0, ("a", "b")),
    point(3, 4.0, 77.1, None, None),
]


def at_least(top1: float) -> Callable[[PrecisionPoint], bool]:
    return lambda one: (one.score or 0.0) >= top1


@pytest.mark.parametrize(
    ("top1", "speed", "number", "why"),
    [
        (74.0, None, 1, "the fastest one that meets"),
        (60.0, None, 0, "int8 meets"),
        (77.05, None, 2, "no point meets"),
        (77.0, 2.0, 1, "the most accurate"),
        (77.0, 1.1, 2, "the most accurate"),
        (0.0, 9.0, 0, "min_speedup=9: no point reaches it; the fastest one (4.00 times"),
    ],
)
def test_the_target_decides(top1: float, speed: float | None, number: int, why: str) -> None:
    found, note = decide(FRONT, at_least(top1), speed)
    assert found == number and why in note


def test_a_point_that_is_faster_than_int8_is_taken() -> None:
    front = [point(0, 0.8, 76.0, 25.0, ("a",)), point(1, 1.0, 75.0, 20.0, ()), FRONT[3]]
    assert decide(front, at_least(70.0), None)[0] == 0
    close = [point(0, 0.99, 76.0, 25.0, ("a",)), *front[1:]]
    assert decide(close, at_least(70.0), None)[0] == 1


def test_where_float_is_the_fastest_mixtures_still_compete() -> None:
    def cost(floats: Floats) -> tuple[float, float]:
        return 3.0 ** -len(floats) * (len(floats) < len(OPERATORS)), 1.0 if len(floats) == 9 else 2.0 + len(
            floats
        )

    found = predicted_front(OPERATORS, cost, OPERATORS)
    assert [len(one.floats) for one in found] == list(range(10))
    slow = [point(0, 3.0, 70.0, 20.0, ()), point(1, 5.0, 77.0, 30.0, ("a",)), point(2, 1.0, 77.1, None, None)]
    slow = [replace(one, ratio=1.0 / one.ms) for one in slow]
    number, why = decide(slow, at_least(75.0), None)
    assert number == 1 and why.endswith("float itself is faster")


def test_a_front_comes_back_from_json() -> None:
    import json

    front = Precision((FRONT[0], FRONT[3]), 2, 4, 32, "why")
    assert Precision.from_dict(json.loads(json.dumps(front.as_dict()))) == front
