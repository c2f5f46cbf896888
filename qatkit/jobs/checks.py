"""Checks of a job in addition to allowed values: files and code must exist, and the machine must be suitable."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from qatkit.config.rules import DOTTED
from qatkit.config.schema import Config, TrainerConfig
from qatkit.quant.spec import NARROW_BIASES, WIDE
from qatkit.run.backend import backend_of
from qatkit.tasks import dotted as dotted_task
from qatkit_verify.dotted import check_path
from qatkit_verify.errors import ConfigError, counted, first_line
from qatkit_verify.foreign import Called
from qatkit_verify.installed import install_extra
from qatkit_verify.runtimes.base import dotted, load_runtimes

_A_CORE = 16  # limit of threads, and of loading processes, per core: more would only cause switching


def check_job(config: Config, from_checkpoint: bool) -> None:
    """Checks that settings suit the program, that their dotted paths resolve, and that required files exist.

    Args:
        config: the configuration of the job.
        from_checkpoint: whether export.py started the job.

    Raises:
        ConfigError: a setting is unsuitable; the first one is reported.
    """
    if config.checkpoint is not None and not from_checkpoint:
        raise ConfigError(
            "checkpoint",
            config.checkpoint,
            ("null with train.py (resume=FILE continues a run, export.py checkpoint=FILE exports it)"),
        )
    if not from_checkpoint and (config.onnx is not None or config.mode is not None):
        key = "mode" if config.onnx is None else "onnx"
        raise ConfigError(key, getattr(config, key), "null with train.py (use export.py onnx=FILE mode=MODE)")
    if config.resume not in (None, "auto") and not from_checkpoint and not Path(config.resume).is_file():
        raise ConfigError("resume", config.resume, "null, auto, or a checkpoint file that exists")
    if config.search.trials and from_checkpoint:
        raise ConfigError("search.trials", config.search.trials, "0 with export.py (only train.py searches)")
    if config.search.trials and importlib.util.find_spec("optuna") is None:
        allowed = f"0 without the extra search (install it with {install_extra('search')})"
        raise ConfigError("search.trials", config.search.trials, allowed)
    for key, path in dotted_paths(config):
        if not key.startswith("algorithm."):
            check_path(path, key)
    load_runtimes(config.verify.runtimes)
    if config.rescue.climb:
        _check_climb(config)
    if config.algorithm:
        _check_algorithms(config)


def _check_climb(config: Config) -> None:
    """Rejects a rescue, which compares latencies, for number types that ONNX Runtime computes in float."""
    for key, kinds in (("activation_dtype", WIDE), ("bias_dtype", NARROW_BIASES)):
        if (kind := getattr(config.backend, key)) in kinds:
            raise ConfigError(
                "rescue.climb", True, f"false with backend.{key}={kind}, which no kernel makes faster"
            )


def _check_algorithms(config: Config) -> None:
    from qatkit.algorithms.base import algorithms_of

    for name, algorithm in algorithms_of(config.algorithm).items():
        if algorithm.weights_alone and not backend_of(config).weights_alone:
            reason = "the algorithm needs a backend that only quantizes weights; set backend=weight_only"
            raise ConfigError(f"algorithm.{name}.target", config.algorithm[name]["target"], reason=reason)


def dotted_paths(config: Config) -> list[Called]:
    """Returns the settings that name code, each with its dotted path."""
    paths = [(key, getattr(getattr(config, key.split(".")[0]), key.split(".")[1])) for key in DOTTED]
    paths.append(("task", dotted_task(config.task)))
    paths += [("verify.checks", path) for path in config.verify.checks]
    paths += [("verify.runtimes", dotted(name)) for name in config.verify.runtimes]
    paths += [(f"algorithm.{name}.target", entry["target"]) for name, entry in config.algorithm.items()]
    of_a_source = "." not in config.model.name or "/" in config.model.name  # a name that is not a dotted path
    return [(key, path.replace(":", ".")) for key, path in paths if key != "model.name" or not of_a_source]


def check_machine(config: Config) -> None:
    """Checks that the machine and the cluster job have the requested cores, devices and tasks.

    Lightning would report a missing device late, and ONNX Runtime not at all.

    Raises:
        ConfigError: something is missing, `output_dir` is not set for processes that Slurm or torchrun starts, or
            torch.compile does not work; the first problem is reported.
    """
    cores, wanted = os.cpu_count() or 1, config.trainer
    for key, value in (("verify.threads", config.verify.threads), ("data.workers", config.data.workers)):
        if value > _A_CORE * cores:
            allowed = f"at most {_A_CORE * cores} on this machine with {counted(cores, 'core')}"
            raise ConfigError(key, value, allowed)
    tasks, devices = os.environ.get("SLURM_NTASKS"), _devices(wanted)
    processes = devices * wanted.num_nodes
    if tasks is not None and wanted.num_nodes > 1 and tasks != str(processes):
        reason = (
            f"the Slurm job has SLURM_NTASKS={tasks} instead of {processes} (trainer.devices on each node); submit it"
            f" with --nodes={wanted.num_nodes} --ntasks-per-node={devices}"
        )
        raise ConfigError("trainer.num_nodes", wanted.num_nodes, reason=reason)
    if tasks == str(processes) != "1" and "SLURM_NTASKS_PER_NODE" not in os.environ:
        reason = (
            f"the number of tasks on each node is not set; submit the Slurm job with --ntasks-per-node={devices}"
            " instead of --ntasks"
        )
        raise ConfigError("trainer.devices", wanted.devices, reason=reason)
    _check_folder(config, tasks, processes)
    if wanted.accelerator not in ("auto", "cpu") or wanted.devices != 1:
        _check_devices(wanted)
    if wanted.compile:
        _check_compiler(wanted)


def _devices(wanted: TrainerConfig) -> int:
    """Returns the number of devices per node; -1 means every GPU."""
    if wanted.devices != -1:
        return wanted.devices
    import torch  # a slow import, which should not delay messages about mistakes in the configuration

    return max(1, torch.cuda.device_count())


def _check_folder(config: Config, tasks: str | None, processes: int) -> None:
    """Requires output_dir for processes that a cluster or launcher starts.

    Otherwise each process would create a folder with its own time in the name, and wait there for the first
    one. resume=FILE already names the folder, and the folder of a search has no time in its name.
    """
    several = processes > 1 and (tasks == str(processes) or "TORCHELASTIC_RUN_ID" in os.environ)
    if not (config.trainer.num_nodes > 1 or several):
        return
    if config.output_dir is None and config.resume in (None, "auto") and not config.search.trials:
        allowed = (
            f"the same folder for all {processes} processes of this run, since Slurm or torchrun starts them"
        )
        raise ConfigError("output_dir", None, allowed)


def _check_devices(wanted: TrainerConfig) -> None:
    import torch

    found = 0 if wanted.accelerator == "cpu" else torch.cuda.device_count()
    if found == 0 and wanted.accelerator in ("auto", "cpu"):  # the CPU supports any number of processes
        if wanted.devices == -1:
            raise ConfigError("trainer.devices", -1, "1 or more, since -1 means all GPUs and none is used")
    elif found == 0:
        raise ConfigError(
            "trainer.accelerator", wanted.accelerator, "auto or cpu, since no such device is visible"
        )
    elif wanted.devices > found:
        up_to = "1" if found == 1 else f"1 to {found}"
        raise ConfigError("trainer.devices", wanted.devices, f"{up_to}, the number of visible devices")


def _check_compiler(wanted: TrainerConfig) -> None:
    """Tests the compiler by compiling a small function on the device.

    Headers may be missing, and which ones are needed depends on the device.

    Raises:
        ConfigError: the function cannot be compiled.
    """
    import torch

    device = "cuda" if wanted.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))
    except Exception as error:  # any error of the tracer, the compiler, its linker or the device
        lines = str(error).splitlines()
        why = next((line.strip() for line in lines if "error:" in line), first_line(error))
        reason = f"torch.compile failed ({why}); set CXX to a C++ compiler that works, or set trainer.compile=false"
        raise ConfigError("trainer.compile", True, reason=reason) from error
    finally:
        torch.compiler.reset()
