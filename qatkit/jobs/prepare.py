"""The stages that make the module: the float models, where quantizers stand, and the module of both."""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller

from qatkit.choose.algorithms import chosen_algorithms
from qatkit.choose.placement.measured import placed_before, placed_now
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.precision.mixed import check_precision
from qatkit.jobs.analyse import check_layers
from qatkit.jobs.packed_weights import check_packed
from qatkit.jobs.stages import Always, Conditional, State
from qatkit.records.run_files import CHECKPOINT_FILE
from qatkit.run.build import qat_module
from qatkit.run.encodings import check_encodings
from qatkit.run.float_model import check_same, digests
from qatkit.run.folder import main_process, open_folder
from qatkit.run.loop.ranks import wait_for_first
from qatkit.run.loop.teacher import teacher_of
from qatkit.train.module import QATModule


def module_of(state: State, *, quantize: bool = True) -> QATModule:
    """A module with the algorithms and the float operators that the run has chosen, or begins with.

    Args:
        quantize: False makes the float control.
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
    """The float models that the run begins with: its own, and its teacher."""

    def run(self, state: State) -> State:
        run = state.run
        teacher = teacher_of(run.config, state.data)
        found = digests(run.config, state.model, teacher)
        check_same(run.config, run.folder, found, state.stored)
        teach = None if teacher is None else methodcaller("learn_from", state.model, teacher)
        return replace(state, begun_with=found, teach=teach)


class KnownPlaces(Always):
    """The placement of a file, or that the run's folder has."""

    def run(self, state: State) -> State:
        run = placed_before(state.run, state.captured, state.data.inputs, state.module_type)
        return replace(state, run=run)


class Prepare(Conditional):
    """The module, where there is none or the one before is not what the run goes on with."""

    def done(self, state: State) -> bool:
        return state.module is not None

    def run(self, state: State) -> State:
        return replace(state, module=module_of(state))


class Check(Always):
    """What is asked of the layers, what is fixed of them, and the teacher fit the module."""

    def run(self, state: State) -> State:
        check_layers(state.prepared, state.run.config.analysis)
        check_precision(state.prepared, state.run.config)
        check_packed(state.prepared, state.run.config)
        check_encodings(state.prepared, state.run.config)
        if state.teach is not None:
            state.teach(state.prepared)
        return state


class OpenFolder(Always):
    """The run's folder: until here nothing was written."""

    def run(self, state: State) -> State:
        open_folder(state.run)
        return state


class Places(Always):
    """The placement, measured now where it is asked for and not known; another module then."""

    def run(self, state: State) -> State:
        run = placed_now(state.run, state.captured, state.data.inputs, state.prepared)
        return replace(state, run=run, module=state.module if run.config is state.run.config else None)


class FirstProcess(Conditional):
    """In every process but the first: waits until that one has chosen what the module is built with."""

    def done(self, state: State) -> bool:
        return main_process()

    def run(self, state: State) -> State:
        wait_for_first(state.run.folder / CHECKPOINT_FILE)
        stored = state.run.stored()
        known = state.module if stored == state.stored else None
        return replace(state, stored=stored, module=known)
