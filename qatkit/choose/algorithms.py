"""The contest of the listed algorithms (algorithm_choice=auto), which keeps only those that improve the result.

    calibrated model ─┬─ + the first ──> judged on images that neither ranges nor algorithms have seen ── keep?
                      ├─ the kept ones + the next ──> ...
                      └─ those that train weights, only while the target is missed beyond noise

Algorithms are tried in the order of the list, those that train weights last. They run in the order of their
stages. An algorithm is kept if it reduces the error of the outputs beyond noise (two standard errors of the mean
difference per image) and does not worsen the metric beyond noise. Among equals the simpler model is kept. A
correction (an algorithm after calibration) that a later one makes redundant is dropped. The contest ends when
the target is met beyond noise (`target.max_drop`; without labels `target.min_agreement`). The choice is part
of the checkpoint: a resumed run and export.py build the module with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.algorithms.blocks.journal import working
from qatkit.choose.contest import Contest, Entrant, Judged, Outcome, judged
from qatkit.choose.judge import Judge
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.ranges import Calibrated, calibrate_module, runtime_of, splits
from qatkit.choose.verdict import SURE, Verdict, aim, meets, why_not
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.graph.captured import Captured
from qatkit.progress import shown
from qatkit.records.run_files import PARTIAL
from qatkit.records.tried import Tried
from qatkit.run.allocator import return_freed_memory
from qatkit.run.build import example_batch, qat_module
from qatkit.run.folder import Run
from qatkit.train.module import RAN, QATModule

NONE = "none"
State = dict[str, Tensor]


def chosen_algorithms(config: Config, stored: Mapping[str, Any] | None) -> list[str]:
    """Returns the names of the algorithms with which a module is built: the chosen ones of a run, or all listed ones.

    With algorithm_choice=auto, there are none before the run has chosen.

    Args:
        config: the configuration of the run.
        stored: the run's entries in its checkpoint (`qatkit.run.folder.Run.stored`); None without a checkpoint.
    """
    if config.algorithm_choice == "all":
        return list(config.algorithm)
    return list((stored or {}).get("algorithms", ()))


def compete(
    run: Run, model: Captured, data: DataModule, module: QATModule, calibrated: Calibrated
) -> tuple[QATModule, list[Tried]]:
    """Returns the module with the algorithms that improve the result, and the results of all algorithms.

    Args:
        run: the run.
        model: the captured float model.
        data: the data of the run.
        module: a calibrated module without algorithms.
        calibrated: the results of its calibration.
    """
    with run.stage("algorithms", "algorithms compete"):
        module, tried = _Competition(run, model, data, module, calibrated, run.scratch).run()
    module.about |= {"calibrated": asdict(calibrated)}
    return module, tried


def about_algorithms(tried: Sequence[Tried]) -> dict[str, Any]:
    """Returns the checkpoint entries that record a contest.

    The entry RAN is empty, since `tried` contains the result of each algorithm.
    """
    names = [row.name for row in tried if row.kept and row.name != NONE]
    return {"algorithms": names, "tried": [asdict(row) for row in tried], RAN: []}


@dataclass(frozen=True)
class _Model:
    """A module with some algorithms, and its state after they have run."""

    names: tuple[str, ...]
    module: QATModule
    state: State


_Trial = Judged[_Model, Verdict]


class _Competition:
    def __init__(
        self,
        run: Run,
        model: Captured,
        data: DataModule,
        module: QATModule,
        calibrated: Calibrated,
        folder: Path,
    ) -> None:
        self.config = config = run.config
        self.model, self.data, self.calibrated, self.folder = model, data, calibrated, run.folder
        self.algorithms = algorithms_of(config.algorithm)
        self.seen, held_out = splits(data, config)
        batches = data.image_batches(held_out, config.calibration.batch_size)
        example, runtime = example_batch(config, data.inputs), runtime_of(config, module, data)
        self.judge = Judge(module.graph, example, batches, folder, runtime, "algorithms", shared=True)
        self.exact = self.judge.of_float()
        self.module_type = type(module)
        self.contest: Contest[_Model, Verdict] = Contest(why_not, "improves beyond noise")
        self.alone: dict[tuple[str, ...], Verdict] = {}  # verdicts without corrections
        # Calibrated modules by the names of the algorithms that come before calibration.
        self.ranges: dict[tuple[str, ...], tuple[QATModule, State]] = {(): (module, _copied(module))}

    @property
    def kept(self) -> _Trial:
        """The kept model, to which the next algorithm is added."""
        assert self.contest.kept is not None
        return self.contest.kept

    def run(self) -> tuple[QATModule, list[Tried]]:
        contest = self.contest
        contest.keep(self._judged(set(), NONE), "baseline of the others")
        for name in sorted(self.config.algorithm, key=lambda name: self.algorithms[name].expensive):
            if why := self._needless(name):
                contest.leave_out(name, why)
                continue
            look = self._look(name)
            early = self._early(self.kept.made.names)
            if look is not None and (why := why_not(look.verdict, self.alone[early])):
                contest.reject(replace(look, name=name), f"with ranges only: {why}")
                continue
            trial = self._judged({*self.kept.made.names, name}, name, self.kept.made)
            spent = trial.seconds + (look.seconds if look else 0)
            if contest.enter(replace(trial, seconds=spent)).kept:
                self._simplify(name)
        return self._final(self.kept.made), [_row(one) for one in contest.outcomes.values()]

    def _look(self, name: str) -> _Trial | None:
        """Tries an algorithm of an early stage without the corrections after calibration, which are costly to repeat.

        Returns:
            The trial; None if the model has no corrections, or if the algorithm is a correction.
        """
        early = self._early(self.kept.made.names)
        if self.algorithms[name].stage == CALIBRATED or early == self.kept.made.names:
            return None
        return self._judged({*early, name}, f"{name}, with ranges only")

    def _early(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the algorithms in `names` that run before calibration."""
        return tuple(name for name in names if self.algorithms[name].stage != CALIBRATED)

    def _needless(self, name: str) -> str:
        """Returns the reason why an algorithm is not tried; "" if it is tried."""
        if self._meets(SURE):
            return "not tried: the target is met without it"
        if self.algorithms[name].expensive and self._meets(-1):
            return "not tried: it trains weights, and the target is not missed beyond noise"
        return ""

    def _meets(self, sure: float) -> bool:
        return meets(self.kept.verdict, self.exact, aim(self.config, labelled=self.data.labelled), sure)

    def _simplify(self, name: str) -> None:
        """Drops the corrections that `name`, which was just kept, makes redundant."""
        names = self.kept.made.names
        corrections = [one for one in names if self.algorithms[one].stage == CALIBRATED and one != name]
        if corrections and self.algorithms[name].stage == CALIBRATED:
            without = self._judged({*names} - {*corrections}, f"only {name}")
            self.contest.yield_to(without, corrections, f"redundant with {name}")

    def _judged(self, chosen: set[str], title: str, standing: _Model | None = None) -> _Trial:
        """Builds and judges a model with the chosen algorithms, if possible from the state of `standing`."""
        # Sorted by stage, which is the order in which they run.
        names = tuple(name for name in self.algorithms if name in chosen)
        made = Entrant(title, partial(self._made, names, standing))
        trial = judged(made, lambda model, title: self.judge(model.module.graph, title))
        if names == self._early(names):
            self.alone[names] = trial.verdict
        return trial

    def _made(self, names: tuple[str, ...], standing: _Model | None) -> _Model:
        later = [name for name in names if self.algorithms[name].stage == CALIBRATED]
        module, state = self._calibrated(self._early(names))
        if standing is not None and names[:-1] == standing.names and module is standing.module:
            state, later = standing.state, later[-1:]
        module.load_state_dict(state)
        for name in later:
            self._apply(module.correct, name)
        return _Model(names, module, _copied(module))

    def _calibrated(self, names: tuple[str, ...]) -> tuple[QATModule, State]:
        """Returns a calibrated module with the named algorithms, which run before calibration, and its state."""
        if names not in self.ranges:
            module = self._built(names)
            for name in names:
                if self.algorithms[name].stage == OBSERVED:
                    self._apply(module.adjust, name)
            example = example_batch(self.config, self.data.inputs)
            calibrate_module(module, self.data, self._plain(), example, method=self.calibrated.method)
            self.ranges[names] = (module, _copied(module))
        return self.ranges[names]

    def _plain(self) -> Config:
        """Returns the configuration without its calibration cache, which belongs to the model without algorithms."""
        return replace(self.config, calibration=replace(self.config.calibration, cache=None))

    def _built(self, names: Sequence[str]) -> QATModule:
        floats = chosen_floats(self.config, None)
        return qat_module(
            self.config, self.model, self.data.inputs, self.module_type, algorithms=names, floats=floats
        )

    def _apply(self, hook: Callable[..., None], name: str) -> None:
        algorithm = self.algorithms[name]
        batches = self.data.image_batches(self.seen[: algorithm.images], self.config.calibration.batch_size)
        progress, file = self.config.trainer.progress, self.folder / f"{name}{PARTIAL}"
        between = partial(return_freed_memory, cycles=False)
        with working(progress=progress, seed=self.config.seed, file=file, between=between):
            seen = shown(batches, f"algorithms: {name}", progress)
            hook((images for images, _ in seen), [algorithm])

    def _final(self, kept: _Model) -> QATModule:
        """Builds a module with the kept algorithms, which records the operators that they do not change."""
        module = self._built(kept.names) if kept.names else kept.module
        module.load_state_dict(kept.state)
        return module


def _row(outcome: Outcome[Verdict]) -> Tried:
    verdict = outcome.verdict
    if verdict is None:
        return Tried(outcome.name, why=outcome.why)
    return Tried(
        outcome.name, verdict.score, verdict.agreement, verdict.sqnr_db, round(outcome.seconds, 1),
        len(verdict.same), outcome.kept, outcome.why,
    )  # fmt: skip


def _copied(module: QATModule) -> State:
    return {name: value.clone() for name, value in module.state_dict().items()}
