"""algorithm_choice=auto: the listed algorithms compete, as calibration methods do, and what pays is kept.

    calibrated model ─┬─ + the cheapest ──> judged on images that neither ranges nor algorithms have seen ── keep?
                      ├─ what was kept + the next ──> ...
                      └─ those that train weights, only while the target is missed beyond noise

They are tried in the order in which they are listed, and run in that of their stages. One is kept when its error of the
outputs is smaller beyond noise (the mean of the differences image by image, two standard errors) and the metric is not
worse beyond noise; so of equals the simpler model stays. A correction that a later one makes superfluous is dropped.
It ends when the target (`target.max_drop`, without labels `target.min_agreement`) is met beyond noise.
The choice is part of the checkpoint: a resumed run, and export.py, build the module with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.algorithms.blocks.journal import working
from qatkit.choose.judge import Judge, Verdict
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.ranges import Calibrated, calibrate_module, runtime_of, splits
from qatkit.config.schema import Config, TargetConfig
from qatkit.data import DataModule
from qatkit.progress import shown
from qatkit.records.run_files import CHECKPOINT_FILE, PARTIAL
from qatkit.records.scores import with_score
from qatkit.records.tried import Tried
from qatkit.run.build import example_batch, qat_module
from qatkit.run.folder import Run, read_checkpoint
from qatkit.train.module import IDLE, NOTHING, QATModule

NONE = "none"
_SURE = 2.0  # standard errors
State = dict[str, Tensor]


def chosen_algorithms(config: Config, folder: Path) -> list[str]:
    """Names of the algorithms that a module is built with: all that are listed, or those that a run has chosen."""
    if config.algorithm_choice == "all":
        return list(config.algorithm)
    path = folder / CHECKPOINT_FILE
    stored = read_checkpoint(str(path), "resume")["qatkit"] if path.is_file() else {}
    return list(stored.get("algorithms", ()))


def compete(
    run: Run, model: nn.Module, data: DataModule, module: QATModule, calibrated: Calibrated
) -> tuple[QATModule, list[Tried]]:
    """The module with the algorithms that pay, and what each gave; `module` is calibrated, without any."""
    path = run.folder / CHECKPOINT_FILE
    if path.is_file():  # what they changed is in the checkpoint
        tried = [
            Tried(**with_score(row))
            for row in read_checkpoint(str(path), "resume")["qatkit"].get("tried", ())
        ]
    else:
        with run.stage("algorithms", "algorithms compete"):
            contest = _Contest(run, model, data, module, calibrated, run.scratch)
            module, tried = contest.run()
        module.about |= {"calibrated": asdict(calibrated)}
    module.about |= {"algorithms": [row.name for row in tried if row.kept and row.name != NONE]}
    module.about |= {
        "tried": [asdict(row) for row in tried],
        IDLE: [],
    }  # who found nothing to change is told there
    return module, tried


@dataclass
class _Standing:
    """What has been kept so far."""

    names: tuple[str, ...]
    module: QATModule
    state: State
    verdict: Verdict


class _Contest:
    def __init__(
        self,
        run: Run,
        model: nn.Module,
        data: DataModule,
        module: QATModule,
        calibrated: Calibrated,
        folder: Path,
    ) -> None:
        self.config = config = run.config
        self.model, self.data, self.calibrated, self.kept = model, data, calibrated, run.folder
        self.algorithms = algorithms_of(config.algorithm)
        self.seen, held_out = splits(data, config)
        batches = data.image_batches(held_out, config.calibration.batch_size)
        example, runtime = example_batch(config, data.input_shape), runtime_of(config, module, data)
        self.judge = Judge(module.graph, example, batches, folder, runtime, "algorithms", shared=True)
        self.module_type = type(module)
        self.alone: dict[tuple[str, ...], Verdict] = {}  # of ranges without corrections
        # By the algorithms that come before calibration.
        self.ranges: dict[tuple[str, ...], tuple[QATModule, State]] = {(): (module, _copied(module))}

    def run(self) -> tuple[QATModule, list[Tried]]:
        start = time.monotonic()
        module, state = self.ranges[()]
        best = _Standing((), module, state, self.judge(module.graph, NONE))
        self.alone[()] = best.verdict
        rows = {
            NONE: self._row(NONE, best.verdict, start, kept=True, why="what the others are compared with")
        }
        for name in sorted(self.config.algorithm, key=lambda name: self.algorithms[name].expensive):
            if why := self._needless(name, best):
                rows[name] = Tried(name, why=why)
                continue
            start = time.monotonic()
            look = self._look(name, best)
            if look is not None and (why := why_not(look.verdict, self.alone[self._early(best.names)])):
                rows[name] = self._row(name, look.verdict, start, kept=False, why=f"by ranges alone: {why}")
                continue
            trial = self._with({*best.names, name}, name, best)
            why = why_not(trial.verdict, best.verdict)
            if not why:
                best = self._simpler(trial, name, rows)
            rows[name] = self._row(name, trial.verdict, start, kept=not why, why=why or "pays beyond noise")
        return self._final(best), list(rows.values())

    def _look(self, name: str, best: _Standing) -> _Standing | None:
        """Of an algorithm before the ranges, a model without the corrections behind them, which are dearer to repeat;
        None where there are none.
        """
        early = self._early(best.names)
        if self.algorithms[name].stage == CALIBRATED or early == best.names:
            return None
        return self._with({*early, name}, f"{name}, by ranges alone")

    def _early(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that come before calibration."""
        return tuple(name for name in names if self.algorithms[name].stage != CALIBRATED)

    def _needless(self, name: str, best: _Standing) -> str:
        """Why an algorithm is not tried."""
        if self._meets(best, _SURE):
            return "not tried: the target is met without it"
        if self.algorithms[name].expensive and self._meets(best, -1):
            return "not tried: it trains weights, and the target is not missed beyond noise"
        return ""

    def _simpler(self, standing: _Standing, name: str, rows: dict[str, Tried]) -> _Standing:
        """`standing`, or the same without what `name` stands in for: a correction that it makes superfluous."""
        corrections = [
            one for one in standing.names if self.algorithms[one].stage == CALIBRATED and one != name
        ]
        if not corrections or self.algorithms[name].stage != CALIBRATED:
            return standing
        without = self._with({*standing.names} - {*corrections}, f"{name} alone")
        if why_not(standing.verdict, without.verdict) == "":
            return standing
        for one in corrections:
            rows[one] = replace(rows[one], kept=False, why=f"superfluous with {name}")
        return without

    def _meets(self, standing: _Standing, sure: float) -> bool:
        return meets(standing.verdict, self.judge, self.config.target, sure)

    def _with(self, chosen: set[str], title: str, best: _Standing | None = None) -> _Standing:
        """A model with these algorithms, judged; where they are those of `best` and one behind them, it goes on."""
        names = tuple(
            name for name in self.algorithms if name in chosen
        )  # by stage: the order in which they run
        later = [name for name in names if self.algorithms[name].stage == CALIBRATED]
        module, state = self._calibrated(self._early(names))
        if best is not None and names[:-1] == best.names and module is best.module:
            state, later = best.state, later[-1:]
        module.load_state_dict(state)
        for name in later:
            self._apply(module.correct, name)
        verdict = self.judge(module.graph, title)
        if names == self._early(names):
            self.alone[names] = verdict
        return _Standing(names, module, _copied(module), verdict)

    def _calibrated(self, names: tuple[str, ...]) -> tuple[QATModule, State]:
        """A module with the algorithms that come before calibration, with its ranges."""
        if names not in self.ranges:
            module = self._built(names)
            for name in names:
                if self.algorithms[name].stage == OBSERVED:
                    self._apply(module.adjust, name)
            example = example_batch(self.config, self.data.input_shape)
            calibrate_module(module, self.data, self._plain(), example, method=self.calibrated.method)
            self.ranges[names] = (module, _copied(module))
        return self.ranges[names]

    def _plain(self) -> Config:
        """The configuration without its cache, which is of the model without algorithms."""
        return replace(self.config, calibration=replace(self.config.calibration, cache=None))

    def _built(self, names: Sequence[str]) -> QATModule:
        floats = chosen_floats(self.config, self.kept)
        return qat_module(
            self.config, self.model, self.data.input_shape, self.module_type, algorithms=names, floats=floats
        )

    def _apply(self, hook: Callable[..., None], name: str) -> None:
        algorithm = self.algorithms[name]
        batches = self.data.image_batches(self.seen[: algorithm.images], self.config.calibration.batch_size)
        progress, file = self.config.trainer.progress, self.kept / f"{name}{PARTIAL}"
        with working(progress=progress, seed=self.config.seed, file=file):
            seen = shown(batches, f"algorithms: {name}", progress)
            hook((images for images, _ in seen), [algorithm])

    def _final(self, best: _Standing) -> QATModule:
        """A module that is built with what was kept, so that it notes what these leave as it is."""
        if not best.names:
            best.module.load_state_dict(best.state)
            return best.module
        module = self._built(best.names)
        module.load_state_dict(best.state)
        return module

    def _row(self, name: str, verdict: Verdict, start: float, *, kept: bool, why: str) -> Tried:
        error = verdict.error
        decibel = None if not error else -10 * math.log10(error)
        return Tried(
            name, verdict.score, verdict.agreement, decibel, round(time.monotonic() - start, 1),
            len(verdict.same), kept, why,
        )  # fmt: skip


def meets(verdict: Verdict, judge: Judge, target: TargetConfig, sure: float) -> bool:
    """Whether the target is met, with so many standard errors to spare."""
    count = len(verdict.same)
    if judge.float_score is None or verdict.score is None:
        missing = 1 - verdict.agreement
        return (
            missing + sure * math.sqrt(missing * (1 - missing) / count + 1 / count**2)
            <= 1 - target.min_agreement
        )
    lost = judge.task.names.main.lost(judge.float_score, verdict.score)
    return lost + sure * judge.noise(verdict) <= target.max_drop


def why_not(trial: Verdict, best: Verdict) -> str:
    """Why an algorithm is not kept; "" if it pays."""
    if trial.values is not None and best.values is not None:
        worse = trial.task.worse(best.values, trial.values, _SURE)
        if worse:
            return worse
    if np.array_equal(trial.errors, best.errors):
        return NOTHING
    gain = best.errors - trial.errors
    if not np.isfinite(gain).all():
        return "its outputs are not finite" if np.isfinite(best.errors).all() else "nothing to compare with"
    noise = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    if gain.mean() > _SURE * noise:
        return ""
    return "worse" if gain.mean() < -_SURE * noise else "no difference beyond noise"


def _copied(module: QATModule) -> State:
    return {name: value.clone() for name, value in module.state_dict().items()}
