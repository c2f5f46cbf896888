"""Reads an ONNX file with onnx_ir: inlines local functions, sorts nodes, and loads weights into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qatkit.encryption.vault import readable
from qatkit.export.quiet import quiet
from qatkit_verify.errors import ConfigError, one_line

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MAX_BYTES = 2**31 - 1  # protobuf's limit for one message
FIRST_OPSET = 7  # in earlier opsets an attribute controls broadcasting


def last_opset() -> int:
    """Returns the highest opset that the installed onnx supports."""
    import onnx

    return int(onnx.defs.onnx_opset_version())


def read(
    path: Path,
    *,
    most: int | None = None,
    check: Callable[[onnx.GraphProto], None] | None = None,
    as_is: bool = False,
) -> ir.Model:
    """Reads a file of opset 7 or higher, with its external data from the same folder.

    Fused operators are split into parts that have 8-bit kernels (`qatkit.importing.fused`).

    Args:
        path: the file.
        most: the largest allowed number of bytes, including external data; None: any number.
        check: a function that is called with the graph of the file, before onnx_ir is imported (which takes
            long).
        as_is: whether fused operators are not split, and external data is not loaded.

    Raises:
        ConfigError: the file does not exist, cannot be parsed, has an unsupported opset or an invalid graph, lacks
            external data, or is too large.
    """
    if not path.is_file():
        raise ConfigError("onnx", path, f"{'an' if as_is else 'a float'} ONNX file that exists")
    with reading(path), readable(path) as plain:
        return _read(path, plain, most, check, as_is)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of libraries that read a damaged file into a ConfigError, and silences these libraries."""
    try:
        with quiet():
            yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "onnx", path, reason=f"the file can't be read as ONNX ({one_line(error)})"
        ) from error


def _read(
    path: Path,
    plain: Path,
    most: int | None,
    check: Callable[[onnx.GraphProto], None] | None,
    as_is: bool,
) -> ir.Model:
    import onnx

    _check_bytes(path, plain.stat().st_size, most)
    proto = onnx.load(str(plain), load_external_data=False)
    if not proto.graph.node or not proto.opset_import:
        lacks = "opset" if proto.graph.node else "operators"
        raise ConfigError("onnx", path, f"an ONNX file with a graph; this one has no {lacks}")
    if check is not None:
        check(proto.graph)
    import onnx_ir as ir
    from onnx_ir.passes import common

    from qatkit.importing.fused import take_apart

    _fill_sparse(proto.graph)
    model = ir.from_proto(proto)
    for value, given in zip(model.graph.inputs, proto.graph.input, strict=True):
        if value.is_graph_output():  # the declaration as an output may be less complete than that as an input
            ir.serde.deserialize_value_info_proto(given, value)
    ir.external_data.set_base_dir(model.graph, plain.parent)
    _check_opset(path, model)
    if model.functions:
        common.InlinePass()(model)
    common.RemoveInitializersFromInputsPass()(model)
    _check_and_load(path, model, plain.stat().st_size, most, as_is)
    for value in model.graph.inputs:  # some exporters write a dynamic size as -1 or 0
        if value.shape is not None and any(isinstance(size, int) and size < 1 for size in value.shape):
            sizes = [None if isinstance(size, int) and size < 1 else size for size in value.shape]
            value.shape = ir.Shape(sizes)
    try:
        model.graph.sort()
    except ValueError as error:
        node = _in_circle(model.graph)
        reason = f"the graph has a cycle: node '{name_of(node)}' ({node.op_type}) depends on its own output"
        raise ConfigError("onnx", path, reason=reason) from error
    if not as_is:
        take_apart(model)
    return model


def _check_opset(path: Path, model: ir.Model) -> None:
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if opset is None:
        if any(not node.domain for node in model.graph):
            named = ", ".join(model.opset_imports)
            raise ConfigError(
                "onnx", path, f"a file that imports an ONNX opset; this one imports only {named}"
            )
        return
    if not FIRST_OPSET <= opset <= last_opset():
        allowed = f"a file of opset {FIRST_OPSET} to {last_opset()}; this one has opset {opset}"
        raise ConfigError("onnx", path, allowed)


def _check_and_load(path: Path, model: ir.Model, size: int, most: int | None, as_is: bool) -> None:
    _check_outputs(path, model.graph)
    graphs = list(_graphs(model.graph))
    for graph in graphs:
        _check_inputs(path, graph)
    _check_bytes(path, size + _external_bytes(path, graphs), most)
    for graph in graphs:
        _load_weights(path, graph, as_is)


def _in_circle(graph: ir.Graph) -> ir.Node:
    """Returns a node of a cycle; the graph must have one."""
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
        allowed = f"a model of at most {most / 1e9:.0f} GB, including external data; this one has {size / 1e9:.2f} GB"
        raise ConfigError("onnx", path, allowed)


def infer_shapes(model: ir.Model) -> None:
    """Infers types and shapes where onnx can; a model that onnx does not understand stays unchanged."""
    try:
        from onnx_ir.passes import common

        with quiet():
            common.ShapeInferencePass()(model)
    except Exception:  # onnx raises various errors for operators that it does not know
        return


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yields a graph, and its branches and loop bodies at any depth."""
    from qatkit.export.rewrite import subgraphs

    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def name_of(node: ir.Node) -> str:
    """Returns the name of a node; if it has none, its operator and its output."""
    return node.name or f"{node.op_type}_{next((v.name for v in node.outputs if v.name), '')}"


def _check_inputs(path: Path, graph: ir.Graph) -> None:
    """Checks that the nodes of a graph read only values that exist.

    Raises:
        ConfigError: an input does not exist; the message names the node and the input.
    """
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name and not _is_made(value):
                reads = f"node '{name_of(node)}' reads '{value.name}'"
                reason = f"{reads}, which is neither an input nor computed by a node"
                raise ConfigError("onnx", path, reason=reason)


def _check_outputs(path: Path, graph: ir.Graph) -> None:
    names = [str(value.name) for value in graph.outputs]
    for value in graph.outputs:
        if not _is_made(value):
            reason = f"output '{value.name}' is neither an input nor computed by a node"
            raise ConfigError("onnx", path, reason=reason)
        if names.count(str(value.name)) > 1:
            raise ConfigError("onnx", path, reason=f"two outputs of the file are called '{value.name}'")


def _is_made(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


def _external_bytes(path: Path, graphs: list[ir.Graph]) -> int:
    """Returns the total size in bytes of the files with external data.

    Raises:
        ConfigError: a file is missing.
    """
    places = {path.parent / held.location for graph in graphs for _, held in _external(graph)}
    for place in sorted(places):
        if not place.is_file():
            missing = f"the file {place.relative_to(path.parent)} with its external data is missing"
            reason = f"{missing}; copy it together with the ONNX file"
            raise ConfigError("onnx", path, reason=reason)
    return sum(place.stat().st_size for place in places)


def _external(graph: ir.Graph) -> list[tuple[ir.Value, ir.ExternalTensor]]:
    import onnx_ir as ir

    values = graph.initializers.values()
    return [(one, held) for one in values if isinstance(held := one.const_value, ir.ExternalTensor)]


def _load_weights(path: Path, graph: ir.Graph, as_is: bool) -> None:
    """Reads the external data of a graph; with `as_is` it only checks that the files are long enough.

    Raises:
        ConfigError: a file with external data ends too early.
    """
    import onnx_ir as ir

    for value, held in _external(graph):
        beside = path.parent / held.location
        if (held.offset or 0) + (held.length or held.nbytes) > beside.stat().st_size:
            reason = f"the file {held.location} with its external data ends before the last value of '{value.name}'"
            reason += "; copy this file again"
            raise ConfigError("onnx", path, reason=reason)
        if not as_is:
            value.const_value = ir.Tensor(held.numpy().copy(), name=value.name)


def _fill_sparse(graph: onnx.GraphProto) -> None:
    """Makes sparse initializers and constants dense, including those in branches and loop bodies."""
    import onnx

    for sparse in graph.sparse_initializer:
        graph.initializer.append(_dense(sparse))
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                filled = onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor))
                attribute.CopyFrom(filled)
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _fill_sparse(inner)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    from onnx import numpy_helper

    values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        dense.reshape(-1)[places] = values
    else:
        dense[tuple(places.T)] = values
    return numpy_helper.from_array(dense, sparse.values.name)
