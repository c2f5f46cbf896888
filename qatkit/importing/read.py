"""A float ONNX file of any kind, as onnx_ir holds it: local functions inlined, nodes sorted, weights in memory."""

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
FIRST_OPSET = 7  # before it, operands broadcast by an attribute


def last_opset() -> int:
    """Returns the highest opset that the installed onnx knows."""
    import onnx

    return int(onnx.defs.onnx_opset_version())


def read(
    path: Path,
    *,
    most: int | None = None,
    check: Callable[[onnx.GraphProto], None] | None = None,
    as_is: bool = False,
) -> ir.Model:
    """Reads a file of any opset; weights in other files are read from its folder.

    Args:
        path: of the file.
        most: bytes that it may have, external data included; None: any number.
        check: is given the graph as it lies in the file, before onnx_ir, which takes long to import.
        as_is: leaves operators whole, and external data where they lie.

    What has no 8-bit kernels and is made of what has is taken apart (`qatkit.importing.fused`).

    Raises:
        ConfigError: there is no such file, it can't be parsed, its graph is not one, some of its external data is
            missing, or it is larger.
    """
    if not path.is_file():
        raise ConfigError("onnx", path, "a float ONNX file that exists")
    with reading(path), readable(path) as plain:
        return _read(path, plain, most, check, as_is)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the errors of libraries that read a damaged file into a ConfigError, and silences these
    libraries.
    """
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
        raise ConfigError("onnx", path, "an ONNX file with a graph; this one holds no operator")
    if check is not None:
        check(proto.graph)
    import onnx_ir as ir
    from onnx_ir.passes import common

    from qatkit.importing.fused import take_apart

    _fill_sparse(proto.graph)
    model = ir.from_proto(proto)
    for value, given in zip(model.graph.inputs, proto.graph.input, strict=True):
        if value.is_graph_output():  # what the output says of it may be less
            ir.serde.deserialize_value_info_proto(given, value)
    ir.external_data.set_base_dir(model.graph, plain.parent)
    _check_opset(path, model)
    if model.functions:
        common.InlinePass()(model)
    common.RemoveInitializersFromInputsPass()(model)
    _check_and_load(path, model, plain.stat().st_size, most, as_is)
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
    if not as_is:
        take_apart(model)
    return model


def _check_opset(path: Path, model: ir.Model) -> None:
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if opset is None:
        if any(not node.domain for node in model.graph):
            named = ", ".join(model.opset_imports)
            raise ConfigError("onnx", path, f"a file with an opset of ONNX; this one imports {named} alone")
        return
    if not FIRST_OPSET <= opset <= last_opset():
        allowed = f"a file of opset {FIRST_OPSET} to {last_opset()}; this one has {opset}"
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
    """Returns a node that reads what it makes itself, through others; there is one."""
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


def infer_shapes(model: ir.Model) -> None:
    """Finds types and shapes where onnx can; a model that it does not understand stays as it is."""
    try:
        from onnx_ir.passes import common

        with quiet():
            common.ShapeInferencePass()(model)
    except Exception:  # whatever onnx raises for operators that it does not know
        return


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yields a graph, and its branches and bodies at any depth."""
    from qatkit.export.rewrite import subgraphs

    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _check_inputs(path: Path, graph: ir.Graph) -> None:
    """Checks that everything the nodes of a graph read exists.

    Raises:
        ConfigError: names a node and a value.
    """
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name and not _is_made(value):
                name = node.name or f"{node.op_type}_{next((v.name for v in node.outputs if v.name), '')}"
                reason = f"node '{name}' reads '{value.name}', which is no input and which no node makes"
                raise ConfigError("onnx", path, reason=reason)


def _check_outputs(path: Path, graph: ir.Graph) -> None:
    names = [str(value.name) for value in graph.outputs]
    for value in graph.outputs:
        if not _is_made(value):
            reason = f"its output '{value.name}' is no input and no node makes it"
            raise ConfigError("onnx", path, reason=reason)
        if names.count(str(value.name)) > 1:
            raise ConfigError("onnx", path, reason=f"two of its outputs are called '{value.name}'")


def _is_made(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


def _external_bytes(path: Path, graphs: list[ir.Graph]) -> int:
    """Returns how many bytes the files of external data have.

    Raises:
        ConfigError: one of them is missing.
    """
    places = {path.parent / held.location for graph in graphs for _, held in _external(graph)}
    for place in sorted(places):
        if not place.is_file():
            reason = f"its external data is missing: {place.relative_to(path.parent)}"
            raise ConfigError("onnx", path, reason=reason)
    return sum(place.stat().st_size for place in places)


def _external(graph: ir.Graph) -> list[tuple[ir.Value, ir.ExternalTensor]]:
    import onnx_ir as ir

    values = graph.initializers.values()
    return [(one, held) for one in values if isinstance(held := one.const_value, ir.ExternalTensor)]


def _load_weights(path: Path, graph: ir.Graph, as_is: bool) -> None:
    """Reads the initializers of a graph that lie in other files; with `as_is` it only checks that these
    exist.

    Raises:
        ConfigError: such a file ends too early.
    """
    import onnx_ir as ir

    for value, held in _external(graph):
        beside = path.parent / held.location
        if (held.offset or 0) + (held.length or held.nbytes) > beside.stat().st_size:
            reason = f"its external data {held.location} ends before all values of '{value.name}' are read"
            raise ConfigError("onnx", path, reason=reason)
        if not as_is:
            value.const_value = ir.Tensor(held.numpy().copy(), name=value.name)


def _fill_sparse(graph: onnx.GraphProto) -> None:
    """Makes sparse initializers and constants dense, in branches and bodies too."""
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
