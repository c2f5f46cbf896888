"""A trial that a worker has claimed: stores the scores of its epochs and its outcome in the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from qatkit.config.schema import SearchConfig
from qatkit.records.objectives import constraints, finite
from qatkit.search.median import falls_behind
from qatkit.search.storage import StorageError, answering
from qatkit_verify.classification import NAMES
from qatkit_verify.records import Metric

_BY_EPOCHS = ("accuracy", "drop")  # metrics for which the score of an epoch matters


class Claimed:
    """A trial that this worker has claimed: it belongs to the worker until the end of its `with` block.

    Args:
        study: the study that contains the trial.
        asked: the settings of the search.
        frozen: the trial as the study stores it.
        folder: the folder of the trial's run.
        lock: the lock of this folder, which is already held; the end of the block releases it.
        metric: the metric of the epochs' scores.

    Attributes:
        number, values: the number of the trial and its proposed settings.
        folder: the folder of the trial's run.
        epochs: the scores so far, by stage and epoch.
        attempts: the number of starts, including this one, without those that `uncount` subtracted.

    Raises:
        StorageError: the storage failed. Every method except `uncount` may raise it.
    """

    def __init__(
        self,
        study: optuna.Study,
        asked: SearchConfig,
        frozen: FrozenTrial,
        folder: Path,
        lock: ExitStack,
        metric: Metric = NAMES.main,
    ) -> None:
        self._metric = metric
        self._study, self._asked, self._lock = study, asked, lock
        self._trial = optuna.trial.Trial(study, frozen._trial_id)
        self.number, self.values, self.folder = frozen.number, dict(frozen.params), folder
        self.epochs: dict[str, float] = dict(frozen.user_attrs.get("epochs", {}))
        self.attempts: int = frozen.user_attrs.get("attempts", 0)

    def __enter__(self) -> Self:
        if self._uncounted.exists():  # the stored count already includes this start
            self._uncounted.unlink()
        else:
            self._count(+1)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def uncount(self) -> None:
        """Subtracts this start from the number of attempts, since the worker was not killed.

        If the storage does not answer, a file in the trial's folder tells the worker that continues the trial not to
        count its own start. If the trial is already finished in the study, nothing changes.
        """
        try:
            with suppress(UpdateFinishedTrialError):
                self._count(-1)
        except (StorageError, OSError):
            with suppress(OSError):
                self._uncounted.touch()

    def _count(self, by: int) -> None:
        self.attempts += by
        with answering(self._asked.storage):
            self._trial.set_user_attr("attempts", self.attempts)

    @property
    def _uncounted(self) -> Path:
        return self.folder / ".uncounted"

    def epoch(self, stage: str, epoch: int, score: float) -> bool:
        """Stores the score of an epoch; returns whether the trial should be pruned now."""
        self.epochs[f"{stage} {epoch}"] = score
        with answering(self._asked.storage):
            return self._ends_at(score)

    def _ends_at(self, score: float) -> bool:
        self._trial.set_user_attr("epochs", self.epochs)
        if self._asked.objectives == ["accuracy"] and len(self.epochs) - 1 not in self._reported():
            self._trial.report(score, len(self.epochs) - 1)  # the sampler ranks pruned trials by this score
        aims = {*self._asked.objectives, *(bound.name for bound in constraints(self._asked.constraints))}
        if not self._asked.prune or aims.isdisjoint(_BY_EPOCHS):
            return False
        finished = [one.user_attrs.get("epochs", {}) for one in of_state(self._study, TrialState.COMPLETE)]
        return falls_behind(self.epochs, finished, self._asked.startup, self._metric)

    def _reported(self) -> set[int]:
        return set(self._study._storage.get_trial(self._trial._trial_id).intermediate_values)

    def complete(
        self, figures: Mapping[str, float], tested: Mapping[str, float], shortfalls: Sequence[str] = ()
    ) -> None:
        """Marks the trial as complete, and stores its results.

        Args:
            figures: the metrics on held-out training images, by name.
            tested: the metrics on test images, by name.
            shortfalls: the shortfalls that the run reported.
        """
        told = [finite(name, figures[name]) for name in self._asked.objectives]
        with answering(self._asked.storage):
            self._trial.set_user_attr("figures", dict(figures))
            self._trial.set_user_attr("tested", dict(tested))
            self._trial.set_user_attr("shortfalls", list(shortfalls))
            for bound in constraints(self._asked.constraints):
                if bound.key not in self._trial.constraints:
                    self._trial.set_constraint(bound.key, bound.excess(figures))
            self._study.tell(self.number, told)

    def prune(self) -> None:
        """Marks the trial as pruned."""
        with answering(self._asked.storage):
            self._study.tell(self.number, state=TrialState.PRUNED)

    def fail(self, reason: str) -> None:
        """Marks the trial as failed for a reason; it is not tried again."""
        with answering(self._asked.storage):
            self._trial.set_user_attr("reason", reason)
            self._study.tell(self.number, state=TrialState.FAIL)


def of_state(study: optuna.Study, state: TrialState) -> list[FrozenTrial]:
    """Returns the trials in a state, as the study stores them."""
    found: list[FrozenTrial] = study.get_trials(deepcopy=False, states=(state,))
    return found
