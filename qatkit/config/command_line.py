"""The command line: Hydra composes, mistakes become one line, the job receives a plain `Config`.

Hydra reports a mistake when it meets it, over several lines and, in a sweep, perhaps after hours. So the
command line is composed twice. The first time, before Hydra proper starts, every job of a sweep is composed,
checked and its dotted paths imported; what Hydra or OmegaConf raise is translated to

    error: key=value: what is allowed

and exit status 2. The second time is Hydra's own, which runs the jobs here or on a cluster.

Exit status: what the job returns (0, or 1 for a file that falls short of its bounds), 2 for a mistake of the
user's, 130 after Ctrl-C. Any other exception is a defect and keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser  # the parser hydra.main itself reads the command line with
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qatkit.bundle import CONFIG_FILE, preprocessing_beside
from qatkit.config.hydra_errors import translate
from qatkit.config.limits import CHOICES
from qatkit.config.schema import (
    Config,
    load_config,
    output_dir,
    register,
    resolve,
    to_config,
)
from qatkit.errors import ConfigError

Job = Callable[[Config], int | None]

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
COMPOSED_AHEAD = 64  # jobs of a sweep that are checked before the first one starts, at 0.05 s each
DOTTED = ("backend.target", "calibration.observer", "data.source", "model.name")
EXPORT_KEYS = ("checkpoint", "output_dir", "export.opset", "export.dynamic_batch", "export.io", "data",
               "verify.threads", "verify.audit", "verify.latency_batch")  # fmt: skip
_PACKAGE, _PYTHONS_OWN = Path(__file__).parent, warnings.formatwarning
ONNX_GROUPS = ("data", "backend", "calibration", "export", "verify", "trainer")
ONNX_KEYS = ("onnx", "mode", "name", "seed", "output_dir", "data", "backend", "verify", "calibration.images",
             "calibration.batch_size", "export.opset", "trainer.progress")  # fmt: skip
# With less than this share of top-1 kept, the optimizer of ONNX Runtime computes something else.
_BROKEN = 0.9


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
    register()
    warnings.formatwarning = _plain_warning
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")
    def run(node: DictConfig) -> None:
        statuses.append(_run(job, node, from_checkpoint))

    try:
        _check_command_line(conf, from_checkpoint)
        run()
    except ConfigError as error:
        return _complain(error)
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns Ctrl-C into sys.exit(1) once it has stopped its loops.
        if not isinstance(stop, KeyboardInterrupt) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        again = "" if from_checkpoint else ": the same command with resume=auto continues"
        print(f"interrupted{again}", file=sys.stderr)
        return 130
    return max(statuses, default=0)


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings are for users: one line, without the place in the code."""
    if Path(filename).is_relative_to(_PACKAGE):
        return f"warning: {message}\n"
    return _PYTHONS_OWN(message, category, filename, lineno, line)


def compose_config(conf: Path, overrides: Sequence[str] = (), *, from_checkpoint: bool = False) -> Config:
    """The configuration that `overrides` ("key=value") make of `conf/config.yaml`, checked.

    Raises:
        ConfigError: an unknown key or option, a wrong type, a value out of range, or one that is missing.
    """
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        try:
            node = hydra.compose("config", overrides=list(overrides))
        except COMPOSE_ERRORS as error:
            raise translate(error, overrides, conf) from error
    try:
        return to_config(_export_run(node, overrides) if from_checkpoint else node)
    except OmegaConfBaseException as error:
        raise translate(error, overrides, conf) from error


def _check_command_line(conf: Path, from_checkpoint: bool) -> None:
    """Compose and check all that the command line asks for, before Hydra proper starts."""
    arguments, unknown = get_args_parser().parse_known_args()
    if unknown:
        raise ConfigError("argument", unknown[0], "KEY=VALUE, after any flags (such as -m)")
    if _needs_no_config(arguments):
        return
    overrides: list[str] = arguments.overrides
    if arguments.config_dir is not None:  # a folder of the user's own, searched like conf/
        overrides = [*overrides, f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"]
    jobs = _sweep(conf, overrides) if arguments.multirun else [overrides]
    configs = [compose_config(conf, one, from_checkpoint=from_checkpoint) for one in jobs]
    if arguments.cfg is None and arguments.info is None:
        for config in configs:
            _check_job(config, from_checkpoint)


def _needs_no_config(arguments: argparse.Namespace) -> bool:
    other_source = arguments.config_name or arguments.config_path or arguments.experimental_rerun
    return bool(other_source or arguments.help or arguments.hydra_help or arguments.shell_completion)


def _sweep(conf: Path, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, the first `COMPOSED_AHEAD` of them.

    An interval, which only some sweepers draw from, has no values yet: its key is left as it is.
    """
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            parsed = parser.parse_overrides(list(overrides))
        except COMPOSE_ERRORS as error:
            raise translate(error, overrides, conf) from error
        axes = []
        for override, text in zip(parsed, overrides, strict=True):
            if not override.is_sweep_override():
                axes.append([text])
            elif override.is_discrete_sweep():
                key = override.get_key_element()
                axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
                if not axes[-1]:
                    raise ConfigError(key, text.partition("=")[2], "at least one option that matches")
    return [list(job) for job in itertools.islice(itertools.product(*axes), COMPOSED_AHEAD)]


def _run(job: Job, node: DictConfig, from_checkpoint: bool) -> int:
    """One job, maybe on another machine than the check of the command line: a full check again."""
    job_config = HydraConfig.get()
    overrides = list(job_config.overrides.task)
    number = job_config.job.num if job_config.mode == RunMode.MULTIRUN else None
    try:
        config = to_config(_export_run(node, overrides) if from_checkpoint else node)
        _check_job(config, from_checkpoint)
        _check_machine(config)
        if from_checkpoint and config.output_dir is None and config.checkpoint is not None:
            folder = Path(config.checkpoint).parent
            config.output_dir = str(folder if number is None else folder / f"export_{number}")
        config.output_dir = str(output_dir(config, number))
        with _distributed(overrides, config.output_dir):
            return job(config) or 0
    except ConfigError as error:
        return _complain(error)


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
    for key in DOTTED:
        group, field = key.split(".")
        path = getattr(getattr(config, group), field).replace(":", ".")
        if key != "model.name" or ("." in path and "/" not in path):  # else it is torchvision's or timm's
            resolve(path, key)


def _check_machine(config: Config) -> None:
    """The GPUs asked for must be here; Lightning would say so only after the data is prepared."""
    if config.trainer.accelerator not in ("gpu", "cuda"):
        return
    import torch  # slow to import, and mistakes in the configuration should be quick to show

    found = torch.cuda.device_count()
    if config.trainer.accelerator == "gpu" and found == 0 and torch.backends.mps.is_available():
        found = 1
    if found == 0:
        raise ConfigError("trainer.accelerator", config.trainer.accelerator, "auto or cpu: no GPU is visible")
    if config.trainer.devices > found:
        raise ConfigError("trainer.devices", config.trainer.devices, f"1 to {found}, the GPUs visible")


def _export_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """What export.py works on: a run's checkpoint, or a float ONNX file."""
    if node.onnx is None:
        if node.mode is not None:
            raise ConfigError(
                "mode", node.mode, "given together with onnx=FILE: a checkpoint is exported as QDQ"
            )
        return _saved_run(node, overrides)
    if node.checkpoint is not None:
        raise ConfigError("onnx", node.onnx, f"null with checkpoint={node.checkpoint}: one of the two")
    return _onnx_run(node, overrides)


def _onnx_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The defaults with what the command line sets, without the recipe, a model or a schedule.

    What ONNX Runtime's tools leave float, and the last digits of a float residual stream, are reported; as bounds
    (`verify.audit`, `verify.min_agreement`) they are off, and loose, where the command line says nothing of them.
    """
    if node.mode is None:
        raise ConfigError("mode", None, "with onnx=FILE one of " + " | ".join(CHOICES["mode"]))
    parsed = [
        one
        for one in OverridesParser.create().parse_overrides(list(overrides))
        if not one.is_hydra_override()
    ]
    for override in parsed:
        key = override.key_or_group
        if not _within(key, ONNX_KEYS):
            value = override.get_value_element_as_str()
            raise ConfigError(
                key, value, "no part of an ONNX file's run, which can set " + ", ".join(ONNX_KEYS)
            )
    typed = {override.key_or_group for override in parsed}
    config = OmegaConf.structured(Config(name=Path(node.onnx).stem or "onnx"))
    for group in ONNX_GROUPS:
        config[group] = node[group]
    for key in typed.intersection(("onnx", "mode", "name", "seed", "output_dir")):
        config[key] = node[key]
    # A data group is of its images; a bundle knows what its file wants of them.
    told = preprocessing_beside(Path(node.onnx)) or {}
    presets: dict[str, Any] = {
        f"data.{key}": None for key in ("image_size", "resize", "mean", "std") if key in told
    }
    if "verify" not in typed:
        presets |= {"verify.audit": False, "verify.min_agreement": _BROKEN}
    for key in presets.keys() - typed:
        OmegaConf.update(config, key, presets[key])
    assert isinstance(config, DictConfig)
    return config


def _within(key: str, allowed: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _saved_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration saved beside the checkpoint, with what the command line sets on top.

    `node` is the whole composition, of which only the keys in `overrides` are taken.
    """
    allowed = "a checkpoint written by train.py, with its config.yaml beside it (or onnx=FILE mode=MODE)"
    if node.checkpoint is None or not Path(node.checkpoint).is_file():
        raise ConfigError("checkpoint", node.checkpoint, allowed)
    saved_file = Path(node.checkpoint).with_name(CONFIG_FILE)
    if not saved_file.is_file():
        raise ConfigError("checkpoint", node.checkpoint, f"{allowed}; {saved_file} is missing")
    config = dataclasses.replace(load_config(saved_file), output_dir=None, resume=None)
    saved, of_data = OmegaConf.structured(config), dict[str, str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_hydra_override():
            continue
        if not _within(key, EXPORT_KEYS):
            raise ConfigError(key, override.get_value_element_as_str(), _export_keys_text())
        OmegaConf.update(saved, key, OmegaConf.select(node, key), force_add=True)
        if _within(key, ("data",)):
            of_data[key] = override.get_value_element_as_str()
    if of_data and saved.export.io != "uint8":
        key, value = next(iter(of_data.items()))
        raise ConfigError(
            key, value, "set with export.io=uint8 alone: the range of its logits comes from images"
        )
    assert isinstance(saved, DictConfig)
    return saved


def _export_keys_text() -> str:
    return "no part of exporting a checkpoint, which can set " + ", ".join(EXPORT_KEYS)


def _complain(error: ConfigError) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2
