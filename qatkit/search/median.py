"""The median stopping rule (Golovin et al., Google Vizier, KDD 2017, section 3.2), on the epochs' scores.

A trial ends early if its best score so far is worse than the median of the finished trials' scores at the
same epoch. Optuna's own MedianPruner decides the same, but rejects a study of several objectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from qatkit_verify.classification import NAMES
from qatkit_verify.records import Metric

Epochs = Mapping[str, float]  # "QAT 3" -> main metric of the task, in the order of the epochs


def falls_behind(
    epochs: Epochs, finished: Sequence[Epochs], startup: int, metric: Metric = NAMES.main
) -> bool:
    """Returns whether a trial ends here.

    Args:
        epochs: the epochs of the trial, up to now.
        finished: the epochs of the trials that reached their end.
        startup: the least number of finished trials.
        metric: which direction is better.
    """
    if not epochs or len(finished) < max(1, startup):
        return False
    now = list(epochs)[-1]
    stage = now.rpartition(" ")[0]
    best = metric.best(value for name, value in epochs.items() if name.rpartition(" ")[0] == stage)
    others = [other[now] for other in finished if now in other]
    return bool(others) and metric.lost(statistics.median(others), best) > 0
