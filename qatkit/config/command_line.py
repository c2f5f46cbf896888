"""The command line: Hydra composes, mistakes become one line, the job receives a plain `Config`.

Hydra reports a mistake when it meets it, over several lines and, in a sweep, perhaps after hours. So the
command line is composed twice. The first time, before Hydra proper starts, every job of a sweep is composed,
checked and its dotted paths imported; what Hydra or OmegaConf raise is translated to

    error: key=value: what is allowed

and exit status 2. The second time is Hydra's own, which runs the jobs here or on a cluster.

Exit status: what the job returns (0, or 1 for a file that falls short of its bounds), 2 for a mistake of the
user's, 128 and its number for a signal (130 for Ctrl-C). Any other exception is a defect and keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the parser hydra.main itself reads the command line with
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig

from qatkit.config import slurm, streams, sweep
from qatkit.config.compose import compose_config, register, to_config
from qatkit.config.export_command import export_notes, export_run
from qatkit.config.fields import at_places
from qatkit.config.hydra_errors import translate
from qatkit.config.reference import help_text
from qatkit.config.schema import Config, TrainerConfig
from qatkit.config.typed import typing
from qatkit.report.runs import print_runs
from qatkit.run.find import going_on, output_dir
from qatkit_verify import stopping
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, disk_error, first_line
from qatkit_verify.foreign import Called, boundary
from qatkit_verify.runtimes.base import dotted, load_runtimes
from qatkit_verify.untrusted import read_yaml

Job = Callable[[Config], int | None]

LARGEST_AXIS = 10_000  # values of one key of a sweep: each is a job
COMPOSED_AHEAD = 64  # jobs of a sweep that are checked before the first one starts, at 0.05 s each
DOTTED = ("backend.target", "calibration.observer", "quantizer.activation",
          "quantizer.weight", "data.source", "model.name")  # fmt: skip
_A_CORE = 16  # threads, or processes that load images: with more a machine does nothing else than change between them
_AGAIN = {False: "with resume=auto continues", True: "begins again"}


def main(job: Job, conf: Path, *, from_checkpoint: bool = False) -> int:
    """Run `job` for the configuration on the command line, or for each one of a sweep (`-m`).

    Args:
        job: what to run; returns an exit status, None for 0.
        conf: the folder with `config.yaml` and the groups.
        from_checkpoint: start from the `config.yaml` saved beside `checkpoint=...`, or from the defaults with
            `onnx=...`, not from a recipe.

    Returns:
        The exit status, the highest one of a sweep.
    """
    streams.prepare()
    register()
    # Else Hydra prints what is raised, by itself, and exits with status 1.
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
            arguments = _arguments()
            if arguments.help:
                print(_help(conf, arguments, from_checkpoint), end="")
                return 0
            slurm.prepare(arguments.overrides, bool(arguments.multirun))
            _check_command_line(conf, arguments, from_checkpoint)
            try:
                run()
            except Exception as error:
                if error in defects or isinstance(error, ConfigError):
                    raise
                raise translate(error, arguments.overrides, conf) from error
            finally:
                if arguments.multirun:
                    print_runs(outcomes)
                    _compare(outcomes)
        except stopping.Stopped as stop:
            return _interrupted(stop, from_checkpoint)
        except Exception as error:
            return _ended_by(error, from_checkpoint)
        except KeyboardInterrupt:  # of an application's own handler
            return _interrupted(stopping.Stopped(signal.SIGINT), from_checkpoint)
    return max((outcome.status for outcome in outcomes), default=0)


def _compare(outcomes: Sequence[sweep.Outcome]) -> None:
    """The page of a sweep: its runs side by side, in the sweep's own folder."""
    folders = [Path(one.folder) for one in outcomes if one.folder]
    sweeps = {one.sweep for one in outcomes if one.sweep}
    if folders and len(sweeps) == 1:
        from qatkit.compare.command import COMPARISON_FILE, page_of  # which mistakes do without

        page_of(folders, Path(sweeps.pop()) / COMPARISON_FILE)


def _ended_by(error: Exception, from_checkpoint: bool) -> int:
    """The line of a mistake, or of a signal, of which a module in C that is being imported makes an exception."""
    number = stopping.wanted()
    if number is not None:
        return _interrupted(stopping.Stopped(number), from_checkpoint)
    if not isinstance(error, ConfigError):
        raise error
    return _complain(error)


def _no_room(full: OSError, from_checkpoint: bool) -> int:
    file = full.filename or f"a temporary file in {tempfile.gettempdir()}"
    again = _AGAIN[from_checkpoint]
    print(f"error: {file}: {full.strerror}: make room there, then the same command {again}", file=sys.stderr)
    return 1


def _interrupted(stop: stopping.Stopped, from_checkpoint: bool) -> int:
    """Says how to go on; of several ranks the first one speaks."""
    again = _AGAIN[from_checkpoint]
    if all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")):
        print(
            f"interrupted {stop.where}".rstrip() + f": the same command {again}", file=sys.stderr, flush=True
        )
    return int(stop.code or 0)


def _arguments() -> argparse.Namespace:
    """Flags and overrides, as Hydra reads them."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse's own prints its usage over many lines
    arguments, unknown = parser.parse_known_args()
    if unknown:
        raise ConfigError("argument", unknown[0], "KEY=VALUE, after any flags (such as -m)")
    _check_flags(arguments)
    return arguments


def _refuse(message: str) -> NoReturn:
    quoted = re.search(r"choice: '(.*?)'", message)
    flag = re.match(r"argument (\S+):", message)
    raise ConfigError("argument", quoted[1] if quoted else flag[1] if flag else "...", message)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Flags that exclude each other, that lead past `conf`, or that name a folder which is none."""
    for flag in ("config_name", "config_path", "experimental_rerun"):
        if (value := getattr(arguments, flag)) is not None:
            allowed = "left out: conf/config.yaml is where everything starts (--config-dir adds a folder of your own)"
            raise ConfigError(f"--{flag.replace('_', '-')}", value, allowed)
    commands = [f"--{one.replace('_', '-')}" for one in ("run", "cfg", "multirun", "shell_completion", "info")
                if getattr(arguments, one)]  # fmt: skip
    if len(commands) > 1:
        raise ConfigError("argument", commands[-1], f"one of {', '.join(commands)}")
    if arguments.shell_completion and not any(
        re.match(r"(install|uninstall|query)=", one) for one in arguments.overrides
    ):
        raise ConfigError("argument", "--shell-completion", "followed by install=bash, or another shell")
    if arguments.config_dir is not None:
        _check_config_dir(arguments.config_dir)


def _check_config_dir(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ConfigError(
            "--config-dir", folder, "a folder with GROUP/OPTION.yaml files, searched like conf/"
        )
    for path in sorted((*Path(folder).glob("*.yaml"), *Path(folder).glob("*/*.yaml"))):
        try:
            read_yaml(path)
        except (OSError, ValueError) as error:
            raise ConfigError("--config-dir", folder, f"YAML files; {path}: {first_line(error)}") from error


def _help(conf: Path, arguments: argparse.Namespace, from_checkpoint: bool) -> str:
    folders = [conf] if arguments.config_dir is None else [conf, Path(arguments.config_dir)]
    return help_text(Path(sys.argv[0]).name, folders, export_notes() if from_checkpoint else ())


def _check_command_line(conf: Path, arguments: argparse.Namespace, from_checkpoint: bool) -> None:
    """Compose and check all that the command line asks for, before Hydra proper starts."""
    if _needs_no_config(arguments):
        return
    overrides: list[str] = arguments.overrides
    if arguments.config_dir is not None:  # a folder of the user's own, searched like conf/
        overrides = [*overrides, f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"]
    jobs = _sweep(conf, overrides) if arguments.multirun else [overrides]
    adapt = export_run if from_checkpoint else None
    configs = [compose_config(conf, one, adapt) for one in jobs]
    if arguments.cfg is None and arguments.info is None:
        for config in configs:
            try:
                with at_places(config):
                    _check_job(config, from_checkpoint)
            except ConfigError as error:
                if config.trainer.debug:
                    traceback.print_exception(error)
                raise


def _needs_no_config(arguments: argparse.Namespace) -> bool:
    return bool(arguments.hydra_help or arguments.shell_completion)


def _sweep(conf: Path, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, the first `COMPOSED_AHEAD` of them.

    An interval, which only some sweepers draw from, has no values yet: its key is left as it is.
    """
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            parsed = parser.parse_overrides(list(overrides))
        except Exception as error:  # as in compose_config
            raise translate(error, overrides, conf) from error
        drawn_from = any(text.startswith("hydra/sweeper=") for text in overrides)
        axes = []
        for override, text in zip(parsed, overrides, strict=True):
            if not override.is_sweep_override():
                axes.append([text])
            elif override.is_discrete_sweep():
                axes.append(_axis(override, text))
            elif not drawn_from:
                key, _, value = text.partition("=")
                raise ConfigError(key, value, "values or a range; hydra/sweeper=NAME draws from an interval")
    return [list(job) for job in itertools.islice(itertools.product(*axes), COMPOSED_AHEAD)]


def _axis(override: Override, text: str) -> list[str]:
    """The overrides that one key of a sweep stands for."""
    key, _, value = text.partition("=")
    try:
        one = override.value()
        if (
            isinstance(one, RangeSweep)
            and next(itertools.islice(one.range(), LARGEST_AXIS, None), None) is not None
        ):
            raise ConfigError(key, value, f"at most {LARGEST_AXIS} values")
        axis = [f"{override.get_key_element()}={found}" for found in override.sweep_string_iterator()]
    except ConfigError:
        raise
    except (ValueError, OverflowError) as error:
        raise ConfigError(key, value, f"values that can be listed ({first_line(error)})") from error
    if not axis:
        raise ConfigError(key, value, "at least one option that matches")
    return axis


def _run(job: Job, node: DictConfig, from_checkpoint: bool, conf: Path) -> sweep.Outcome:
    """One job, maybe on another machine than the check of the command line: a full check again."""
    job_config = HydraConfig.get()
    overrides = list(job_config.overrides.task)
    number = job_config.job.num if job_config.mode == RunMode.MULTIRUN else None
    swept = "" if number is None else str(Path(job_config.sweep.dir).absolute())
    ended = partial(sweep.Outcome, number=number, overrides=tuple(overrides), sweep=swept)
    try:
        config = to_config(export_run(node, overrides) if from_checkpoint else node)
        with at_places(config):
            _check_job(config, from_checkpoint)
        _check_machine(config)
        _choose_folder(config, number, from_checkpoint)
        if not from_checkpoint and slurm.started_again():
            config = going_on(config)
        return ended(_called(job, config, overrides, from_checkpoint, conf), config.output_dir or "")
    except ConfigError as error:
        stopping.check()
        return ended(_complain(error, node), reason=str(error))
    except Exception as error:
        stopping.check()
        full = disk_error(error)
        if full is None:
            raise
        return ended(_no_room(full, from_checkpoint), reason=first_line(full))
    except stopping.Stopped as stop:
        if number is not None:
            stop.where = f"{stop.where} in job {number} of the sweep".strip()
        raise


def _as_defect(error: Exception) -> sweep.Outcome:
    job = HydraConfig.get()
    return sweep.Outcome(
        1,
        reason=first_line(error),
        number=job.job.num if job.mode == RunMode.MULTIRUN else None,
        overrides=tuple(job.overrides.task),
    )


def _choose_folder(config: Config, number: int | None, from_checkpoint: bool) -> None:
    """Of the run, `number` of a sweep."""
    if from_checkpoint and config.output_dir is None and config.checkpoint is not None:
        folder = Path(config.checkpoint).parent
        config.output_dir = str(folder if number is None else folder / f"export_{number}")
    if not from_checkpoint and config.output_dir is None and config.resume not in (None, "auto"):
        config.output_dir = str(Path(config.resume).parent)
    with at_places(config):
        config.output_dir = str(output_dir(config, number))


def _called(job: Job, config: Config, overrides: Sequence[str], from_checkpoint: bool, conf: Path) -> int:
    """The job itself."""
    with (
        _distributed(overrides, str(config.output_dir)),
        typing(None if from_checkpoint else overrides),
        boundary(dotted_paths(config)),
        at_places(config),
    ):
        if config.search.trials == 0:
            return job(config) or 0
        from qatkit.search.worker import work  # imports Optuna, and torch

        return work(config, overrides, _composer(conf, overrides), job)


def _composer(conf: Path, typed: Sequence[str]) -> Callable[[Sequence[str]], Config]:
    """Composes `typed` with further overrides, with the folders that this job's own configuration came from."""
    mine = [
        source.path
        for source in HydraConfig.get().runtime.config_sources
        if source.provider == "command-line"
    ]
    search = [f"hydra.searchpath=['file://{path}']" for path in mine]

    def composed(more: Sequence[str]) -> Config:
        job, around = GlobalHydra.instance().hydra, GlobalHydra.instance()
        around.clear()  # Hydra composes for one at a time
        try:
            return compose_config(conf, [*typed, *more, *search])
        finally:
            around.hydra = job

    return composed


@contextlib.contextmanager
def _distributed(overrides: Sequence[str], folder: str) -> Iterator[None]:
    """Let this one job start ranks of its own, and the next job of a sweep as well.

    Lightning starts the other ranks of a DDP run by repeating `sys.argv`: as typed, each would run a whole
    sweep and pick an output folder of its own. What it leaves behind, a process group without peers and its
    address in the environment, would be taken for the next job's.
    """
    typed, environment = sys.argv, dict(os.environ)
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    sys.argv = [typed[0], *overrides]
    arguments, _ = get_args_parser().parse_known_args(typed[1:])
    if arguments.config_dir is not None:
        sys.argv += ["--config-dir", arguments.config_dir]
    if not any(override.startswith("output_dir=") for override in overrides):
        sys.argv.append(f"output_dir='{quoted}'")
    try:
        yield
    finally:
        sys.argv = typed
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(variable, None)
            os.environ.update({variable: environment[variable]} if variable in environment else {})


def _check_job(config: Config, from_checkpoint: bool) -> None:
    """What needs more than the values themselves: files that exist, dotted paths that lead somewhere."""
    if config.checkpoint is not None and not from_checkpoint:
        raise ConfigError("checkpoint", config.checkpoint, "null: export.py reads it, train.py has resume=")
    if not from_checkpoint and (config.onnx is not None or config.mode is not None):
        key = "mode" if config.onnx is None else "onnx"
        raise ConfigError(key, getattr(config, key), "null: export.py takes onnx=FILE mode=MODE")
    if config.resume not in (None, "auto") and not from_checkpoint and not Path(config.resume).is_file():
        raise ConfigError("resume", config.resume, "null, auto, or a checkpoint file that exists")
    if config.search.trials and from_checkpoint:
        raise ConfigError("search.trials", config.search.trials, "0: train.py searches")
    if config.search.trials and importlib.util.find_spec("optuna") is None:
        allowed = "0 without the extra search: uv sync --extra search"
        raise ConfigError("search.trials", config.search.trials, allowed)
    for key, path in dotted_paths(config):
        if not key.startswith("algorithm."):
            resolve(path, key)
    load_runtimes(config.verify.runtimes)
    if config.algorithm:
        from qatkit.algorithms.base import algorithms_of  # imports torch

        algorithms_of(config.algorithm)


def dotted_paths(config: Config) -> list[Called]:
    """The settings that name code, each with its dotted path."""
    paths = [(key, getattr(getattr(config, key.split(".")[0]), key.split(".")[1])) for key in DOTTED]
    paths += [("verify.checks", path) for path in config.verify.checks]
    paths += [("verify.runtimes", dotted(name)) for name in config.verify.runtimes]
    paths += [(f"algorithm.{name}.target", entry["target"]) for name, entry in config.algorithm.items()]
    of_a_source = "." not in config.model.name or "/" in config.model.name  # a name that is no path
    return [(key, path.replace(":", ".")) for key, path in paths if key != "model.name" or not of_a_source]


def _check_machine(config: Config) -> None:
    """What is asked for must be here; Lightning would say so only after the data is prepared, ONNX Runtime never."""
    cores, wanted = os.cpu_count() or 1, config.trainer
    for key, value in (("verify.threads", config.verify.threads), ("data.workers", config.data.workers)):
        if value > _A_CORE * cores:
            raise ConfigError(key, value, f"at most {_A_CORE * cores}: this machine has {cores} cores")
    if wanted.accelerator not in ("auto", "cpu") or wanted.devices != 1:
        _check_devices(wanted)


def _check_devices(wanted: TrainerConfig) -> None:
    import torch  # slow to import, and mistakes in the configuration should be quick to show

    apple = int(torch.backends.mps.is_available())
    found = {"cpu": 0, "mps": apple}.get(wanted.accelerator, torch.cuda.device_count())
    found = apple if wanted.accelerator == "gpu" and found == 0 else found
    if found == 0 and wanted.accelerator in ("auto", "cpu"):  # any number of processes on the CPU
        if wanted.devices == -1:
            raise ConfigError("trainer.devices", -1, "1 or more: all of them means GPUs, and none is taken")
    elif found == 0:
        raise ConfigError("trainer.accelerator", wanted.accelerator, "auto or cpu: no such device is visible")
    elif wanted.devices > found:
        raise ConfigError("trainer.devices", wanted.devices, f"1 to {found}, the devices visible")


def _complain(error: ConfigError, node: DictConfig | None = None) -> int:
    """The one line, with the traceback before it where `node`, the configuration, asks for that."""
    if node is not None and node.trainer.debug:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return 2
