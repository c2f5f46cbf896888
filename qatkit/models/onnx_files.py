"""A float ONNX file as a model: `model.name=onnx/FILE`, or `onnx//FILE` for an absolute path.

`model.kwargs` may fix inputs, {fix: {sr: 16000}}, name the outputs that are inputs of the next step, {states: {state:
stateN}}, and name a library of custom operators, {custom_ops: FILE}. The weights come from the file
(`qatkit.importing`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import nn

from qatkit.config.schema import ModelConfig
from qatkit.data.arrays import Port
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.rollout import States
from qatkit.encryption.vault import readable
from qatkit.importing.float_file import layout_of
from qatkit.importing.inputs import ImageInput, file_inputs, fixed_inputs, image_input
from qatkit.importing.read import read
from qatkit.models.declared import Declared
from qatkit.records.preprocessing_file import preprocessing_beside, recordings_beside
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import sides

if TYPE_CHECKING:
    from qatkit_verify.free_run import FreeRun

PREFIX = "onnx/"


def builder(name: str) -> Callable[..., Any]:
    """Returns the function that imports the file of `name`.

    Raises:
        ConfigError: there is no such file.
    """
    return functools.partial(_imported, _path(name))


def declared(config: ModelConfig, layout: str | None) -> Declared:
    """Returns the inputs that the file declares, and the images that the model.json next to it describes.

    Args:
        config: the settings of `model`.
        layout: the layout of images, nchw | nhwc; None for the layout in model.json.

    Raises:
        ConfigError: the file is missing, cannot be read or does not describe an input, or model.json cannot
            be used.
    """
    path = _path(config.name)
    model, fixed = read(path), config.kwargs.get("fix") or {}
    inputs = file_inputs(path, model, fixed)
    image = image_input(inputs, layout_of(path, layout))
    told = None if image is None else _beside(path, image)
    ports, about = tuple(Port(*one) for one in inputs), _about(model.metadata_props, fixed)
    return Declared(ports, image, told, about, recordings_beside(path))


def _beside(path: Path, image: ImageInput) -> Preprocessing | None:
    """Returns the preprocessing in the model.json of the file's bundle; None if there is none that fits the input."""
    values = preprocessing_beside(path)
    if values is None:
        return None
    channels, height, width = image.image
    found = Preprocessing.from_dict(values)
    high, wide = sides(found.image_size)
    fits = height in (None, high) and width in (None, wide) and channels in (None, found.channels)
    return found if fits and image.layout == found.layout else None


def _about(metadata: Mapping[str, str], fixed: Mapping[str, Any]) -> dict[str, str]:
    """Returns the inputs that are fixed to one number, followed by the file's metadata, all as text."""
    values = {name: np.ravel(one) for name, one in fixed.items()}
    numbers = {name: str(one[0]) for name, one in values.items() if one.size == 1 and one.dtype.kind in "if"}
    return {**numbers, **metadata, **numbers}


def states(config: ModelConfig) -> States | None:
    """Returns the outputs of the file that are inputs of its next step; None if none are named.

    Raises:
        ConfigError: as for `declared` and `qatkit.importing.states.file_states`.
    """
    if "states" not in config.kwargs:
        return None
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
    path = Path(
        os.path.expanduser(name.removeprefix(PREFIX))
    )  # unlike Path.expanduser, it accepts a folder called "~run"
    if not path.is_file():
        raise ConfigError("model.name", name, "a float ONNX file that exists")
    return path


def _imported(
    path: Path,
    fix: Mapping[str, Any] | None = None,
    custom_ops: str | None = None,
    states: Mapping[str, str] | None = None,
) -> nn.Module:
    """Returns the module for one step; the data handle its states (`qatkit.data.rollout`)."""
    from qatkit.importing import import_onnx  # imports ONNX Runtime, which other models do not need

    try:
        return import_onnx(path, fixed=fix, custom_ops=custom_ops)
    except ConfigError as error:
        if error.key != "custom_ops":
            raise
        raise ConfigError("model.kwargs.custom_ops", error.value, reason=error.problem) from error


def pretrained(config: ModelConfig, classes: int | None) -> NoReturn:
    """Raises an error, since the file contains its own weights.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "model.weights", config.weights, f"null with model.name={config.name}, which contains its own weights"
    )


def preprocessing(config: ModelConfig) -> Preprocessing | None:
    """Raises the same error as `pretrained`."""
    pretrained(config, None)
