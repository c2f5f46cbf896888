"""The stages after the last training, in the first process only: files, analysis, checks and report."""

from __future__ import annotations

from dataclasses import replace

from qatkit.choose.precision.mixed import draw_precision
from qatkit.jobs.analyse import analyse
from qatkit.jobs.stages import Always, Conditional, State
from qatkit.jobs.verify import conclude_module
from qatkit.run.export import write_files
from qatkit.run.folder import main_process


class Leave(Conditional):
    """Ends the run in every process but the first."""

    def done(self, state: State) -> bool:
        return main_process()

    def run(self, state: State) -> State:
        return replace(state, status=0)


class Export(Always):
    """Writes the files of the finished module."""

    def run(self, state: State) -> State:
        return replace(state, written=write_files(state.run, state.data, state.captured, state.prepared))


class Analyse(Always):
    """Analyses the effects of quantization on the layers, where requested."""

    def run(self, state: State) -> State:
        found = analyse(state.run, state.data, state.prepared, state.exported)
        draw_precision(state.run, state.precision)
        return replace(state, analysis=found)


class Verify(Always):
    """Runs the checks, and writes the report and the bundle."""

    def run(self, state: State) -> State:
        state.captured.release()
        return replace(state, status=conclude_module(state))
