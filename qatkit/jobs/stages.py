"""A run as a list of stages on one state: each is already done and restored, or runs now.

    state ── done? ─ no ──> run ─────┬──> state of the next stage
                   └ yes ─> restore ─┘

The checkpoint is read once as a run begins (`Run.stored`) and passed on in the state: no stage looks for it.
Only processes that have waited for the first one read it again (`qatkit.jobs.prepare.FirstProcess`).
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
        model: the float model.
        captured: the same model, traced and checked once for all modules of the run.
        module_type: the type of the modules.
        stored: the entries of the run's checkpoint; None without one.
        begun_with: digests that identify the float models when the run continues (`qatkit.run.float_model`).
        teach: gives a module another teacher than its float model.
        module: None until it is built, and after a stage that requires another one.
        control: the float control, where there is one.
        status: the return value of the run; None while it continues.
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
        """The module, for stages after the one that builds it."""
        assert self.module is not None
        return self.module

    @property
    def exported(self) -> Written:
        """The files, for stages after the one that writes them."""
        assert self.written is not None
        return self.written


class Stage(Protocol):
    """A stage of a run. It does not change the state, but returns another one."""

    def done(self, state: State) -> bool:
        """Returns whether there is nothing to run: not requested, or the result is in the checkpoint."""
        ...

    def run(self, state: State) -> State:
        """Does the work."""
        ...

    def restore(self, state: State) -> State:
        """Returns the state as after `run`, from what is known without running."""
        ...

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        """Returns what the plan of the run says about this stage: a row for each time that it measures."""
        ...


class Unannounced:
    """A stage that takes no time worth a row of the plan."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        return ()


class Always(Unannounced):
    """A stage that each run runs, resumed ones too."""

    def done(self, state: State) -> bool:
        return False

    def restore(self, state: State) -> State:
        raise AssertionError(f"{type(self).__name__} always runs")


class Conditional(Unannounced):
    """A stage that leaves the state unchanged where it is not requested."""

    def restore(self, state: State) -> State:
        return state


class InCheckpoint(Unannounced):
    """A stage whose result is in the checkpoint."""

    def done(self, state: State) -> bool:
        return state.stored is not None


def begin(run: Run, data: DataModule, model: nn.Module, module_type: type[QATModule]) -> State:
    """Returns the state before the first stage."""
    return State(run, data, model, captured(run.config, model, data.inputs), module_type, run.stored())


def carry_out(stages: Iterable[Stage], state: State) -> int:
    """Runs or restores one stage after the other, until one of them ends the run; returns its status."""
    for stage in stages:
        return_freed_memory()
        state = stage.restore(state) if stage.done(state) else stage.run(state)
        if state.status is not None:
            return state.status
    raise AssertionError("the last stage ends the run")
