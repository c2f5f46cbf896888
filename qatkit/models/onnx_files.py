"""A float ONNX file as a model: `model.name=onnx/FILE`, or `onnx//FILE` for an absolute path.

`model.kwargs` may fix inputs, {fix: {sr: 16000}}, and name a library of custom operators, {custom_ops: FILE}. The
weights are the file's (`qatkit.importing`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from qatkit.config.schema import ModelConfig
from qatkit.data.arrays import Port
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    from qatkit.data.preprocessing import Preprocessing

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


def _path(name: str) -> Path:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if not path.is_file():
        raise ConfigError("model.name", name, f"{PREFIX}FILE, a float ONNX file that exists")
    return path


def _imported(path: Path, fix: Mapping[str, Any] | None = None, custom_ops: str | None = None) -> nn.Module:
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
