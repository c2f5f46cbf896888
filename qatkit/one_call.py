"""Quantizes a model from a script in one call: all stages of train.py, including the report.

    result = qatkit.quantize(model, example, batches, ["backend=qnnpack", "algorithm=auto"])
    result.file, result.met, result.report, result.module

The stages find models and data by dotted paths. The objects of a call are therefore kept here while it runs,
and `model.name` and `data.source` name the two functions of this module that return them.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qatkit.cli.scripts import conf
from qatkit.cli.train_command import train_run
from qatkit.config.argv import setting
from qatkit.config.compose import compose_config, without_hydra_around
from qatkit.config.origins import named_as_typed
from qatkit.config.schema import Config
from qatkit.data.arrays import LONE
from qatkit.data.sources import Splits
from qatkit.jobs import pipeline
from qatkit.jobs.checks import check_job, check_machine
from qatkit.jobs.export_checkpoint import restored
from qatkit.records.run_files import CHECKPOINT_FILE, FLOAT_FILE, INT8_FILE, REPORT_FILE
from qatkit.run.find import output_dir
from qatkit.run.folder import read_checkpoint
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError, counted

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Sample = tuple[dict[str, Tensor], Any]
_MODEL, _DATA = "qatkit.one_call.given_model", "qatkit.one_call.given_data"
_DEFAULTS = (
    "recipe=onnx_ptq",
    "data.root=null",
    "data.workers=0",
    f"data.source={_DATA}",
    "trainer.progress=false",
)
_FORM = "a tensor, a tuple of tensors or a mapping of tensors by name, with the batch axis first"


@dataclass(frozen=True)
class Result:
    """The result of `quantize`.

    Attributes:
        folder: the output folder, with report.html and all other files of a run.
        file: the quantized ONNX file.
        float_file: the float ONNX file with which it was compared.
        met: whether all bounds under `verify` are met.
        report: the content of report.json.
        module: the converted module, which computes in PyTorch as ONNX Runtime does on x86.
    """

    folder: Path
    file: Path
    float_file: Path
    met: bool
    report: Mapping[str, Any] = field(repr=False)
    module: nn.Module = field(repr=False)


@dataclass(frozen=True)
class _Given:
    model: nn.Module | None
    train: Sequence[Sample]
    test: Sequence[Sample]
    classes: tuple[str, ...]


class _Samples:
    """Samples in memory as a map-style dataset."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.targets = [target for _, target in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


_GIVEN: ContextVar[_Given | None] = ContextVar("given", default=None)


def quantize(
    model: nn.Module | str | Path,
    example: Inputs | None,
    batches: Iterable[Any],
    config: Sequence[str] = (),
    *,
    test_batches: Iterable[Any] | None = None,
) -> Result:
    """Quantizes a model, verifies the file in ONNX Runtime and writes the report.

    Args:
        model: a float module, which is not changed, or the path of a float ONNX file.
        example: the example input of the module: a tensor, a tuple of positional tensors, or a mapping of
            keyword arguments, batch axis first. None for a file.
        batches: calibration inputs like `example` (for a file: mappings by the names of its inputs). With
            `task=classification` or another task with targets, each is a pair (inputs, targets).
        config: settings as they are typed after train.py, such as `["backend=qnnpack", "schedule=qat_sgd"]`.
            By default nothing is trained, and outputs are compared with those of the float model.
        test_batches: inputs for verification. By default every second sample of `batches` is used for
            verification instead of calibration.

    Returns:
        The file, whether it meets its bounds, the report and the converted module. A file that misses a bound
        is a result as well: `met` is False, and the report names the fix if one is known.

    Raises:
        ConfigError: a setting, the model or a batch is unsuitable; this is raised before the long stages.
    """
    with _named_as_given(model, config), setting(config):
        return _quantized(model, example, batches, config, test_batches)


@contextmanager
def _named_as_given(model: nn.Module | str | Path, config: Sequence[str]) -> Iterator[None]:
    """Raises a ConfigError again that names the model, or an option of `config`, as the script gave them."""
    try:
        with named_as_typed(conf(), config):
            yield
    except ConfigError as error:
        if error.key not in ("model.name", "onnx") or any(one.startswith("model") for one in config):
            raise
        value = error.value if isinstance(model, nn.Module) and error.value != _MODEL else model
        given = type(model).__name__ if isinstance(value, nn.Module) else value
        raise ConfigError("model", given, reason=error.problem) from error


def _quantized(
    model: nn.Module | str | Path,
    example: Inputs | None,
    batches: Iterable[Any],
    config: Sequence[str],
    test_batches: Iterable[Any] | None,
) -> Result:
    of_module = isinstance(model, nn.Module)
    own = [f"model.name={_MODEL}", "name=model"] if of_module else [f"onnx={model}"]
    composed = _composed([*_DEFAULTS, *own, *config])
    names = _names(model, example) if isinstance(model, nn.Module) else ()
    labelled = composed.task != "outputs"
    train = list(_samples(batches, names, labelled))
    test = None if test_batches is None else list(_samples(test_batches, names, labelled))
    if test is None:
        train, test = train[::2], train[1::2]
    if not train or not test:
        raise ConfigError(
            "batches",
            counted(len(train) + len(test), "sample"),
            "at least one sample for calibration and one for verification",
        )
    given = _Given(
        copy.deepcopy(model) if isinstance(model, nn.Module) else None,
        train,
        test,
        _classes(composed, train, test),
    )
    composed = _fitted(composed, config, len(train))
    with _given(given):
        check_job(composed, from_checkpoint=False)
        check_machine(composed)
        folder = output_dir(composed)
        status = pipeline.train(replace(composed, output_dir=str(folder)))
        return _result(composed, folder, status)


def given_model() -> nn.Module:
    """Returns the module of the current call of `quantize`.

    Raises:
        ConfigError: there is no current call, for example if another program exports the checkpoint of a
            call.
    """
    model = _current().model
    assert model is not None
    return copy.deepcopy(model)


def given_data(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the samples of the current call of `quantize`.

    Raises:
        ConfigError: there is no current call, as in `given_model`.
    """
    given = _current()
    return Splits(_Samples(given.train), _Samples(given.test), given.classes, arrays=True)


def _current() -> _Given:
    given = _GIVEN.get()
    if given is None:
        told = (
            "model and data were passed to qatkit.quantize by a script; run that script again, with resume=auto "
            "to continue"
        )
        raise ConfigError("model.name", _MODEL, reason=told)
    return given


@contextmanager
def _given(given: _Given) -> Iterator[None]:
    token = _GIVEN.set(given)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _composed(typed: Sequence[str]) -> Config:
    """Returns the composed configuration, even within a program that Hydra itself has started."""
    with without_hydra_around():
        return compose_config(conf(), typed, train_run)


def _fitted(config: Config, typed: Sequence[str], samples: int) -> Config:
    """Returns the configuration with at most `samples` calibration images, in batches of at most that many.

    A number that was typed is kept.
    """
    calibration = config.calibration
    if not any(one.startswith("calibration.images=") for one in typed):
        calibration = replace(calibration, images=min(calibration.images, samples))
    if not any(one.startswith("calibration.batch_size=") for one in typed):
        calibration = replace(calibration, batch_size=min(calibration.batch_size, calibration.images))
    return replace(config, calibration=calibration)


def _names(model: nn.Module, example: Inputs | None) -> tuple[str, ...]:
    """Returns the names of the model's inputs in the order of `example`."""
    if isinstance(example, Tensor):
        return (LONE,)
    if isinstance(example, Mapping) and all(isinstance(one, Tensor) for one in example.values()):
        return tuple(example)
    if isinstance(example, Sequence) and all(isinstance(one, Tensor) for one in example):
        parameters = list(inspect.signature(model.forward).parameters)
        return tuple(parameters[: len(example)]) if len(example) > 1 else (LONE,)
    raise ConfigError("example", type(example).__name__, _FORM)


def _samples(batches: Iterable[Any], names: Sequence[str], labelled: bool) -> Iterator[Sample]:
    """Yields the samples of batches, each with a batch axis of length 1, and their targets."""
    for number, batch in enumerate(batches):
        where = f"batches[{number}]"
        if labelled and not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ConfigError(
                where, type(batch).__name__, "a pair (inputs, targets), since the task has targets"
            )
        inputs, targets = batch if labelled else (batch, None)
        tensors = _by_name(inputs, names, where)
        count = len(next(iter(tensors.values())))
        if any(len(one) != count for one in tensors.values()) or (
            targets is not None and len(targets) != count
        ):
            raise ConfigError(where, count, "the same number of samples in all inputs and targets")
        for row in range(count):
            target = NO_TARGET if targets is None else _target(targets[row])
            yield {name: one[row : row + 1] for name, one in tensors.items()}, target


def _by_name(inputs: Any, names: Sequence[str], where: str) -> dict[str, Tensor]:
    if isinstance(inputs, Mapping):
        found = dict(inputs)
    else:
        listed = inputs if isinstance(inputs, tuple | list) else (inputs,)
        if len(listed) != len(names or listed):
            raise ConfigError(
                where, counted(len(listed), "input"), f"{counted(len(names), 'input')}, like the example"
            )
        found = dict(zip(names or (LONE,), listed, strict=False))
    wrong = [name for name, one in found.items() if not isinstance(one, Tensor | np.ndarray) or not one.ndim]
    missing = [name for name in names if name not in found]
    if missing:
        given = ", ".join(map(str, found)) or "nothing"
        raise ConfigError(where, given, f"tensors named {', '.join(names)}; {missing[0]} is missing")
    if wrong or not found:
        given = ", ".join(f"{name} ({type(found[name]).__name__})" for name in wrong) or "nothing"
        raise ConfigError(where, given, _FORM)
    return {name: torch.as_tensor(one) for name, one in found.items()}


def _target(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and not value.ndim else value


def _classes(config: Config, *splits: Sequence[Sample]) -> tuple[str, ...]:
    """Returns the names of the classes, which are their numbers.

    They are () for a task without classes, or if a target is not an integer.
    """
    targets = [target for split in splits for _, target in split]
    if config.task not in ("classification", "embedding") or not all(isinstance(one, int) for one in targets):
        return ()
    return tuple(str(number) for number in range(max(targets) + 1))


def _result(config: Config, folder: Path, status: int) -> Result:
    stored = read_checkpoint(str(folder / CHECKPOINT_FILE))
    module = restored(config, str(folder / CHECKPOINT_FILE), stored)
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    return Result(
        folder, folder / INT8_FILE, folder / FLOAT_FILE, status == 0, report, module.convert().graph
    )
