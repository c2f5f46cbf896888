"""A float ONNX file of any kind, as onnx_ir holds it: local functions inlined, nodes sorted, weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qatkit.encryption.vault import readable
from qatkit.export.quiet import quiet
from qatkit_verify.errors import ConfigError, one_line

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MAX_BYTES = 2**31 - 1  # protobuf's limit for one message


def read(
    path: Path, *, most: int | None = None, check: Callable[[onnx.GraphProto], None] | None = None
) -> ir.Model:
    """Reads a file of any opset; weights in other files are read from beside it.

    Args:
        path: of the file.
        most: bytes that it may have, external data included; None: any number.
        check: is given the graph as it lies in the file, before onnx_ir, which takes long to import.

    Raises:
        ConfigError: there is no such file, it can't be parsed, some of its external data is missing, or it is larger.
    """
    if not path.is_file():
        raise ConfigError("onnx", path, "a float ONNX file that exists")
    try:
        with readable(path) as plain, quiet():
            return _read(path, plain, most, check)
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise ConfigError(
            "onnx", path, reason=f"the file can't be read as ONNX ({one_line(error)})"
        ) from error


def _read(
    path: Path, plain: Path, most: int | None, check: Callable[[onnx.GraphProto], None] | None
) -> ir.Model:
    import onnx

    _check_bytes(path, plain.stat().st_size, most)
    proto = onnx.load(str(plain), load_external_data=False)
    if not proto.graph.node or not proto.opset_import:
        raise ConfigError("onnx", path, "an ONNX file with a graph; this one holds no operator")
    if check is not None:
        check(proto.graph)
    import onnx_ir as ir
    from onnx_ir.passes import common

    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, plain.parent)
    external = {
        value: held
        for value in model.graph.initializers.values()
        if isinstance(held := value.const_value, ir.ExternalTensor)
    }
    places = {path.parent / held.location for held in external.values()}
    for place in sorted(places):
        if not place.is_file():
            reason = f"its external data is missing: {place.relative_to(path.parent)}"
            raise ConfigError("onnx", path, reason=reason)
    _check_bytes(path, plain.stat().st_size + sum(place.stat().st_size for place in places), most)
    for value, held in external.items():
        value.const_value = ir.Tensor(held.numpy().copy(), name=value.name)
    if model.functions:
        common.InlinePass()(model)
    common.RemoveInitializersFromInputsPass()(model)
    for value in model.graph.inputs:  # some exporters write an open size as -1 or 0
        if value.shape is not None and any(isinstance(size, int) and size < 1 for size in value.shape):
            sizes = [None if isinstance(size, int) and size < 1 else size for size in value.shape]
            value.shape = ir.Shape(sizes)
    try:
        model.graph.sort()
    except ValueError as error:
        node = _in_circle(model.graph)
        reason = f"the graph has a circle: node '{node.name}' ({node.op_type}) reads a result of its own"
        raise ConfigError("onnx", path, reason=reason) from error
    return model


def _in_circle(graph: ir.Graph) -> ir.Node:
    """A node that reads what it makes itself, through others; there is one."""
    left = {node: {value.producer() for value in node.inputs if value is not None} for node in graph}
    while ready := [node for node, makers in left.items() if not makers & left.keys()]:
        for node in ready:
            del left[node]
    node, seen = next(iter(left)), set[object]()
    while node not in seen:
        seen.add(node)
        node = next(maker for maker in left[node] if maker in left)
    return node


def _check_bytes(path: Path, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise ConfigError("onnx", path, f"a model of at most {most / 1e9:.0f} GB, external data included")
