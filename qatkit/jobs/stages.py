"""A run as a list of stages on a state. A stage that is already done is restored; the others run.

    state ── done? ─ no ──> run ─────┬──> state of the next stage
                   └ yes ─> restore ─┘

The checkpoint is read once at the start of a run (`Run.stored`) and is part of the state, so no stage
searches for it. Only processes that have waited for the first one read it again
(`qatkit.jobs.prepare.FirstProcess`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from qatkit.choose.ranges import Calibrated
from qatkit.data import DataModule
from qatkit.graph.captured import Captured
from qatkit.records.analysis import Analysis
from qatkit.records.plan import Planned
from qatkit.records.precision import Precision
from qatkit.records.tried import Tried
from qatkit.run.allocator import return_freed_memory
from qatkit.run.build import captured
from qatkit.run.export import Written
from qatkit.run.folder import Run
from qatkit.run.pace import Pace
from qatkit.train.module import QATModule


@dataclass(frozen=True)
class State:
    """The state of a run.

    Attributes:
        run: the run.
        data: the data of the run.
        model: the float model.
        captured: the same model, traced and checked once for all modules of the run.
        module_type: the class of the modules.
        stored: the entries of the run's checkpoint; None without one.
        begun_with: the digests that identify the float models when the run resumes
            (`qatkit.run.float_model`).
        teach: a function that sets another teacher than the float model on a module; None if there is no
            other.
        module: the prepared module; None until it is built, and after a stage that requires another one.
        calibrated: the results of the calibration.
        tried: the algorithms that algorithm_choice=auto has tried, with their results.
        precision: the result of the choice of float operators.
        control: the float control, if there is one.
        written: the exported files, once they are written.
        analysis: the results of the analyses, if there are any.
        status: the exit status of the run; None while it continues.
    """

    run: Run
    data: DataModule
    model: nn.Module
    captured: Captured
    module_type: type[QATModule]
    stored: Mapping[str, Any] | None = None
    begun_with: Mapping[str, str] = field(default_factory=dict)
    teach: Callable[[QATModule], None] | None = None
    module: QATModule | None = None
    calibrated: Calibrated = Calibrated()  # noqa: RUF009  frozen
    tried: tuple[Tried, ...] = ()
    precision: Precision | None = None
    control: QATModule | None = None
    written: Written | None = None
    analysis: Analysis | None = None
    status: int | None = None

    @property
    def prepared(self) -> QATModule:
        """The module, which exists after the stage that builds it."""
        assert self.module is not None
        return self.module

    @property
    def exported(self) -> Written:
        """The exported files, which exist after the stage that writes them."""
        assert self.written is not None
        return self.written


class Stage(Protocol):
    """A stage of a run. It does not modify a state but returns a new one."""

    def done(self, state: State) -> bool:
        """Returns whether the stage need not run, since it is not requested or its result is in the checkpoint."""
        ...

    def run(self, state: State) -> State:
        """Runs the stage; returns the state with its results."""
        ...

    def restore(self, state: State) -> State:
        """Returns the same state as `run`, from stored results."""
        ...

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        """Returns the rows of this stage in the plan of the run, one for each part that is timed separately."""
        ...


class Unannounced:
    """A stage that is too short for a row in the plan."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        return ()


class Always(Unannounced):
    """A stage that every run executes, including resumed ones."""

    def done(self, state: State) -> bool:
        return False

    def restore(self, state: State) -> State:
        raise AssertionError(f"{type(self).__name__} always runs")


class Conditional(Unannounced):
    """A stage that leaves the state unchanged if it is not requested."""

    def restore(self, state: State) -> State:
        return state


class InCheckpoint(Unannounced):
    """A stage whose result the checkpoint contains, so that it is restored as soon as there is a checkpoint."""

    def done(self, state: State) -> bool:
        return state.stored is not None


def begin(run: Run, data: DataModule, model: nn.Module, module_type: type[QATModule]) -> State:
    """Returns the state before the first stage."""
    return State(run, data, model, captured(run.config, model, data.inputs), module_type, run.stored())


def carry_out(stages: Iterable[Stage], state: State) -> int:
    """Runs or restores one stage after another until one ends the run; returns the exit status of the run."""
    for stage in stages:
        return_freed_memory()
        state = stage.restore(state) if stage.done(state) else stage.run(state)
        if state.status is not None:
            return state.status
    raise AssertionError("the last stage ends the run")
