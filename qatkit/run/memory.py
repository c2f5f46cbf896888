"""Estimates the memory and time of a run before it starts, and rejects settings that cannot work.

    one batch of noise through the float model ─> bytes and seconds per image ─ x batches, epochs, rounds ─> refused?

Each estimate is a lower bound: it counts only inputs and outputs of modules, no gradients of weights and no
simulation. Every rejected run would therefore have been killed by the kernel or would have taken far too
long. Training on an accelerator is not estimated, since its memory and speed differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.data.inputs import Batch, Inputs
from qatkit.graph.signature import call
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import as_typed

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LONGEST = 365 * 24 * 3600.0  # seconds that one stage may take
_COPIES = 2  # copies of the weights: the float model's, and those of the module made from it
_LARGEST_FILE = 2**31 - 2**24  # bytes of weights in a Protocol Buffers file, with room for the graph
_BACKWARD = 3  # time of a training step, in forward passes
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class Cost:
    """The cost of one image in the float model.

    Attributes:
        largest: the size of the largest output of a module, in bytes.
        kept: the size of all outputs, in bytes; training keeps them for the backward pass.
        seconds: the time of a forward pass on the CPU.
    """

    largest: int
    kept: int
    seconds: float


def available_memory() -> int | None:
    """Returns the bytes that this process can still use within the limits of machine and control groups.

    It is None if the system does not report them.
    """
    found = [room for room in (_of_machine(), *_of_groups()) if room is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_groups() -> Iterator[int | None]:
    """Yields the free bytes of this process's control group and of every group above it, for both cgroup versions.

    Cached files count as available, since the kernel drops them when memory is needed. A group without a limit
    yields None.
    """
    try:
        groups = OWN_GROUPS.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, inner = line.split(":", 2)
        first, second = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names = {"": ("", *first, ""), "memory": ("memory", *second, "total_")}.get(controllers)
        if names is None:
            continue
        root, limit, usage, prefix = GROUPS / names[0], *names[1:]
        place = root / inner.strip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(root):
                yield _room(folder / limit, folder / usage, folder / "memory.stat", prefix)


def _room(limit: Path, usage: Path, stat: Path, prefix: str) -> int | None:
    try:
        room = int(limit.read_text(encoding="ascii")) - int(usage.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no such group, or no limit ("max")
        return None
    try:
        every = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
        return room + sum(int(every[f"{prefix}{name}"]) for name in ("inactive_file", "active_file"))
    except (OSError, ValueError, KeyError):  # the system does not have these figures
        return room


def check_weights_fit(config: Config, parameters: int | None) -> None:
    """Raises ConfigError for weights that do not fit into memory or into one file, before they are loaded.

    Args:
        config: the configuration of the run.
        parameters: the number of weights; None means unknown.
    """
    if parameters is None:
        return
    if 4 * parameters > _LARGEST_FILE:
        allowed = (
            f"a model of at most {_LARGEST_FILE // 4:,} parameters, since an ONNX file is limited to 2 GB (float32);"
            f" this model has {parameters:,}"
        )
        raise ConfigError("model.name", config.model.name, allowed)
    room, needed = available_memory(), _COPIES * 4 * parameters
    if room is not None and needed > room:
        told = f"{parameters:,} parameters need {_bytes(needed)} in float32 with their quantized copy"
        allowed = f"a model that fits into memory; {told}, and {_bytes(room)} is available"
        raise ConfigError("model.name", config.model.name, allowed)


def check_inputs(config: Config, data: DataModule) -> None:
    """Checks that the inputs of every batch, and the cache of decoded images, fit into memory.

    Raises:
        ConfigError: a batch or the cache does not fit; the message names the largest possible value.
    """
    image = data.inputs.bytes
    room = available_memory()
    if room is not None and 2 * image > room:
        raise _too_large(config, data, room, image)
    kept, each = config.data.cache_mb, 1_000_000 * max(1, config.trainer.devices)
    if config.data.cache == "ram" and room is not None and kept * each > room:
        allowed = (
            f"at most {room // each} here; {_bytes(kept * each)} of decoded images "
            f"exceeds the available {_bytes(room)}"
        )
        raise ConfigError("data.cache_mb", kept, allowed)
    for key, batch in _batches(config, data):
        check_memory(key, batch, image, data.inputs, "the inputs")


def _too_large(config: Config, data: DataModule, room: int, each: int) -> ConfigError:
    """Returns the error for a sample of `each` bytes that does not fit into `room` bytes."""
    what = "image" if data.of_pictures else "sample"
    told = f"one {what} needs {_bytes(each)}, and {_bytes(room)} is available"
    if not data.of_pictures:
        return ConfigError("data.source", config.data.source, f"samples that fit into memory; {told}")
    size = as_typed(data.preprocessing.image_size)
    pixels = room // (8 * data.preprocessing.channels)
    most = math.isqrt(pixels) if isinstance(size, int) else f"{pixels} pixels in total"
    return ConfigError("data.image_size", size, f"at most {most} here; {told}")


def check_model(config: Config, data: DataModule, cost: Cost) -> None:
    """Checks that every batch fits into memory with the model's activations, and that no stage takes over a year.

    The time is estimated for the latency measurement, a calibration on noise and training on the CPU.

    Raises:
        ConfigError: a setting is too large; the message names the largest possible value.
    """
    schedule = config.schedule
    for key, batch in _batches(config, data):
        training = key == "data.batch_size"
        if training and not _on_cpu(config):
            continue
        each = cost.kept if training else cost.largest
        check_memory(key, batch, each, data.inputs, "the activations")
    _check_time("verify.latency_runs", config.verify.latency_runs, config.verify.latency_batch * cost.seconds)
    if config.calibration.random:
        _check_time("calibration.images", config.calibration.images, cost.seconds)
    if _on_cpu(config) and (schedule.epochs or schedule.float_epochs):
        steps, step = data.steps_per_epoch(), data.config.batch_size * cost.seconds * _BACKWARD
        most = schedule.max_steps or math.inf
        _check_time("schedule.float_epochs", schedule.float_epochs, steps * step)
        if schedule.epochs * steps <= most:
            _check_time("schedule.epochs", schedule.epochs, steps * step)
        else:
            _check_time("schedule.max_steps", schedule.max_steps or 0, step)


def measured(model: nn.Module, batch: Batch, count: int) -> tuple[Any, Cost]:
    """Returns the outputs for a batch of `count` samples, and the cost of one sample from two passes."""
    sizes: list[int] = []

    def note(module: nn.Module, given: object, made: object) -> None:
        if isinstance(made, Tensor):
            sizes.append(made.numel() * made.element_size() // count)

    hooks = [one.register_forward_hook(note) for one in model.modules() if not list(one.children())]
    try:
        given = call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    start = time.perf_counter()
    call(model, batch)
    return given, Cost(max(sizes, default=0), sum(sizes), (time.perf_counter() - start) / count)


def _batches(config: Config, data: DataModule) -> Iterator[tuple[str, int]]:
    """Yields the keys that decide how many images are in memory at once, with the number that is used at most."""
    tests = min(len(data.splits.test), config.data.test_images or math.inf)
    if config.schedule.epochs or config.schedule.float_epochs:
        yield "data.batch_size", data.config.batch_size
    yield "data.eval_batch_size", int(min(data.eval_rows, tests))
    yield "calibration.batch_size", min(config.calibration.batch_size, config.calibration.images)
    yield "verify.latency_batch", config.verify.latency_batch
    if config.analysis.isolation or config.analysis.sensitivity != "none":
        yield "analysis.batch_size", min(config.analysis.batch_size, config.analysis.images)


def check_memory(key: str, batch: int, each: int, inputs: Inputs, what: str) -> None:
    """Raises ConfigError if `batch` samples of `each` bytes exceed the available memory.

    Args:
        key: the key of the setting that decides the number of samples.
        batch: the number of samples.
        each: the bytes per sample.
        inputs: the inputs of the model, for the message.
        what: what needs the memory, for the message.
    """
    room = available_memory()
    if room is not None and batch * each > room:
        sizes = "x".join(map(str, inputs.shape))
        allowed = (
            f"at most {room // each} here, for samples of {sizes}; {what} need {_bytes(batch * each)}, and "
            f"{_bytes(room)} is available"
        )
        raise ConfigError(key, batch, allowed)


def _check_time(key: str, count: int, each: float) -> None:
    if count * each > _LONGEST:
        allowed = (
            f"at most {int(_LONGEST / each)} here; {count:,} would take "
            f"{count * each / _DAY:,.0f} days, estimated from one batch"
        )
        raise ConfigError(key, count, allowed)


def _on_cpu(config: Config) -> bool:
    accelerator = config.trainer.accelerator
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"
