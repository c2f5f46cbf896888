"""The stages that may replace the module by a better one: with fewer algorithms, or with more operators in float."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from qatkit.choose.algorithms import about_algorithms, compete
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.precision.mixed import about_precision, mix
from qatkit.jobs.stages import InCheckpoint, State
from qatkit.records.plan import Planned
from qatkit.records.precision import Precision
from qatkit.records.scores import with_score
from qatkit.records.tried import Tried
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.train.module import QATModule
from qatkit_verify.errors import counted


class Compete(InCheckpoint):
    """Keeps only the algorithms that improve the result (algorithm_choice=auto)."""

    def run(self, state: State) -> State:
        run = state.run
        if run.config.algorithm_choice != "auto":
            return state
        module, tried = compete(run, state.captured, state.data, state.prepared, state.calibrated)
        return self._with(state, module, tried)

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        config = state.run.config
        if config.algorithm_choice != "auto":
            return ()
        about = f"{counted(len(config.algorithm), 'algorithm')}, each as a file"
        return (stage("algorithms", about, "it ends when the target is met", done=self.done(state)),)

    def restore(self, state: State) -> State:
        assert state.stored is not None
        if state.run.config.algorithm_choice != "auto":
            return state
        tried = [Tried(**with_score(row)) for row in state.stored.get("tried", ())]
        return self._with(state, state.prepared, tried)

    def _with(self, state: State, module: QATModule, tried: Sequence[Tried]) -> State:
        module.about |= about_algorithms(tried)
        return replace(state, module=module, tried=tuple(tried))


class Mix(InCheckpoint):
    """Chooses the operators that stay float, by a point of an earlier front or by the search of precision=auto."""

    def run(self, state: State) -> State:
        run = state.run
        if run.config.precision.search == "none":
            return self._as_configured(state)
        module, found = mix(run, state.captured, state.data, state.prepared, state.calibrated)
        return self._with(state, module, found)

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        if state.run.config.precision.search == "none":
            return ()
        about = "files with other operators in float"
        return (stage("precision", about, "it depends on the front", done=self.done(state)),)

    def restore(self, state: State) -> State:
        assert state.stored is not None
        if state.run.config.precision.search == "none":
            return self._as_configured(state)
        return self._with(state, state.prepared, Precision.from_dict(state.stored["precision"]))

    def _as_configured(self, state: State) -> State:
        state.prepared.about |= {"floats": _joined(state, chosen_floats(state.run.config, state.stored))}
        return state

    def _with(self, state: State, module: QATModule, found: Precision) -> State:
        module.about |= about_precision(found)
        module.about["floats"] = _joined(state, module.about["floats"])
        return replace(state, module=module, precision=found)


def _joined(state: State, floats: Iterable[str]) -> list[str]:
    """Returns the float operators for the checkpoint: those that calibration left float, followed by `floats`."""
    return list(dict.fromkeys([*state.calibrated.floats, *floats]))
