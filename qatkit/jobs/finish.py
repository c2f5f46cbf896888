"""The stages after the last training, which only the first process runs: files, analysis, checks and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qatkit.choose.precision.mixed import draw_precision
from qatkit.jobs.analyse import analyse, planned_analysis
from qatkit.jobs.stages import Always, Conditional, State
from qatkit.jobs.verify import conclude_module, planned_verification
from qatkit.records.plan import Planned
from qatkit.run.export import write_files
from qatkit.run.folder import main_process
from qatkit.run.pace import Pace
from qatkit.run.plan import stage


class Leave(Conditional):
    """Ends the run in every process but the first."""

    def done(self, state: State) -> bool:
        return main_process()

    def run(self, state: State) -> State:
        return replace(state, status=0)


class Export(Always):
    """Writes the files of the finished module."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        first = state.run.seconds.get("export_first")  # the time of the first export of the same module
        return (stage("export", "the INT8 and the float file", lambda: pace.known(first)),)

    def run(self, state: State) -> State:
        return replace(state, written=write_files(state.run, state.data, state.captured, state.prepared))


class Analyse(Always):
    """Runs the requested analyses, and draws the front of a precision search if pictures are requested."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        return planned_analysis(state, pace)

    def run(self, state: State) -> State:
        found = analyse(state.run, state.data, state.prepared, state.exported)
        draw_precision(state.run, state.precision)
        return replace(state, analysis=found)


class Verify(Always):
    """Runs the checks, and writes the report and, if requested, the bundle."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        run, data = state.run, state.data
        simulated = ["simulated", *(["control"] if run.config.verify.control else [])]
        return planned_verification(run.config, data, pace, ["float", "int8"], simulated)

    def run(self, state: State) -> State:
        state.captured.release()
        return replace(state, status=conclude_module(state))
