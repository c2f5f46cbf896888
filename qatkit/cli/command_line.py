"""The command line: Hydra composes, mistakes are reported in one line, and the job receives a plain `Config`.

Hydra reports a mistake only when it occurs, in several lines and, in a sweep, possibly after hours. The
command line is therefore composed twice. The first time, before Hydra itself starts, every job of a sweep (at
most `COMPOSED_AHEAD`) is composed and checked, and its dotted paths are imported. Errors of Hydra and
OmegaConf are translated to

    error: key=value: expected ...

and exit status 2. The second time Hydra itself composes, and runs the jobs here or on a cluster.

The exit status is that of the job (0, or 1 for a file that misses its bounds), 1 for a full disk, 2 for a user's
mistake, or 128 plus the number of a signal (130 for Ctrl-C). Any other exception is a defect and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from qatkit.cli import slurm
from qatkit.cli.arguments import jobs_of, typed_arguments
from qatkit.cli.endings import complain, ended_by, interrupted, no_room
from qatkit.cli.export_command import export_notes, export_run
from qatkit.cli.hydra_flags import flags_parser, support_python_314
from qatkit.cli.reference import help_text
from qatkit.cli.train_command import train_run
from qatkit.config import sweep
from qatkit.config.argv import EXPORT, TRAIN, one_of_many, typing
from qatkit.config.compose import (
    check_texts,
    compose_config,
    launcher_of,
    register,
    to_config,
    without_hydra_around,
)
from qatkit.config.hydra_errors import translate
from qatkit.config.origins import error_as_typed, named_as_typed
from qatkit.config.paths import at_places
from qatkit.config.quoting import calls_quoted, quoted
from qatkit.config.schema import Config
from qatkit.config.sweep_file import Known, sweep_file, sweeping
from qatkit.jobs.checks import check_job, check_machine, dotted_paths
from qatkit.records.run_files import report_of
from qatkit.run import streams
from qatkit.run.find import finished, going_on, taken
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError, disk_error, first_line
from qatkit_verify.foreign import boundary

Job = Callable[[Config], int | None]


def main(job: Job, conf: Path, *, from_checkpoint: bool = False) -> int:
    """Runs `job` for the configuration on the command line, or for each configuration of a sweep (`-m`).

    Args:
        job: the function to run; it returns an exit status, where None means 0.
        conf: the folder with `config.yaml` and the groups.
        from_checkpoint: whether to start from the `config.yaml` next to `checkpoint=...`, or from the
            defaults with `onnx=...`, instead of a recipe.

    Returns:
        The exit status; for a sweep, the highest one.
    """
    streams.prepare()
    register()
    support_python_314()
    sys.argv[1:] = calls_quoted(sys.argv[1:])
    # Otherwise Hydra itself prints exceptions and exits with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    defects: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")
    def run(node: DictConfig) -> sweep.Outcome:
        try:
            outcome = _run(job, node, from_checkpoint, conf)
        except Exception as error:
            defects.append(error)
            sweep.add(_as_defect(error))
            raise
        sweep.add(outcome)
        return outcome

    with stopping.served(), sweep.collecting() as outcomes:
        try:
            arguments = typed_arguments()
            if arguments.help:
                print(_help(conf, arguments, from_checkpoint), end="")
                return 0
            slurm.prepare(arguments.overrides, bool(arguments.multirun))
            _check_command_line(conf, arguments, from_checkpoint)
            _collect_garbage()
            try:
                with sweeping(arguments.overrides if arguments.multirun else None):
                    run()
            except Exception as error:
                if error in defects or isinstance(error, ConfigError):
                    raise
                raise translate(error, arguments.overrides, conf) from error
            finally:
                if arguments.multirun:
                    _summarize(outcomes)
        except stopping.Stopped as stop:
            return interrupted(stop, from_checkpoint)
        except Exception as error:
            return ended_by(error, from_checkpoint)
        except KeyboardInterrupt:  # raised by an application's own handler
            return interrupted(stopping.Stopped(signal.SIGINT), from_checkpoint)
    return max((outcome.status for outcome in outcomes), default=0)


def _collect_garbage() -> None:
    """Turns garbage collection on again if `qatkit.cli.scripts` turned it off; objects imported so far are exempt."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _summarize(outcomes: Sequence[sweep.Outcome]) -> None:
    """Prints the table of a sweep, and writes a page that compares its runs into the sweep's folder."""
    from qatkit.report.runs import print_runs  # imports rich

    print_runs(outcomes)
    folders = [Path(one.folder) for one in outcomes if one.folder]
    sweeps = {one.sweep for one in outcomes if one.sweep}
    if folders and len(sweeps) == 1:
        from qatkit.compare.command import COMPARISON_FILE, page_of  # not needed to report mistakes

        try:
            page_of(folders, Path(sweeps.pop()) / COMPARISON_FILE)
        except OSError as error:
            print(f"error: the page of the sweep was not written ({error})", file=sys.stderr)


def _help(conf: Path, arguments: argparse.Namespace, from_checkpoint: bool) -> str:
    folders = [conf] if arguments.config_dir is None else [conf, Path(arguments.config_dir)]
    return help_text(Path(sys.argv[0]).name, folders, export_notes() if from_checkpoint else ())


def _check_command_line(conf: Path, arguments: argparse.Namespace, from_checkpoint: bool) -> None:
    """Composes and checks everything that the command line requests, before Hydra itself starts."""
    if _needs_no_config(arguments):
        return
    overrides: list[str] = arguments.overrides
    folders = [] if arguments.config_dir is None else [arguments.config_dir]
    check_texts(overrides)
    jobs = jobs_of(conf, overrides) if arguments.multirun else [overrides]
    adapt = export_run if from_checkpoint else train_run
    configs = []
    for one in jobs:
        with named_as_typed(conf, one, folders):
            configs.append(compose_config(conf, one, adapt, folders))
    asked = next((one for one in overrides if one.startswith(("launcher=", "hydra/launcher="))), None)
    if (asked or arguments.multirun) and launcher_of(conf, jobs[0], folders) == slurm.HYDRAS:
        slurm.take_over(asked or slurm.LAUNCHER, bool(arguments.multirun))
    if arguments.cfg is None and arguments.info is None:
        for config, one in zip(configs, jobs, strict=True):
            try:
                with named_as_typed(conf, one, folders), at_places(config):
                    check_job(config, from_checkpoint)
            except ConfigError as error:
                if config.trainer.debug:
                    traceback.print_exception(error)
                raise


def _needs_no_config(arguments: argparse.Namespace) -> bool:
    return bool(arguments.hydra_help or arguments.shell_completion)


def _run(job: Job, node: DictConfig, from_checkpoint: bool, conf: Path) -> sweep.Outcome:
    """Checks a job again, since the command line may have been checked on another machine, and runs it."""
    job_config = HydraConfig.get()
    overrides = list(job_config.overrides.task)
    number = job_config.job.num if job_config.mode == RunMode.MULTIRUN else None
    swept = "" if number is None else str(Path(job_config.sweep.dir).absolute())
    ended = partial(sweep.Outcome, number=number, overrides=tuple(overrides), sweep=swept)
    folder = ""
    try:
        sweep_of = sweep_file(swept) if swept else None
        config = to_config((export_run if from_checkpoint else train_run)(node, overrides))
        with at_places(config):
            check_job(config, from_checkpoint)
        if sweep_of is not None:
            made, which = sweep_of.known(overrides).folder, f"run {number} of the sweep"
        else:
            made, which = "" if from_checkpoint else config.output_dir or "", "this run"
        if (status := _status_before(config, made, which)) is not None:
            return ended(status, made)
        check_machine(config)
        with _own_folder(config, number, from_checkpoint):
            folder = config.output_dir or ""
            if sweep_of is not None:
                sweep_of.note(overrides, Known(str(Path(folder).absolute())))
            if not from_checkpoint and slurm.started_again():
                config = going_on(config)
            with one_of_many() if number else contextlib.nullcontext():
                return ended(_called(job, config, overrides, from_checkpoint, conf), folder)
    except ConfigError as error:
        stopping.check()
        error = error_as_typed(error, conf, overrides, _folders())
        return ended(complain(error, debug=node.trainer.debug), reason=str(error))
    except Exception as error:
        stopping.check()
        full = disk_error(error)
        if full is None:
            raise
        return ended(no_room(full, from_checkpoint), reason=first_line(full))
    except stopping.Stopped as stop:
        if number is not None:
            stop.where = f"{stop.where} in job {number} of the sweep".strip()
            sweep.add(
                ended(int(stop.code or 0), folder if Path(folder).is_dir() else "", reason="interrupted")
            )
        raise


def _status_before(config: Config, folder: str, which: str) -> int | None:
    """If resume=auto and the run in `folder` is finished, reports it and returns its exit status, else None."""
    if config.resume != "auto" or not folder or not finished(config, Path(folder)):
        return None
    report = report_of(Path(folder))
    if report is None:
        return None
    slurm.say(f"{which} is already finished; its results are in {folder}")
    for shortfall, fix in zip_longest(report["shortfalls"], report.get("mends", ()), fillvalue=""):
        slurm.say(f"falls short: {shortfall}")
        if fix:
            slurm.say(f"  to fix it: {fix}")
    return 1 if report["shortfalls"] else 0


def _as_defect(error: Exception) -> sweep.Outcome:
    job = HydraConfig.get()
    return sweep.Outcome(
        1,
        reason=first_line(error),
        number=job.job.num if job.mode == RunMode.MULTIRUN else None,
        overrides=tuple(job.overrides.task),
    )


@contextlib.contextmanager
def _own_folder(config: Config, number: int | None, from_checkpoint: bool) -> Iterator[None]:
    """Sets `output_dir` to the folder of the run, which no other run can use within the context.

    Args:
        config: the configuration of the run.
        number: the number of the run in a sweep; None outside of a sweep.
        from_checkpoint: the same as in `main`.
    """
    if from_checkpoint and config.output_dir is None and config.checkpoint is not None:
        folder = Path(config.checkpoint).parent
        config.output_dir = str(folder if number is None else folder / f"export_{number}")
    if not from_checkpoint and config.output_dir is None and config.resume not in (None, "auto"):
        config.output_dir = str(Path(config.resume).parent)
    with contextlib.ExitStack() as stack:
        with at_places(config):
            config.output_dir = str(stack.enter_context(taken(config, number)))
        yield


def _called(job: Job, config: Config, overrides: Sequence[str], from_checkpoint: bool, conf: Path) -> int:
    """Runs the job and returns its exit status."""
    with (
        _distributed(overrides, str(config.output_dir)),
        typing(overrides, EXPORT if from_checkpoint else TRAIN, _flags(), swept=_swept()),
        boundary(dotted_paths(config)),
        at_places(config),
    ):
        if config.search.trials == 0:
            return job(config) or 0
        from qatkit.search.worker import work  # imports Optuna and torch

        return work(config, overrides, _composer(conf, overrides), job)


def _swept() -> bool:
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def _flags() -> list[str]:
    """Returns the user's configuration folders as flags and overrides of Hydra."""
    arguments, _ = flags_parser().parse_known_args(sys.argv[1:])
    folder = [] if arguments.config_dir is None else ["--config-dir", arguments.config_dir]
    return [*_searched(), *folder]


def _composer(conf: Path, typed: Sequence[str]) -> Callable[[Sequence[str]], Config]:
    """Returns a function that composes `typed` and more overrides, with this job's configuration folders."""
    mine, searched = _folders(), _searched()

    def composed(more: Sequence[str]) -> Config:
        with without_hydra_around():
            return compose_config(conf, [*typed, *more, *searched], folders=mine)

    return composed


def _folders() -> list[str]:
    """Returns the user's configuration folders (--config-dir)."""
    sources = HydraConfig.get().runtime.config_sources
    return [source.path for source in sources if source.provider == "command-line"]


def _searched() -> list[str]:
    """Returns the overrides of hydra.searchpath as they were typed."""
    typed: Sequence[str] = HydraConfig.get().overrides.hydra
    return [one for one in typed if one.lstrip("+").startswith("hydra.searchpath=")]


@contextlib.contextmanager
def _distributed(overrides: Sequence[str], folder: str) -> Iterator[None]:
    """Lets this job, and afterwards the next job of a sweep, start their own ranks.

    Lightning starts the other ranks of a DDP run by repeating `sys.argv`. With the typed arguments, each rank
    would run the whole sweep and choose its own output folder. After the run, Lightning leaves a process
    group without peers, and its address in the environment. The next job would mistake them for its own.
    """
    typed, environment = sys.argv, dict(os.environ)
    sys.argv = [typed[0], *_searched(), *overrides]
    arguments, _ = flags_parser().parse_known_args(typed[1:])
    if arguments.config_dir is not None:
        sys.argv += ["--config-dir", arguments.config_dir]
    if not any(override.startswith("output_dir=") for override in overrides):
        sys.argv.append(f"output_dir={quoted(folder)}")
    try:
        yield
    finally:
        sys.argv = typed
        if (ranks := sys.modules.get("qatkit.run.loop.ranks")) is not None:
            ranks.leave_none_behind()
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(variable, None)
            os.environ.update({variable: environment[variable]} if variable in environment else {})
