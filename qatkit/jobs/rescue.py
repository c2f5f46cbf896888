"""The rescue (`rescue.climb`), also called a climb: tries one method (rung) after another until the target is met.

Each rung is a complete run in its own folder.

    FOLDER/rungs/float/              the float file, and its weights if they were trained here
    FOLDER/rungs/naive/ ...          a run each: configuration, checkpoint, file, report; its output in table.txt
    FOLDER/ladder.json               the results of the rungs so far
    FOLDER/                          at the end: the files of the chosen rung, verified with the user's settings

Every figure is measured on a file in ONNX Runtime, on the test images. A rung with a report is not run again,
so a killed climb continues in the rung that was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qatkit.choose.climb import meets_target, rung_why_not
from qatkit.choose.contest import Contest, Judged
from qatkit.choose.verdict import aim
from qatkit.config.argv import one_of_many, typing
from qatkit.config.compose import save_config
from qatkit.config.schema import Config, DataConfig, TargetConfig
from qatkit.data import DataModule
from qatkit.data.preprocessing import KEYS, Preprocessing
from qatkit.encryption.vault import readable, secret
from qatkit.jobs import pipeline, quantize_file
from qatkit.jobs.rungs import NAIVE, RUNGS, Rung, RungInputs, handed_over, naive, with_choices_of
from qatkit.jobs.training import train_float
from qatkit.records.ladder import Ladder, RungResult, read_ladder, rung_result, write_ladder
from qatkit.records.run_files import (
    CHECKPOINT_FILE,
    CLIMB_FILE,
    CONFIG_FILE,
    FLOAT_FILE,
    REPORT_FILE,
    last_checkpoint,
    write_model_json,
)
from qatkit.report.ladder import advice, rung_line
from qatkit.run.export import describe, write_float_file
from qatkit.run.folder import Run, say
from qatkit.run.plan import announce, stage
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import as_typed

RUNG_FOLDERS, FLOAT_WEIGHTS, _TABLE = "rungs", "float.pt", "table.txt"
FLOAT = "float"
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def climb(config: Config) -> int:
    """Climbs from naive PTQ to the target.

    Returns 0, or 1 if the delivered file misses a bound or its bundle cannot be published.

    Raises:
        ConfigError: the user has made a mistake; this is raised before the long stages.
    """
    with pipeline.begun(config) as (run, data, model):
        return _climbed(run, data, model)


def _climbed(run: Run, data: DataModule, model: nn.Module) -> int:
    config = run.config
    run.folder.mkdir(parents=True, exist_ok=True)
    for name in (CLIMB_FILE, CONFIG_FILE):  # the second one is replaced by that of the final run
        save_config(config, run.folder / name)
    if config.schedule.float_epochs:
        train_float(run, model, data)
        config = _from_float(config, data, model, run.folder)
    climb = _Climb(config, run.folder, data, model)
    climb.announce(run)
    return climb.to_the_end()


def _from_float(config: Config, data: DataModule, model: nn.Module, folder: Path) -> Config:
    """Returns the configuration in which every rung starts from the float model trained here and its preprocessing."""
    path = folder / RUNG_FOLDERS / FLOAT / FLOAT_WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    with secret(path) as temporary, temporary.open("wb") as stream:
        torch.save(model.state_dict(), stream)
    trained = replace(config.model, weights=None, checkpoint=str(path))
    schedule = replace(config.schedule, float_epochs=0)
    prepared = _prepared(config.data, data.preprocessing) if data.of_pictures else config.data
    return replace(config, model=trained, data=prepared, schedule=schedule)


def _prepared(config: DataConfig, used: Preprocessing) -> DataConfig:
    """Returns the data settings with all preprocessing of images made explicit."""
    further = {
        key: getattr(used, name)
        for name, key in KEYS.items()
        if getattr(used, name) != getattr(Preprocessing, name)
    }
    return replace(
        config,
        image_size=as_typed(used.image_size),
        resize=as_typed(used.resize) if used.fit == "crop" else None,
        mean=list(used.mean),
        std=list(used.std),
        **further,
    )


_Rung = Judged[Config, RungResult]  # a finished rung: its configuration and its result


class _Climb:
    def __init__(self, config: Config, folder: Path, data: DataModule, model: nn.Module) -> None:
        self.asked = RungInputs(config, any(isinstance(module, _NORMS) for module in model.modules()))
        self.folder, self.data, self.model = folder, data, model
        before = read_ladder(folder)
        self.seconds = {row.name: row.seconds for row in (before.rungs if before else ())}
        self.rungs: list[RungResult] = []
        self.kept = config
        self.contest: Contest[Config, RungResult] = Contest(
            partial(rung_why_not, metric=data.task.names.main)
        )
        self.won: _Rung | None = None

    def announce(self, run: Run) -> None:
        """Announces the rungs. Durations are known only for rungs that an earlier attempt has finished."""
        rows = [
            (NAIVE[0], f"{NAIVE[1]}: {NAIVE[2]}"),
            *((one.name, f"{one.title}: {one.about}") for one in RUNGS),
        ]
        until = "climbed only while the target is missed" if not self.asked.config.rescue.full else ""
        announce(run, [stage(name, about, until, done=name in self.seconds) for name, about in rows])

    def to_the_end(self) -> int:
        """Climbs the rungs that are needed, then verifies the chosen one; returns the exit status."""
        self._start()
        for rung in RUNGS:
            self._climb(rung)
            if self.won is not None and not self.asked.config.rescue.full:
                break
        return self._hand_over()

    def _start(self) -> None:
        """Measures the float file and the naive rung, which is what a user would get without qatkit.

        Neither of them is ever delivered.
        """
        config, folder = self.asked.config, self.folder / RUNG_FOLDERS / FLOAT
        source = folder / FLOAT_FILE
        if not source.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_model_json(folder, describe(self.data))
            with secret(source) as temporary:
                write_float_file(self.model, config, self.data.inputs, temporary)
        name, title, about = NAIVE
        say(f"rescue: {title} ({about})")
        row, report = self._measured(name, title, naive(config, str(source)), quantize_file.by_tools)
        if report:
            self.rungs.append(replace(rung_result(FLOAT, FLOAT, "", report, key="float"), meets=True))
        self._add(replace(row, meets=self._meets(row)))

    def _climb(self, rung: Rung) -> None:
        config = rung.change(self.asked, self.kept)
        say(f"rescue: {rung.title} ({rung.about})")
        row, report = self._measured(rung.name, rung.title, config, self._train)
        if row.measured:
            row = self._compared(rung, Judged(rung.name, config, row, row.seconds))
        if rung.always or row.kept:
            self.kept = with_choices_of(config, report) if report else config
        self._add(row)

    def _compared(self, rung: Rung, climbed: _Rung) -> RungResult:
        """Decides whether later rungs build on this one, and whether the climb may end with it; returns its result."""
        outcome = self.contest.keep(climbed) if rung.always else self.contest.enter(climbed)
        row = replace(climbed.verdict, meets=self._meets(climbed.verdict), kept=outcome.kept, why=outcome.why)
        if row.meets and rung.ends and self.won is None:
            self.won = climbed
        return row

    def _train(self, config: Config) -> int:
        return pipeline.train(config)

    def _measured(
        self, name: str, title: str, config: Config, job: Callable[[Config], int]
    ) -> tuple[RungResult, dict[str, Any]]:
        """Runs a rung and returns its figures and report; if it makes no report, the reason for that and {}."""
        place = f"{RUNG_FOLDERS}/{name}"
        folder, start = self.folder / place, time.monotonic()
        try:
            self._run(folder, replace(config, output_dir=str(folder), export=config.export.kept()), job)
        except ConfigError as error:
            return RungResult(name, title, why=f"not possible: {error}"), {}
        seconds = self.seconds.setdefault(name, round(time.monotonic() - start, 1))
        if not (folder / REPORT_FILE).is_file():
            return RungResult(
                name, title, place, seconds=seconds, why=f"no file was written; see {place}/{_TABLE}"
            ), {}
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return replace(rung_result(name, title, place, report), seconds=seconds), report

    def _run(self, folder: Path, config: Config, job: Callable[[Config], int]) -> None:
        """Runs a rung unless it is finished, from its checkpoint if there is one; its output goes to table.txt."""
        if (folder / REPORT_FILE).is_file():
            return
        checkpoint = last_checkpoint(folder)
        if checkpoint is None and config.onnx is not None:  # such a run writes no checkpoint
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(config, resume=None if checkpoint is None else str(checkpoint))
        with (
            (folder / _TABLE).open("w", encoding="utf-8") as table,
            contextlib.redirect_stdout(table),
            typing(None),  # the report of the climb includes the rung
            one_of_many(),
        ):
            job(config)

    def _meets(self, row: RungResult) -> bool:
        return meets_target(row, self._target)

    @property
    def _target(self) -> TargetConfig:
        return aim(self.asked.config, labelled=self.data.labelled)

    def _add(self, row: RungResult) -> None:
        self.rungs.append(row)
        write_ladder(self.folder, self._ladder())
        say(f"  {rung_line(row, self.data.task.names)}")

    def _ladder(self) -> Ladder:
        target, names = self._target, self.data.task.names
        signal = "" if target.min_sqnr is None else f" and an SQNR of {target.min_sqnr:g} dB"
        wanted = (
            f"{names.main.name} at most {target.max_drop:g} {names.main.points} {names.main.below} float"
            if self.data.labelled
            else f"same {names.decision} as float on {100 * target.min_agreement:g} % of the {names.samples}{signal}"
            " (no labels)"
        )
        return Ladder(tuple(self.rungs), target=wanted, task=names)

    def _hand_over(self) -> int:
        """Verifies the first rung that meets the target, or the best one, in the climb's folder; returns the status."""
        chosen = self.won or self.contest.kept
        if chosen is None:
            reason = f"no rung can quantize this model ({self.rungs[-1].why})"
            raise ConfigError("rescue.climb", True, reason=reason)
        asked = self.asked.config
        ladder = replace(self._ladder(), chosen=chosen.name)
        write_ladder(self.folder, replace(ladder, advice=advice(ladder, asked.rescue.epochs)))
        checkpoint = self.folder / CHECKPOINT_FILE
        rung = self.folder / chosen.verdict.folder / CHECKPOINT_FILE
        with readable(rung) as plain, secret(checkpoint) as temporary:
            shutil.copyfile(plain, temporary)
        say(f"rescue: verifying the file of rung '{chosen.verdict.title}'")
        final = replace(handed_over(asked, chosen.made), output_dir=str(self.folder), resume=str(checkpoint))
        save_config(final, self.folder / CONFIG_FILE)  # a restart continues from the rung
        with one_of_many():  # the climb itself has announced its plan
            status = self._train(final)
        save_config(replace(final, resume=None), self.folder / CONFIG_FILE)
        return status
