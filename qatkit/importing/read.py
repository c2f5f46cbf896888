"""A float ONNX file of any kind, as onnx_ir holds it: local functions inlined, nodes sorted, weights in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qatkit.encryption.vault import readable
from qatkit.export.quiet import quiet
from qatkit_verify.errors import ConfigError, one_line

if TYPE_CHECKING:
    import onnx_ir as ir


def read(path: Path) -> ir.Model:
    """Reads a file of any opset and any size; weights in other files are read from beside it.

    Raises:
        ConfigError: there is no such file, it can't be parsed, or some of its external data is missing.
    """
    if not path.is_file():
        raise ConfigError("onnx", path, "a float ONNX file that exists")
    try:
        with readable(path) as plain, quiet():
            return _read(path, plain)
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise ConfigError(
            "onnx", path, reason=f"the file can't be read as ONNX ({one_line(error)})"
        ) from error


def _read(path: Path, plain: Path) -> ir.Model:
    import onnx_ir as ir
    from onnx_ir.passes import common

    model = ir.load(plain)
    if not len(model.graph) or not model.opset_imports:
        raise ConfigError("onnx", path, "an ONNX file with a graph; this one holds no operator")
    for tensor in model.graph.initializers.values():
        held = tensor.const_value
        if isinstance(held, ir.ExternalTensor):
            if not (path.parent / held.location).is_file():
                reason = f"its external data is missing: {held.location}"
                raise ConfigError("onnx", path, reason=reason)
            tensor.const_value = ir.Tensor(held.numpy().copy(), name=tensor.name)
    if model.functions:
        common.InlinePass()(model)
    common.RemoveInitializersFromInputsPass()(model)
    for value in model.graph.inputs:  # some exporters write an open size as -1 or 0
        if value.shape is not None and any(isinstance(size, int) and size < 1 for size in value.shape):
            sizes = [None if isinstance(size, int) and size < 1 else size for size in value.shape]
            value.shape = ir.Shape(sizes)
    model.graph.sort()
    return model
