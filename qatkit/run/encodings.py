"""Reads, checks and sets the encodings that a run keeps fixed (`calibration.encodings`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qatkit.algorithms.base import algorithms_of
from qatkit.config.schema import Config
from qatkit.graph.fixed_encodings import KEY, Matched, fix, matched
from qatkit.graph.tensor_names import names_of_graph
from qatkit.importing import ImportedModel
from qatkit.importing.encodings import encodings_of
from qatkit.importing.tensor_names import names_of_file
from qatkit.records.encodings import Encodings, encodings_from
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

_ONNX = ".onnx"
_FIXED = ("weight_scale", "weight_range", "activation_scale", "activation_range")


def check_encodings(module: QATModule, config: Config) -> None:
    """Checks, before the long stages, that the file can be read and fits the module.

    Args:
        module: the prepared module.

    Raises:
        ConfigError: an algorithm would change fixed values, or `matched` raises it.
    """
    _check_overrides(config)
    if config.calibration.encodings is None:
        return
    found = _matched(module, config.calibration.encodings)
    for name, algorithm in algorithms_of(config.algorithm).items():
        if algorithm.changes_weights or found.weights:
            allowed = f"none with {KEY}, since {name} changes weights or their scales"
            raise ConfigError("algorithm", name, allowed)


def _check_overrides(config: Config) -> None:
    """Rejects algorithms that rescale channels if an override fixes a scale or range, which would no longer fit.

    With algorithm_choice=auto they may be listed, since only algorithms that reduce the error on held-out images
    are kept.
    """
    fixed = [
        f"backend.overrides.{pattern}.{name}"
        for pattern, override in config.backend.overrides.items()
        for name in _FIXED
        if getattr(override, name) is not None
    ]
    if not fixed or config.algorithm_choice == "auto":
        return
    for name, algorithm in algorithms_of(config.algorithm).items():
        if algorithm.rescales:
            allowed = f"none with {fixed[0]} ({name} rescales channels, and the fixed scale would not fit)"
            raise ConfigError("algorithm", name, allowed)


def fix_encodings(module: QATModule, config: Config) -> tuple[str, ...]:
    """Fixes the quantizers that the file names; returns notes for the report.

    Args:
        module: the prepared module.
    """
    path = config.calibration.encodings
    if path is None:
        return ()
    found = _matched(module, path)
    fix(module.graph, found)
    return tuple(found.notes(path))


def digest_of_encodings(config: Config) -> dict[str, str]:
    """Returns the digest of the file for the key of a calibration cache, or {} without a file.

    The path is not enough, since the content of the file may change.
    """
    path = config.calibration.encodings
    if path is None:
        return {}
    return {"calibration.encodings": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def _matched(module: QATModule, path: str) -> Matched:
    model, graph = module.original, module.graph
    names = names_of_file(model, graph) if isinstance(model, ImportedModel) else names_of_graph(graph)
    return matched(module.graph, names, _read(Path(path)).all, path)


def _read(path: Path) -> Encodings:
    if not path.is_file():
        raise ConfigError(KEY, path, "a file that exists")
    if path.suffix != _ONNX:
        return encodings_from(path, KEY)
    try:
        return encodings_of(path)
    except ConfigError as error:
        raise ConfigError(KEY, path, reason=error.problem) from error
