"""Sets the accuracy level of the MatMulNBits nodes of a file (`export.accuracy_level`).

At level 0, activations stay float, as in the simulation. At level 4, ONNX Runtime rounds them to 8 bits.

    file at level 0 ── copy at level 4 ── with auto: latency and accuracy of both on calibration samples ──> chosen file

The converted PyTorch module computes level 0, so parity is always checked at level 0 (`qatkit.verify.checks.exact`).
The level of a language model's decoder is chosen separately (`qatkit.jobs.decoder`). The model's file for whole
windows stays at level 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qatkit.export.accuracy_level import FLOAT, INT8, at_level, multiplies_packed
from qatkit.jobs.stages import Conditional, State
from qatkit.records.plan import Planned
from qatkit.records.run_files import report_of
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.verify.accuracy_levels import LevelFigures, compare_levels
from qatkit.verify.checks.exact import LEVEL
from qatkit_verify.files import whole

KEY = "export.accuracy_level"
_SAMPLES = 512  # limit of samples on which both levels are compared


class ChooseLevel(Conditional):
    """Applies the requested level.

    `auto` chooses level 4 if it is faster on this machine at a small enough loss, else level 0. Samples of noise
    cannot show the loss, so `auto` then chooses level 0.
    """

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        if self.done(state):
            return ()
        images = min(state.run.config.calibration.images, _SAMPLES)
        about = f"both accuracy levels on {images:,} {state.data.task.names.samples}"
        return (stage("level", about, lambda: images * (2 * pace.file("int8") + pace.load)),)

    def done(self, state: State) -> bool:
        asked = state.run.config.export
        return asked.accuracy_level == str(FLOAT) or asked.decoder

    def run(self, state: State) -> State:
        run, asked = state.run, state.run.config.export.accuracy_level
        path = run.files / run.int8_name
        if not multiplies_packed(path):
            note = (
                f"{KEY}={asked}: the file has no products with packed weights, so the setting has no effect"
            )
            return _told(state, note, None)
        with run.stage("level", "measuring both accuracy levels"):
            rounded = run.scratch / "level_4.onnx"
            at_level(path, rounded, INT8)
            drawn = state.data.splits.drawn
            found = None if drawn and asked == "auto" else _measured(state, path, rounded)
            level = INT8 if asked == str(INT8) or (found is not None and found.pays) else FLOAT
            if level == INT8:
                with whole(path) as temporary:
                    temporary.write_bytes(rounded.read_bytes())
            rounded.unlink()
        if found is None:
            why = "the cost of level 4 can only be measured on real samples"
            return _told(state, f"{KEY}=auto: level 0 is chosen, since {why}", level)
        chosen = f": level {level} is chosen" if asked == "auto" else ""
        return _told(state, f"{KEY}={asked}{chosen}; {found.text(state.data.task)}", level, found)


def _measured(state: State, exact: Path, rounded: Path) -> LevelFigures:
    data, config = state.data, state.run.config
    wanted, images = config.verify, min(config.calibration.images, _SAMPLES)
    return compare_levels(
        (exact, rounded),
        data.calibration_batches(images, data.rows(config.calibration.batch_size)),
        data.inputs.timed(wanted.latency_batch),
        data.task,
        labelled=data.labelled,
        batch=wanted.latency_batch,
        threads=wanted.threads,
        runs=wanted.latency_runs,
    )


def _told(state: State, note: str, level: int | None, found: LevelFigures | None = None) -> State:
    """Returns the state with the note, and with the level and its figures for the report and the manifest."""
    written = state.exported
    figures = {} if level is None else {"level": level, "asked": state.run.config.export.accuracy_level}
    if found is not None:
        figures |= found.as_dict()
    return replace(state, written=replace(written, notes=(*written.notes, note), level=figures))


def level_of_run(folder: Path) -> int:
    """Returns the accuracy level of a finished run's file from its report; 0 if no level is reported."""
    measured = (report_of(folder) or {}).get("measured") or {}
    return int((measured.get(LEVEL) or {}).get("level", FLOAT))
