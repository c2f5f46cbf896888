"""Prunes trials by the median stopping rule (Golovin et al., Google Vizier, KDD 2017, section 3.2).

A trial is pruned if its best score in the current stage is worse than the median of the scores that the
finished trials had at the same epoch. Optuna's MedianPruner uses the same rule, but does not support studies
with several objectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from qatkit_verify.classification import NAMES
from qatkit_verify.records import Metric

Epochs = Mapping[str, float]  # from "QAT 3" to the task's main metric, in the order of the epochs


def falls_behind(
    epochs: Epochs, finished: Sequence[Epochs], startup: int, metric: Metric = NAMES.main
) -> bool:
    """Returns whether a trial should be pruned after its latest epoch.

    Args:
        epochs: the scores of the trial so far.
        finished: the scores of the trials that ran to their end.
        startup: the minimum number of finished trials; with fewer of them (or none), no trial is pruned.
        metric: the metric of the scores, which defines the better direction.
    """
    if not epochs or len(finished) < max(1, startup):
        return False
    now = list(epochs)[-1]
    stage = now.rpartition(" ")[0]
    best = metric.best(value for name, value in epochs.items() if name.rpartition(" ")[0] == stage)
    others = [other[now] for other in finished if now in other]
    return bool(others) and metric.lost(statistics.median(others), best) > 0
