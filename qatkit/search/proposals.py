"""Proposes the settings of the next trial. No two trials get the same settings, since equal runs give equal results.

Optuna's sampler makes the proposal from all trials. It assumes bad results for running trials, so that several workers
do not try similar settings at the same time. If it proposes a point (one value for each axis) that already has a trial,
it is asked again as if another trial of this point were running. After some attempts, one of the remaining points is
drawn at random. A small space is therefore tried completely, each point once, and then the search ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from qatkit.config.search_space import Axis, Numbers, Value

_ASKED = 10  # number of attempts before one of the remaining points is drawn
Point = tuple[float, ...]


def proposal(
    study: optuna.Study, trials: Sequence[FrozenTrial], axes: Sequence[Axis], seed: int, startup: int
) -> FrozenTrial | None:
    """Returns a new trial, which is not yet in the study; None if every point of the space has a trial.

    Args:
        study: the study, for the directions of its objectives.
        trials: the trials of the study, each with a value for every axis.
        axes: the axes of the search space.
        seed: the seed of the random draws.
        startup: the number of trials that are drawn at random before the sampler uses results.
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
    """Returns the number of points in the space."""
    return math.prod(axis.count for axis in axes)


def _point(axes: Sequence[Axis], values: Mapping[str, Any]) -> Point:
    return tuple(axis.place(values[axis.key]) for axis in axes)


def _left(axes: Sequence[Axis], taken: set[Point], draw: random.Random) -> dict[str, Value]:
    """Returns the first point without a trial at or after a random point; there must be one."""
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
    """Returns an axis as a distribution of Optuna."""
    if not isinstance(axis, Numbers):
        return optuna.distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        return optuna.distributions.IntDistribution(
            int(axis.low), int(axis.high), log=axis.log, step=int(axis.step or 1)
        )
    return optuna.distributions.FloatDistribution(
        float(axis.low), float(axis.high), log=axis.log, step=axis.step
    )
