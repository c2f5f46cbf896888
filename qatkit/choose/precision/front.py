"""Sets of float operators on the Pareto front of loss and latency, and the choice of a point on a measured front.

    grow      from int8: the step to float that saves the most loss per millisecond is next
    shrink    from float: the step back to int8 that saves the most time for its loss is next
    ranked    the k most sensitive operators in float, for each k

A single float operator is often not worth its time: its input and output stay quantized, and two borders are
added. A step therefore changes several operators in a row, or all operators of one module. If loss and time
are sums over the operators, this is the greedy algorithm for the knapsack problem, whose steps are the
corners of the exact front. The front is that of all sets that are evaluated on the way.

The loss and time of a set come from a function that is passed in; this module does not know the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qatkit.records.precision import PrecisionPoint

Floats = frozenset[str]
Price = tuple[float, float]  # loss and milliseconds of a set
Cost = Callable[[Floats], Price]
_LENGTHS = (1, 2, 3, 4, 6, 9, 14)
_NEAR = 2  # number of operators within which a step changes the cost of other steps
_FLOOR = -40.0  # losses below this, in dB relative to int8's, count as equal
_AS_FAST = 0.97
_T = TypeVar("_T")


@dataclass(frozen=True)
class Choice:
    """A set of float operators with its predicted loss and milliseconds."""

    floats: Floats
    loss: float
    ms: float


def predicted_front(operators: Sequence[str], cost: Cost, ranking: Sequence[str]) -> list[Choice]:
    """Returns the predicted Pareto front over all sets that were evaluated on the way, fastest first, float last.

    The float model does not exclude other sets, even if it is faster, since quantization also makes weights
    smaller.

    Args:
        operators: the operators in graph order.
        cost: a function that returns the loss and time of a set.
        ranking: the operators, the most sensitive first.
    """
    steps, known = runs(operators), dict[Floats, Price]()

    def asked(floats: Floats) -> Price:
        if floats not in known:
            known[floats] = cost(floats)
        return known[floats]

    grow(operators, steps, asked)
    shrink(operators, steps, asked)
    for k in range(len(ranking) + 1):
        asked(frozenset(ranking[:k]))
    found = [Choice(floats, *price) for floats, price in known.items()]
    return not_beaten_but_by(frozenset(operators), found)


def not_beaten_but_by(floats: Floats, choices: Sequence[Choice]) -> list[Choice]:
    """Returns the Pareto front over loss and latency of all choices except `floats`, followed by `floats`."""
    others = [one for one in choices if one.floats != floats]
    ends = [one for one in choices if one.floats == floats]
    return [*not_beaten(others, lambda one: (one.loss, one.ms)), *ends[:1]]


def runs(operators: Sequence[str]) -> list[Floats]:
    """Returns the sets of operators that one step may change: some in a row (`_LENGTHS`), or all of one module."""
    count = len(operators)
    found = {frozenset(operators[i : i + n]) for n in _LENGTHS for i in range(count - n + 1)}
    for one in operators:
        path = one
        while "." in path:
            path = path.rpartition(".")[0]
            found.add(frozenset(other for other in operators if other.startswith(path + ".")))
    place = {one: i for i, one in enumerate(operators)}
    return sorted(found, key=lambda step: (len(step), sorted(place[one] for one in step)))


def grow(operators: Sequence[str], steps: Sequence[Floats], cost: Cost) -> list[Floats]:
    """Returns the sets on the way from no float operator towards all, as long as a step saves loss."""
    return _walk(operators, steps, frozenset(), lambda floats, step: floats | step, cost, _by_time)


def shrink(operators: Sequence[str], steps: Sequence[Floats], cost: Cost) -> list[Floats]:
    """Returns the sets on the way from all operators in float towards none, as long as a step saves time."""
    return _walk(operators, steps, frozenset(operators), lambda floats, step: floats - step, cost, _by_loss)


def _by_time(before: Price, after: Price) -> float:
    """Returns the saved loss per millisecond; infinity if the step costs no time."""
    saved, added = before[0] - after[0], after[1] - before[1]
    if saved <= 0:
        return -math.inf
    return saved / added if added > 0 else math.inf


def _by_loss(before: Price, after: Price) -> float:
    """Returns the saved milliseconds per loss; infinity if the step costs no loss."""
    saved, added = before[1] - after[1], after[0] - before[0]
    if saved <= 0:
        return -math.inf
    return saved / added if added > 0 else math.inf


def _walk(
    operators: Sequence[str],
    steps: Sequence[Floats],
    start: Floats,
    take: Callable[[Floats, Floats], Floats],
    cost: Cost,
    worth: Callable[[Price, Price], float],
) -> list[Floats]:
    """Repeatedly takes the step with the highest value until no step has a positive one; returns the sets.

    The value of a step is recomputed only close to the last step, and before the step itself is taken.
    """
    place = {one: i for i, one in enumerate(operators)}
    spans = {step: (min(map(place.__getitem__, step)), max(map(place.__getitem__, step))) for step in steps}
    now, found = start, [start]
    known = {step: worth(cost(now), cost(take(now, step))) for step in steps}
    while known:
        best = max(known, key=known.__getitem__)
        known[best] = worth(cost(now), cost(take(now, best)))
        if known[best] < max(known.values()):
            continue
        if known[best] == -math.inf:
            break
        now = take(now, best)
        found.append(now)
        del known[best]
        low, high = spans[best]
        for step in [s for s in known if spans[s][0] <= high + _NEAR and spans[s][1] >= low - _NEAR]:
            if take(now, step) == now:
                del known[step]
            else:
                known[step] = worth(cost(now), cost(take(now, step)))
    return found


def not_beaten(found: Iterable[_T], price: Callable[[_T], Price]) -> list[_T]:
    """Returns the Pareto front over loss and latency, fastest first."""
    front: list[_T] = []
    for one in sorted(found, key=lambda one: (price(one)[1], price(one)[0])):
        if not front or price(one)[0] < price(front[-1])[0]:
            front.append(one)
    return front


def thinned(
    front: Sequence[Choice], ends: tuple[Choice, Choice], count: int, taken: Sequence[Choice] = ()
) -> list[Choice]:
    """Returns at most `count` sets of a front that are far apart in time and in dB of the loss, fastest first.

    Args:
        front: the sets to choose from.
        ends: int8 and float. Distances to them count too, but they are not returned.
        count: the number of sets.
        taken: existing sets, which are treated like the ends.
    """
    low, high = (end.ms for end in ends)
    worst = ends[0].loss or 1.0

    def at(one: Choice) -> tuple[float, float]:
        share = one.loss / worst
        decibel = max(_FLOOR, 10 * math.log10(share)) if share > 0 else _FLOOR
        return (one.ms - low) / ((high - low) or 1.0), decibel / _FLOOR

    there, found = [*ends, *taken], list[Choice]()
    left = [one for one in front if all(one.floats != other.floats for other in there)]
    while left and len(found) < count:
        farthest = max(left, key=lambda one: min(math.dist(at(one), at(other)) for other in (*there, *found)))
        found.append(farthest)
        left.remove(farthest)
    return sorted(found, key=lambda one: one.ms)


def decide(
    points: Sequence[PrecisionPoint], meets: Callable[[PrecisionPoint], bool], min_speedup: float | None
) -> tuple[int, str]:
    """Returns the index of the point with which the run continues, and the reason.

    With `min_speedup`, it is the most accurate of the points that reach it; if none does, it is the fastest.
    Otherwise it is the fastest point that meets the target, or int8 if that meets it at nearly the same speed;
    if no point meets the target, it is the most accurate. The float model is never chosen.

    Args:
        points: the measured points, fastest first, including int8 and float.
        meets: a function that returns whether a point meets the accuracy target.
        min_speedup: the target for float's time divided by the point's; None if there is none.
    """
    able = [point for point in points if point.floats is not None]
    if min_speedup is not None:
        fast = [point for point in able if point.ratio >= min_speedup]
        if not fast:
            best = max(able, key=lambda point: point.ratio)
            return best.number, (
                f"target.min_speedup={min_speedup:g}: no point reaches it; the fastest one ({best.ratio:.2f} times as "
                "fast as float) was chosen"
            )
        return max(
            fast, key=_signal
        ).number, f"the most accurate point that is at least {min_speedup:g} times as fast as float"
    good = [point for point in able if meets(point)]
    if not good:
        best = max(able, key=_signal)
        return best.number, "no point meets the target: this is the most accurate one"
    plain = next((point for point in good if point.floats == ()), None)
    if plain is not None and good[0].ms > _AS_FAST * plain.ms:
        return plain.number, "int8 meets the target"
    slower = "" if good[0].ratio >= 1 else "; float itself is faster"
    return good[0].number, f"the fastest one that meets the target{slower}"


def _signal(point: PrecisionPoint) -> float:
    return math.inf if point.sqnr_db is None else point.sqnr_db
