"""Proposes the next settings: a point that no trial of the study has had, since equal runs give equal figures.

Optuna's sampler proposes, based on all trials. It expects the worst of a running trial, so that other workers
look elsewhere meanwhile. A sampler that returns to a known point is asked again, as if that point were
running; after some attempts one of the remaining points is drawn. So a small space is tried completely, no
point of it twice, and then the search is over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from qatkit.config.search_space import Axis, Numbers, Value

_ASKED = 10  # attempts, before one of the remaining points is drawn
Point = tuple[float, ...]


def proposal(
    study: optuna.Study, trials: Sequence[FrozenTrial], axes: Sequence[Axis], seed: int, startup: int
) -> FrozenTrial | None:
    """Returns a new trial, not yet in the study; None where every point of the space has had one.

    Args:
        study: whose directions count.
        trials: the trials of the study, with a value of every axis.
        axes: the axes of its space.
        seed: the seed of the random draws.
        startup: trials that are drawn at random.
    """
    taken = {_point(axes, one.params) for one in trials}
    if len(taken) >= possible(axes):
        return None
    distributions = {axis.key: distribution(axis) for axis in axes}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
    copy = optuna.create_study(directions=study.directions, sampler=sampler)
    copy.add_trials(trials)
    for _ in range(_ASKED):
        values = copy.ask(distributions).params
        if _point(axes, values) not in taken:
            break
    else:
        values = _left(axes, taken, random.Random(seed))
    return optuna.trial.create_trial(state=TrialState.RUNNING, params=values, distributions=distributions)


def possible(axes: Sequence[Axis]) -> int:
    """Returns the number of points of the space."""
    return math.prod(axis.count for axis in axes)


def _point(axes: Sequence[Axis], values: Mapping[str, Any]) -> Point:
    return tuple(axis.place(values[axis.key]) for axis in axes)


def _left(axes: Sequence[Axis], taken: set[Point], draw: random.Random) -> dict[str, Value]:
    """Returns a free point, of which there must be one: the first at or after a random one."""
    index = draw.randrange(possible(axes))
    while True:
        rest, values = index % possible(axes), dict[str, Value]()
        for axis in axes:
            rest, digit = divmod(rest, axis.count)
            values[axis.key] = axis.at(digit)
        if _point(axes, values) not in taken:
            return values
        index += 1


def distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    """Returns an axis in Optuna's form."""
    if not isinstance(axis, Numbers):
        return optuna.distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        return optuna.distributions.IntDistribution(
            int(axis.low), int(axis.high), log=axis.log, step=int(axis.step or 1)
        )
    return optuna.distributions.FloatDistribution(
        float(axis.low), float(axis.high), log=axis.log, step=axis.step
    )
