"""The stages that build the module: the float models, the placement of quantizers, and the module itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import methodcaller

from qatkit.choose.algorithms import chosen_algorithms
from qatkit.choose.placement.measured import placed_before, placed_now
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.precision.mixed import check_precision
from qatkit.jobs.analyse import check_layers
from qatkit.jobs.packed_weights import check_packed
from qatkit.jobs.stages import Always, Conditional, Stage, State
from qatkit.records.plan import Planned
from qatkit.records.run_files import CHECKPOINT_FILE
from qatkit.run.build import qat_module
from qatkit.run.encodings import check_encodings
from qatkit.run.float_model import check_same, digests
from qatkit.run.folder import main_process, open_folder
from qatkit.run.loop.ranks import wait_for_first
from qatkit.run.loop.teacher import teacher_of
from qatkit.run.pace import Pace
from qatkit.run.plan import announce, stage
from qatkit.train.module import QATModule
from qatkit_verify.placement.sites import MEASURED


def module_of(state: State, *, quantize: bool = True) -> QATModule:
    """Returns a module with the algorithms and float operators that the run has chosen so far.

    Args:
        state: the state of the run.
        quantize: whether the module is quantized; False returns the float control.
    """
    config, stored = state.run.config, state.stored
    return qat_module(
        config,
        state.captured,
        state.data.inputs,
        state.module_type,
        quantize=quantize,
        algorithms=chosen_algorithms(config, stored),
        floats=chosen_floats(config, stored),
    )


class Models(Always):
    """Loads the teacher, if it is another model, and checks that a resumed run began with the same float models."""

    def run(self, state: State) -> State:
        run = state.run
        teacher = teacher_of(run.config, state.data)
        found = digests(run.config, state.model, teacher)
        check_same(run.config, run.folder, found, state.stored)
        teach = None if teacher is None else methodcaller("learn_from", state.model, teacher)
        return replace(state, begun_with=found, teach=teach)


class KnownPlaces(Always):
    """Applies a placement that is already known: from the file that `placement` names, or from the run's folder."""

    def run(self, state: State) -> State:
        run = placed_before(state.run, state.captured, state.data.inputs, state.module_type)
        return replace(state, run=run)


class Prepare(Conditional):
    """Builds the module if there is none, or if the previous one no longer applies."""

    def done(self, state: State) -> bool:
        return state.module is not None

    def run(self, state: State) -> State:
        return replace(state, module=module_of(state))


class Check(Always):
    """Checks that the module suits the teacher and the settings that name its layers, weights or tensors."""

    def run(self, state: State) -> State:
        check_layers(state.prepared, state.run.config.analysis)
        check_precision(state.prepared, state.run.config)
        check_packed(state.prepared, state.run.config)
        check_encodings(state.prepared, state.run.config)
        if state.teach is not None:
            state.teach(state.prepared)
        return state


class OpenFolder(Always):
    """Creates the run's folder with config.yaml; earlier stages write nothing."""

    def run(self, state: State) -> State:
        open_folder(state.run)
        return state


@dataclass(frozen=True)
class Announce(Conditional):
    """Announces the stages that follow, with estimates of their times."""

    later: Sequence[Stage]

    def done(self, state: State) -> bool:
        return not main_process()

    def run(self, state: State) -> State:
        run = state.run
        pace = Pace(run.config, state.data, state.model, state.module, run.speeds)
        self._rows(state, pace)  # measures, so that the second call knows the speed of the machine
        announce(run, self._rows(state, pace), crowded=pace.crowded)
        return state

    def _rows(self, state: State, pace: Pace) -> list[Planned]:
        return [row for one in self.later for row in one.planned(state, pace)]


class Places(Always):
    """Measures the placement if it is requested and not known yet; the module is then built again."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        if (state.run.asked or state.run.config).placement != MEASURED:
            return ()
        about, why = "files with other operators in float, timed", "it depends on how many files are timed"
        return (stage("placement", about, why, done=state.run.placed is not None),)

    def run(self, state: State) -> State:
        run = placed_now(state.run, state.captured, state.data.inputs, state.prepared)
        return replace(state, run=run, module=state.module if run.config is state.run.config else None)


class FirstProcess(Conditional):
    """Waits, in every process but the first, until the first one has chosen the settings of the module."""

    def done(self, state: State) -> bool:
        return main_process()

    def run(self, state: State) -> State:
        wait_for_first(state.run.folder / CHECKPOINT_FILE)
        stored = state.run.stored()
        known = state.module if stored == state.stored else None
        return replace(state, stored=stored, module=known)
