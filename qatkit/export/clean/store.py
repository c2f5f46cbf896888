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
)  # bytes of weights, from which they are stored next to the file; a message holds less than 2^31
# Packed weights are a copy, and the kernels that read them add in another order than those that are given the same
# values as no constant.
UNPACKED = {"session.disable_prepacking": "1"}
OLDEST_IR = 4  # before it, initializers are inputs, too


def weight_bytes(model: ir.Model) -> int:
    """Returns the bytes of all initializers."""
    held = (value.const_value for graph in graphs(model.graph) for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def store(model: ir.Model, path: Path, *, beside: bool = False) -> list[Path]:
    """Writes a model; weights in a file next to it are written one after the other.

    Args:
        model: its weights may lie in other files.
        path: of the file.
        beside: whether weights are stored in PATH.data whatever their size.

    Returns:
        The files that were written.
    """
    model.ir_version = max(model.ir_version, OLDEST_IR)
    if not beside and weight_bytes(model) < LARGE:
        ir.external_data.load_to_model(model)  # else the file would name those of a temporary folder
        ir.save(model, path)
        return [path]
    data = path.with_name(f"{path.name}.data")
    ir.save(model, path, external_data=data.name)
    return [path, data] if data.exists() else [path]


def check(path: Path, source: Path) -> None:
    """Holds that onnx's checker and ONNX Runtime take a file.

    Raises:
        ConfigError: the checker does not, though it took the source, or ONNX Runtime does not.
    """
    open_session(path, threads=1, options=UNPACKED)
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        try:
            onnx.checker.check_model(str(source))
        except Exception:
            return  # a file that the checker never took
        raise ConfigError(
            "clean", source, reason=f"onnx's checker refuses the cleaned file ({one_line(error)})"
        ) from error
