"""Converts a model to another opset.

onnx's converter raises the opset, or lowers it to 18 or higher. Our own rules lower it to 13 to 17.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx import version_converter

from qatkit.export.clean.store import LARGE, weight_bytes
from qatkit.export.float_graph import upgraded
from qatkit.export.lower_opset import lower
from qatkit.export.quiet import quiet
from qatkit_verify.errors import ConfigError, one_line

KEY = "clean.opset"
_RULES_FROM, _RULES_TO = 18, 13  # the opsets between which our own rules lower a file
_CONVERTERS_OWN = (
    "Resize",
    "Upsample",
)  # older forms of these place pixels differently, which the converter ignores


def to_opset(path: Path, model: ir.Model, opset: int) -> tuple[ir.Model, list[str]]:
    """Returns the model at another opset, with lines that say what was changed.

    Args:
        path: the path of the file, for messages.
        model: a model of any opset.
        opset: the requested opset.

    Raises:
        ConfigError: an operator does not exist in the opset, the converter fails, or the weights are too large for it.
    """
    before = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if before == opset:
        return model, []
    if weight_bytes(model) >= LARGE:
        raise ConfigError(
            KEY, opset, f"null, because onnx's converter cannot copy weights of {LARGE >> 30} GiB or more"
        )
    ir.external_data.load_to_model(model)
    with quiet():
        found = (
            _raised(path, model, before, opset) if opset > before else _lowered(path, model, before, opset)
        )
    found.graph.sort()
    return found, [f"opset {before} to {opset}"]


def _raised(path: Path, model: ir.Model, before: int, opset: int) -> ir.Model:
    try:
        return upgraded(path, ir.to_proto(model), before, opset)
    except ConfigError as error:
        raise ConfigError(KEY, opset, reason=error.problem) from error


def _lowered(path: Path, model: ir.Model, before: int, opset: int) -> ir.Model:
    if opset >= _RULES_FROM:
        try:
            return ir.from_proto(version_converter.convert_version(ir.to_proto(model), opset))
        except Exception as error:
            reason = f"onnx cannot convert the file to this opset ({one_line(error)})"
            raise ConfigError(KEY, opset, reason=reason) from error
    if before < _RULES_FROM:
        model = _raised(path, model, before, _RULES_FROM)
    try:
        lower(model, opset)
    except ConfigError as error:
        raise ConfigError(KEY, opset, reason=error.problem) from error
    return model
