"""Tests of the cheapest placement against all possible placements, on random graphs."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from qatkit.choose.placement.cut import Edge, Times, cheapest, total


def network(seed: int) -> tuple[dict[str, Times], list[Edge]]:
    """Returns ten operators with branches; some can't be int8, and some tensors are always float."""
    draw = random.Random(seed)
    names = [f"op{i}" for i in range(10)]
    operators = {
        name: Times(math.inf if draw.random() < 0.1 else draw.uniform(1, 9), draw.uniform(1, 9))
        for name in names
    }
    edges = [Edge(None, {names[0]: True}, False, draw.uniform(0, 4), 0.0)]
    for i, name in enumerate(names):
        later = draw.sample(names[i + 1 :], min(len(names) - i - 1, draw.choice((1, 1, 2, 3))))
        source = None if draw.random() < 0.2 else name  # the output of a Linear is float
        may = {one: draw.random() < 0.6 for one in later}
        ends = not later or draw.random() < 0.1
        edges.append(Edge(source, may, ends, draw.uniform(0, 4), draw.uniform(0, 4)))
    return operators, edges


def every(operators: dict[str, Times]) -> list[frozenset[str]]:
    return [frozenset(s) for n in range(len(operators) + 1) for s in itertools.combinations(operators, n)]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_cheaper(seed: int) -> None:
    operators, edges = network(seed)
    best = min(total(operators, edges, floats) for floats in every(operators))
    assert math.isfinite(best)
    assert total(operators, edges, cheapest(operators, edges)) == pytest.approx(best, rel=1e-5)


def test_a_chain_by_hand() -> None:
    """conv, SiLU, depthwise, SiLU, conv: operators take 9, and four type changes 1 each.

    With the depthwise in float, operators take 10, and there are two type changes.
    """
    times = {"a": Times(2, 5), "silu": Times(math.inf, 1), "depthwise": Times(3, 4), "silu2": Times(math.inf, 1),
             "b": Times(2, 5)}  # fmt: skip
    names = list(times)
    edges = [
        Edge(one, {other: other in ("depthwise", "b")}, False, 1, 1)
        for one, other in itertools.pairwise(names)
    ]
    assert cheapest(times, edges) == {"silu", "depthwise", "silu2"}
    assert total(times, edges, {"silu", "depthwise", "silu2"}) == 12
    assert total(times, edges, {"silu", "silu2"}) == 13
    dear = [Edge(e.source, e.readers, e.float_reader, 0.1, 0.1) for e in edges]
    assert cheapest(times, dear) == {"silu", "silu2"}


def test_one_pair_serves_all_readers_of_a_tensor() -> None:
    times = {"a": Times(1, 10), "b": Times(5, 1), "c": Times(5, 1), "d": Times(5, 1)}
    together = [Edge("a", {"b": True, "c": True, "d": True}, False, 6, 6)]
    apart = [Edge("a", {one: True}, False, 6, 6) for one in "bcd"]
    assert cheapest(times, together) == {"b", "c", "d"}
    assert cheapest(times, apart) == {"a", "b", "c", "d"}
