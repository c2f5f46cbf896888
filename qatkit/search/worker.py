"""A worker of a search: claims one trial after another, and runs the whole pipeline for it in the trial's folder.

    claim ──> compose the overrides ──> run (or resume from its checkpoint) ──> metrics of its report ──> the study
                                         └ score of each epoch ──> the trial is pruned if it falls behind

Objectives and constraints are measured on held-out training images (`verify.validation`). Test images do not influence
the search.

A trial whose worker was killed or stopped by a signal is continued by the next worker that claims a trial. If
the run raises an error (other than of the disk or the storage), writes no report or lacks a metric, the trial
is marked as failed, with the reason, and the search continues. A trial is an ordinary run, with `config.yaml`
and `report.json` in its folder.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qatkit.algorithms.base import algorithms_of
from qatkit.config.argv import one_of_many, typing
from qatkit.config.field_types import hint_of
from qatkit.config.schema import Config, SearchConfig
from qatkit.config.search_space import Axis, Value, axes, hint_in_schema, override
from qatkit.data import DataModule
from qatkit.jobs.checks import check_job
from qatkit.jobs.verify import checks_of
from qatkit.records.objectives import OBJECTIVES, constraints, figures, of_test_images
from qatkit.records.run_files import CONTROL_CHECKPOINT, report_of
from qatkit.records.study import Study, Trial
from qatkit.report.search_page import PAGE, write_search_page
from qatkit.report.search_text import print_study, trial_line
from qatkit.run.build import opened_data
from qatkit.run.build_model import built
from qatkit.run.find import going_on
from qatkit.run.folder import say
from qatkit.run.loop.epoch_listener import Pruned, listening
from qatkit.search.claimed import Claimed
from qatkit.search.shared_settings import settings_of
from qatkit.search.storage import StorageError
from qatkit.search.study import SharedStudy
from qatkit.verify.checks.base import load_checks
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError, as_typed, counted, disk_error, first_line
from qatkit_verify.files import write_text

Compose = Callable[[Sequence[str]], Config]
_TABLE, _TRACEBACK = "table.txt", "error.txt"
_OF_LABELS = ("accuracy", "drop")
_OF_IMAGES = ("data", "data.source", "data.root", "recipe")  # keys that may change the images
_HOPELESS = 3  # number of failed trials without a finished one that ends the search


def work(config: Config, typed: Sequence[str], compose: Compose, job: Callable[[Config], int | None]) -> int:
    """Runs trials until there are as many as requested, or no point of the space is left.

    Args:
        config: the configuration that the trials change; its output folder is that of the study.
        typed: the overrides of the command line.
        compose: a function that returns the configuration with further overrides.
        job: a function that runs the pipeline for a configuration.

    Returns:
        The exit status: 0, or 1 if no trial on the Pareto front meets all `verify` bounds, or the front is empty.

    Raises:
        ConfigError: a setting is wrong (found before the first trial), at least `_HOPELESS` trials have ended and all
            of them failed, or the storage failed.
    """
    folder = Path(config.output_dir or ".")
    space = axes(config.search.space, _hints(config))
    _check_measured(config)
    data = opened_data(config)
    _check_labelled(config, data)
    _check_space(space, typed, compose, data)
    _check_a_run(compose([override(axis.key, axis.tried[0]) for axis in space]))
    settings = settings_of(config) | {
        "data.root": f"images {data.fingerprint}"
    }  # the images may be in another folder
    study = SharedStudy(config.search, space, config.name, folder, config.seed, settings)
    say(f"search: {study.records().told()}, in {folder}")
    while (claimed := study.claim()) is not None:
        with claimed:
            _trial(claimed, config, compose, job)
        gc.collect()
        records = study.records()
        say(f"  {trial_line(records, claimed.number)}")
        if _hopeless(records):
            break
    records = study.records()
    write_search_page(folder / PAGE, records)
    print_study(records, folder)
    if last := _hopeless(records):
        reason = (
            f"no trial has finished; the last one failed ({last.reason}; see {folder / last.folder}); "
            "correct the settings that all trials share"
        )
        raise ConfigError("search.trials", config.search.trials, reason=reason)
    return 0 if any(not trial.shortfalls for trial in records.front) else 1


def _hopeless(study: Study) -> Trial | None:
    """Returns the last trial if at least `_HOPELESS` trials have ended and all of them failed; otherwise None."""
    ended = [trial for trial in study.trials if trial.state != "running"]
    failed = all(trial.state == "failed" for trial in ended)
    return ended[-1] if len(ended) >= _HOPELESS and failed else None


def _hints(config: Config) -> Callable[[str], Any]:
    """Returns a function that maps a key to the type of its value, for settings of the chosen algorithms too."""
    chosen = {f"algorithm.{name}": type(one) for name, one in algorithms_of(config.algorithm).items()}

    def hint(key: str) -> Any:
        group, _, name = key.rpartition(".")
        return hint_of(chosen[group], name) if group in chosen else hint_in_schema(key)

    return hint


def _asked(search: SearchConfig) -> list[str]:
    """Returns the names of the metrics that decide between trials."""
    return [*search.objectives, *(bound.name for bound in constraints(search.constraints))]


def _check_measured(config: Config) -> None:
    """Checks that `verify.checks` contains a check for each metric that decides between trials."""
    there = {check.name for check in load_checks(config.verify.checks)}
    for name in _asked(config.search):
        if (needed := OBJECTIVES[name].check) not in there:
            allowed = f"a list with the check '{needed}', which measures {name}"
            raise ConfigError("verify.checks", config.verify.checks, allowed)


def _check_labelled(config: Config, data: DataModule) -> None:
    """Checks that metrics that need labels are requested only if the images have labels."""
    for name in _asked(config.search):
        if name in _OF_LABELS and not data.labelled:
            key = "search.objectives" if name in config.search.objectives else "search.constraints"
            others = ", ".join(one for one in OBJECTIVES if one not in _OF_LABELS)
            samples = f"the {data.task.names.samples} of {config.data.source}"
            raise ConfigError(key, name, f"one of {others}, since {samples} have no labels")


def _check_a_run(config: Config) -> None:
    """Checks the settings of one trial with the checks that every run makes at its start."""
    data = opened_data(config)
    checks_of(config, labelled=data.labelled)
    built(config, data)


def _check_space(space: Sequence[Axis], typed: Sequence[str], compose: Compose, data: DataModule) -> None:
    """Checks the keys and values of the space.

    Keys must not be typed on the command line too, and must accept their values (for an interval, the ends). No two
    values of a key may give the same configuration.
    """
    given = dict(one.lstrip("+~").partition("=")[::2] for one in typed)
    for axis in space:
        if axis.key in given:
            reason = "search.space varies this key; leave it out of the command line"
            raise ConfigError(axis.key, given[axis.key], reason=reason)
        made: list[Config] = []
        for value in axis.tried:
            try:
                made.append(_composed(axis.key, value, compose, data))
            except ConfigError as error:
                raise ConfigError(
                    f"search.space.{axis.key}", value, reason=f"the value is not accepted ({error})"
                ) from error
            first = made.index(made[-1])
            if first < len(made) - 1:
                same = f"{axis.key}={as_typed(axis.tried[first])}"
                reason = (
                    f"with the other settings, this value makes the same run as {same}; remove one of them"
                )
                raise ConfigError(f"search.space.{axis.key}", value, reason=reason)


def _composed(key: str, value: Value, compose: Compose, data: DataModule) -> Config:
    """Returns the configuration with one value of the space, after checking that it keeps the study's images."""
    made = compose([override(key, value)])
    check_job(replace(made, search=SearchConfig()), from_checkpoint=False)
    if key in _OF_IMAGES and opened_data(made).fingerprint != data.fingerprint:
        samples = data.task.names.samples
        reason = f"the key changes the {samples} on which trials are compared; leave it out of search.space"
        raise ConfigError(key, value, reason=reason)
    return made


def _trial(claimed: Claimed, config: Config, compose: Compose, job: Callable[[Config], int | None]) -> None:
    """Runs one trial, or marks it as failed if its workers have already been killed `search.attempts` times.

    If a signal, a disk error or the storage ends the trial, this start does not count as an attempt.
    """
    if claimed.attempts > config.search.attempts:
        claimed.fail(f"its worker was killed {counted(config.search.attempts, 'time')}")
        return
    try:
        _ended(claimed, config, compose, job)()
    except BaseException as error:
        if isinstance(error, stopping.Stopped):
            error.where = f"{error.where} in trial {claimed.number} of the search".strip()
        if isinstance(error, stopping.Stopped | StorageError) or disk_error(error) is not None:
            claimed.uncount()
        raise


def _ended(
    claimed: Claimed, config: Config, compose: Compose, job: Callable[[Config], int | None]
) -> Callable[[], None]:
    """Runs a trial and returns the function that records its outcome."""
    try:
        return _told(claimed, config, _finished(claimed, compose, job))
    except Pruned:
        return claimed.prune
    except StorageError:
        raise
    except Exception as error:
        stopping.check(f"in trial {claimed.number} of the search")
        if disk_error(error) is not None:
            raise
        if not isinstance(error, ConfigError):
            write_text(claimed.folder / _TRACEBACK, "".join(traceback.format_exception(error)))
        return partial(claimed.fail, first_line(error))


def _finished(
    claimed: Claimed, compose: Compose, job: Callable[[Config], int | None]
) -> Mapping[str, Any] | None:
    """Runs the trial unless it already has a report, and returns the report; None if the run wrote none."""
    if (report := report_of(claimed.folder)) is not None:
        return report

    def validated(stage: str, epoch: int, score: float) -> None:
        if stage != Path(CONTROL_CHECKPOINT).stem and claimed.epoch(stage, epoch, score):
            raise Pruned

    config = compose([override(key, value) for key, value in claimed.values.items()])
    config = replace(
        config,
        search=SearchConfig(),
        calibration=replace(config.calibration, cache=None),  # a cache fits the observers of one trial only
        export=config.export.kept(),
        verify=replace(config.verify, validation=True),
        output_dir=str(claimed.folder),
        resume=None,
    )
    with _into(claimed.folder / _TABLE), typing(None), one_of_many(), listening(validated):
        job(going_on(config))
    return report_of(claimed.folder)


@contextlib.contextmanager
def _into(path: Path) -> Iterator[None]:
    """Appends everything that a trial prints within the context to a file."""
    with path.open("a", encoding="utf-8") as table, contextlib.redirect_stdout(table):
        yield


def _told(claimed: Claimed, config: Config, report: Mapping[str, Any] | None) -> Callable[[], None]:
    if report is None:
        return partial(claimed.fail, _without_file(claimed.folder / _TABLE))
    found = figures(report)
    if missing := [name for name in _asked(config.search) if name not in found]:
        hint = "; without labels, use agreement or sqnr instead" if missing[0] in ("accuracy", "drop") else ""
        return partial(
            claimed.fail, f"its report has no {missing[0]} (it has {', '.join(found) or 'none'}{hint})"
        )
    return partial(claimed.complete, found, of_test_images(report), report["shortfalls"])


def _without_file(table: Path) -> str:
    """Returns the reason why the run wrote no report: its last shortfall, or a reference to its output."""
    said = table.read_text(encoding="utf-8").splitlines()
    short = [line.removeprefix("SHORTFALL ") for line in said if line.startswith("SHORTFALL ")]
    return short[-1] if short else f"the run wrote no file; see {table}"
