"""The command line of train.py, where `onnx=FILE` names the model of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from qatkit_verify.errors import ConfigError

_PREFIX, _RECIPES = "onnx/", "recipe=onnx_ptq or recipe=onnx_qat (or model=onnx in another recipe)"


def train_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration with `onnx=FILE`, if it is set, as the model of the recipe.

    The run is then named after the file unless a name is typed.

    Raises:
        ConfigError: a file is given for a recipe with another model, a recipe for files has no file, a mode is
            set, or a state is listed twice.
    """
    imports = str(node.model.name).startswith(_PREFIX)
    if node.onnx is None:
        if node.model.name == f"{_PREFIX}{None}":
            raise ConfigError("onnx", None, "a float ONNX file (onnx=FILE) with model=onnx")
        return node
    if node.mode is not None:
        raise ConfigError("mode", node.mode, "null with train.py (use export.py onnx=FILE mode=MODE)")
    _check_states(overrides)
    if not imports:
        allowed = f"null with model.name={node.model.name}; to train a float ONNX file, use {_RECIPES}"
        raise ConfigError("onnx", node.onnx, allowed)
    typed = {text.lstrip("+~").partition("=")[0] for text in overrides}
    if "name" not in typed:
        node.name = Path(str(node.onnx)).stem or "onnx"
    node.model.name = f"{_PREFIX}{node.onnx}"
    node.onnx = None
    return node


def _check_states(overrides: Sequence[str]) -> None:
    """Rejects a state that is named twice, since Hydra keeps only the last of two equal keys in a mapping."""
    for text in overrides:
        typed = re.search(r"\bstates\s*:\s*\{([^{}]*)\}", text) if "model.kwargs=" in text else None
        names = [one.partition(":")[0].strip() for one in typed[1].split(",")] if typed else []
        twice = next((name for name in names if names.count(name) > 1), None)
        if typed and twice is not None:
            given = " ".join(typed[1].split())
            raise ConfigError("model.kwargs.states", given, f"each input once; '{twice}' is listed twice")
