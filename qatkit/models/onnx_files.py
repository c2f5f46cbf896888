"""A float ONNX file as a model: `model.name=onnx/FILE`, or `onnx//FILE` for an absolute path.

`model.kwargs` may fix inputs, {fix: {sr: 16000}}, name the outputs that are inputs of the next step, {states: {state:
stateN}}, and a library of custom operators, {custom_ops: FILE}. The weights are the file's (`qatkit.importing`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from qatkit.config.schema import ModelConfig
from qatkit.data.arrays import Port
from qatkit.data.rollout import States
from qatkit.encryption.vault import readable
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    from qatkit.data.preprocessing import Preprocessing
    from qatkit_verify.free_run import FreeRun

PREFIX = "onnx/"


def builder(name: str) -> Callable[..., Any]:
    """Returns the function that imports the file of `name`.

    Raises:
        ConfigError: there is no such file.
    """
    return functools.partial(_imported, _path(name))


def ports(config: ModelConfig) -> tuple[Port, ...]:
    """Returns the inputs that the file is called with.

    Raises:
        ConfigError: there is no such file, it can't be read, or it does not say what an input is.
    """
    from qatkit.importing.build import file_inputs
    from qatkit.importing.read import read

    path = _path(config.name)
    return tuple(Port(*one) for one in file_inputs(path, read(path), config.kwargs.get("fix") or {}))


def states(config: ModelConfig) -> States | None:
    """Returns the outputs of the file that are inputs of its next step; None where no such are named.

    Raises:
        ConfigError: as `ports` and `qatkit.importing.states.file_states`.
    """
    if "states" not in config.kwargs:
        return None
    from qatkit.importing.build import fixed_inputs
    from qatkit.importing.read import read
    from qatkit.importing.states import file_states

    path = _path(config.name)
    model = read(path)
    fix = fixed_inputs(path, model.graph, config.kwargs.get("fix") or {})
    outputs = file_states(path, model, config.kwargs["states"], fix)
    return States(outputs, functools.partial(_opened, path, outputs, fix, config.kwargs.get("custom_ops")))


def _opened(
    path: Path, outputs: Mapping[str, str], fix: Mapping[str, Any], custom_ops: str | None
) -> FreeRun:
    from qatkit_verify.free_run import FreeRun
    from qatkit_verify.session import open_session, use_library

    if custom_ops is not None:
        use_library(custom_ops)
    with readable(path) as plain:
        return FreeRun(open_session(plain, threads=1), outputs, fix)


def _path(name: str) -> Path:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if not path.is_file():
        raise ConfigError("model.name", name, f"{PREFIX}FILE, a float ONNX file that exists")
    return path


def _imported(
    path: Path,
    fix: Mapping[str, Any] | None = None,
    custom_ops: str | None = None,
    states: Mapping[str, str] | None = None,
) -> nn.Module:
    """Returns the module of one step; what becomes of its states is the data's matter (`qatkit.data.rollout`)."""
    from qatkit.importing import import_onnx  # with ONNX Runtime, which other models do without

    return import_onnx(path, fixed=fix, custom_ops=custom_ops)


def pretrained(config: ModelConfig, classes: int | None) -> NoReturn:
    """The file holds its weights.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "model.weights", config.weights, f"null with model.name={config.name}, which holds its weights"
    )


def preprocessing(config: ModelConfig) -> Preprocessing | None:
    """Raises as `pretrained`."""
    pretrained(config, None)
