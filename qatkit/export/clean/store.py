"""Stores a model in a file, with large weights in a second file next to it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from qatkit.export.clean.graphs import graphs
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.session import open_session

LARGE = (
    1 << 30
)  # bytes from which weights are stored next to the file; a protobuf message has less than 2^31 bytes
# Prepacking copies weights. It also changes the order of sums, but only for constant weights, so folding a computed
# weight into a constant would change outputs.
UNPACKED = {"session.disable_prepacking": "1"}
OLDEST_IR = 4  # in older versions, initializers are inputs as well


def weight_bytes(model: ir.Model) -> int:
    """Returns the total size of all initializers in bytes."""
    held = (value.const_value for graph in graphs(model.graph) for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def store(model: ir.Model, path: Path, *, beside: bool = False) -> list[Path]:
    """Writes a model to a file; if its weights are large, they are written one at a time to a second file.

    Args:
        model: the model; its weights may be in other files.
        path: the path of the file.
        beside: whether to store weights in PATH.data whatever their size.

    Returns:
        The files that were written.
    """
    model.ir_version = max(model.ir_version, OLDEST_IR)
    if not beside and weight_bytes(model) < LARGE:
        ir.external_data.load_to_model(model)  # otherwise the file would refer to a temporary folder
        ir.save(model, path)
        return [path]
    data = path.with_name(f"{path.name}.data")
    ir.save(model, path, external_data=data.name)
    return [path, data] if data.exists() else [path]


def check(path: Path, source: Path) -> None:
    """Checks that onnx's checker and ONNX Runtime accept a file.

    Raises:
        ConfigError: ONNX Runtime refuses the file, or the checker refuses it although it accepts `source`.
    """
    open_session(path, threads=1, options=UNPACKED)
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        try:
            onnx.checker.check_model(str(source))
        except Exception:
            return  # the checker does not accept the original either
        raise ConfigError(
            "onnx", source, reason=f"onnx's checker refuses the cleaned file ({one_line(error)})"
        ) from error
