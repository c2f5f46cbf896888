"""A study that several workers share through a storage of Optuna and locks in a common folder.

    FOLDER/study.db (or study.journal, or a database)     Optuna's storage of trials, proposals and metrics
    FOLDER/.claim       a lock that a worker holds while it claims a trial, so that no trial is claimed twice
    FOLDER/trials/7/    the folder of a run, locked by the worker that runs it until this worker ends

A trial that is stored as running although its folder is not locked belonged to a worker that was killed or stopped. The
next worker that claims a trial continues it from its last checkpoint, under the same number. No trial is lost and none
is counted twice. Optuna's own method, which copies a failed trial after missing heartbeats, counts the trial twice, has
to wait for the heartbeat, and does not support checkpoints.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from qatkit.config.schema import SearchConfig
from qatkit.config.search_space import Axis, Numbers, differences
from qatkit.records.objectives import constraints, objectives_of
from qatkit.records.study import Study, Trial
from qatkit.run.lock import locked
from qatkit.search.claimed import Claimed, of_state
from qatkit.search.proposals import possible, proposal
from qatkit.search.storage import answering, driver, storage_of
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_json

FOLDER_FILE, TRIALS = "study.json", "trials"
_CLAIM = ".claim"
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class SharedStudy:
    """The study in a folder, which is opened or created.

    Args:
        asked: the settings of the search.
        axes: the axes of the search space.
        name: the name of the study in its storage.
        folder: the folder that all workers share.
        seed: the seed of the proposals.
        settings: the settings that all runs share (`settings_of`); they must equal those of an existing study.

    Attributes:
        optuna: the study in Optuna.
        task: the names of the task and its metrics.

    Raises:
        ConfigError: the storage or the folder cannot be used, or the existing study has other settings or another
            folder. If the storage fails later, methods raise a StorageError.
    """

    def __init__(
        self,
        asked: SearchConfig,
        axes: Sequence[Axis],
        name: str,
        folder: Path,
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.asked, self.axes, self.name, self.folder, self.seed = asked, axes, name, folder, seed
        self.task = task_of(str(settings.get("task", "classification"))).names
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._alone():
                self.optuna = self._opened()
                self._compare(settings)
        except ConfigError:
            if made:
                with suppress(OSError):
                    (folder / _CLAIM).unlink()
                    folder.rmdir()
            raise

    def _opened(self) -> optuna.Study:
        known = objectives_of(self.task)
        directions = ["maximize" if known[name].largest else "minimize" for name in self.asked.objectives]
        try:
            storage = storage_of(self.asked.storage, self.folder)
            if self.name in optuna.study.get_all_study_names(storage):
                return optuna.load_study(study_name=self.name, storage=storage)
            self._check_unused()
            return optuna.create_study(study_name=self.name, storage=storage, directions=directions)
        except ImportError as error:
            reason = f"the driver of this database is not installed{driver(error)}"
            raise ConfigError("search.storage", self.asked.storage, reason=reason) from error
        except ConfigError:
            raise
        except Exception as error:  # from Optuna, SQLAlchemy, a driver or the disk
            reason = f"the storage cannot be opened ({first_line(error)})"
            raise ConfigError("search.storage", self.asked.storage, reason=reason) from error

    def _check_unused(self) -> None:
        """Checks that the folder of a new study has no trials, whose reports it would take for its own."""
        if any((self.folder / TRIALS).glob("*")):
            allowed = f"a folder without trials, since the study {self.name} is new"
            raise ConfigError("output_dir", self.folder, allowed)

    def _compare(self, settings: Mapping[str, Any]) -> None:
        """Checks that the study has the requested settings and this folder; a new study stores both."""
        asked = {
            "space": {axis.key: _entry(axis) for axis in self.axes},
            "objectives": list(self.asked.objectives),
            "constraints": sorted(bound.key for bound in constraints(self.asked.constraints)),
            "settings": dict(settings),
        }
        asked = json.loads(json.dumps(asked, default=str))
        there = self.optuna.user_attrs.get("asked")
        if there is None:
            mark = secrets.token_hex(8)
            write_text(self.folder / FOLDER_FILE, json.dumps({"study": self.name, "mark": mark}) + "\n")
            self.optuna.set_user_attr("mark", mark)
            self.optuna.set_user_attr("asked", asked)
            return
        another = self._advice()
        for part, name in (("space", "space"), ("settings", "configuration")):
            if found := differences(there[part], asked[part]):
                reason = f"the study in this folder has another {name} ({found}); {another}"
                raise ConfigError("output_dir", self.folder, reason=reason)
        for part in ("objectives", "constraints"):
            if there[part] != asked[part]:
                known, given = (f"[{', '.join(one[part])}]" for one in (there, asked))
                allowed = f"{known}, as in the study in {self.folder}; {another}"
                raise ConfigError(f"search.{part}", given, allowed)
        if _mark(self.folder) != self.optuna.user_attrs.get("mark"):
            allowed = f"the folder of the study {self.name}, which all workers must share; {another}"
            raise ConfigError("output_dir", self.folder, allowed)

    def _advice(self) -> str:
        """Returns advice on how to get the requested study, for the end of a message."""
        inside = self.asked.storage in (None, "journal")
        if inside and all(one.state == TrialState.FAIL for one in self.optuna.get_trials(deepcopy=False)):
            return f"none of its trials finished, so remove {self.folder} to start over"
        return "for a new study, set another name and output_dir"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one worker at a time open the study or claim a trial; others wait for the end of the context.

        Raises:
            ConfigError: the file system has no locks.
        """
        import fcntl  # does not exist on Windows

        descriptor = os.open(self.folder / _CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            if error.filename is not None:
                raise
            allowed = f"a folder on a file system with file locks ({error.strerror})"
            raise ConfigError("output_dir", self.folder, allowed) from error
        finally:
            os.close(descriptor)

    def trial_folder(self, number: int) -> Path:
        """Returns the folder of a trial's run."""
        return self.folder / TRIALS / str(number)

    def claim(self) -> Claimed | None:
        """Returns a trial to continue, or a new one; None if there are enough trials or every point has one."""
        with answering(self.asked.storage), self._alone():
            for frozen in of_state(self.optuna, TrialState.RUNNING):
                if (claimed := self._taken(frozen)) is not None:
                    return claimed
            trials = self.optuna.get_trials(deepcopy=False)
            if len(trials) >= self.asked.trials:
                return None
            # The number of trials is part of the seed, so that no two workers, nor a restarted one, propose the same.
            seed = (self.seed * 1_000_003 + len(trials)) % 2**32
            proposed = proposal(self.optuna, trials, self.axes, seed, self.asked.startup)
            if proposed is None:
                return None
            self.optuna.add_trial(proposed)
            return self._taken(self.optuna.get_trials(deepcopy=False)[-1])

    def _taken(self, frozen: FrozenTrial) -> Claimed | None:
        """Locks a trial's folder and returns the trial; None if it belongs to another worker or is finished."""
        lock = ExitStack()
        folder = self.trial_folder(frozen.number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.enter_context(locked(folder))
        except ConfigError:
            return None
        if self.optuna._storage.get_trial(
            frozen._trial_id
        ).state.is_finished():  # its worker has just finished it
            lock.close()
            return None
        return Claimed(self.optuna, self.asked, frozen, folder, lock, self.task.main)

    def records(self) -> Study:
        """Returns the current records of the study."""
        with answering(self.asked.storage):
            return self._records()

    def _records(self) -> Study:
        every = self.optuna.get_trials(deepcopy=False)
        complete = any(one.state == TrialState.COMPLETE for one in every)
        front = {one.number for one in self.optuna.best_trials} if complete else set()
        trials = [_record(one, one.number in front) for one in every]
        bounds = [bound.key for bound in constraints(self.asked.constraints)]
        objectives, most = tuple(self.asked.objectives), possible(self.axes)
        return Study(self.name, objectives, bounds, trials, self.asked.trials, most, self.task)


def _mark(folder: Path) -> str | None:
    try:
        found = read_json(folder / FOLDER_FILE)
    except (OSError, ValueError):
        return None
    return found.get("mark") if isinstance(found, dict) else None


def _entry(axis: Axis) -> Any:
    """Returns an axis as the study stores it."""
    if isinstance(axis, Numbers):
        return {
            key: value for key, value in vars(axis).items() if key != "key" and value not in (None, False)
        }
    return list(axis.values)


def _record(one: FrozenTrial, front: bool) -> Trial:
    told = one.user_attrs
    return Trial(
        number=one.number,
        state=_STATES.get(one.state, "running"),
        values=dict(one.params),
        figures=told.get("figures", {}),
        tested=told.get("tested", {}),
        epochs=told.get("epochs", {}),
        feasible=all(excess <= 0 for excess in one.constraints.values()),
        front=front,
        attempts=told.get("attempts", 1),
        reason=told.get("reason", ""),
        shortfalls=told.get("shortfalls", ()),
        folder=f"{TRIALS}/{one.number}",
    )
