"""Reads the versions, nodes and constants of an ONNX file from its bytes, without the onnx package.

A file is a protobuf message: fields of (number, kind, value). A value is a number or bytes, and bytes may be
a message again (https://protobuf.dev/programming-guides/encoding, onnx/onnx.proto). The elements of a tensor
can be read only if they are int8, as in the weights of operators that multiply in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Buffer = memoryview
# The numbers of the fields of onnx.proto that are read.
_MODEL = {1: "ir_version", 8: "opset", 7: "graph"}
_GRAPH = {1: "node", 5: "initializer", 11: "input", 12: "output"}
_NODE = {1: "input", 2: "output", 3: "name", 4: "op_type", 5: "attribute", 7: "domain"}
_TENSOR = {1: "dims", 2: "type", 5: "integers", 8: "name", 9: "raw", 13: "external"}
_PAIR = {1: "first", 2: "second"}
_ATTRIBUTE = {1: "name", 3: "i", 6: "graph", 11: "graph"}
INT8 = 3  # as in TensorProto.DataType


@dataclass(frozen=True)
class Node:
    """A node: `ints` are its attributes with a single integer, `graphs` its subgraphs."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ints: Mapping[str, int]
    graphs: tuple[Graph, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A constant; its type is a number of TensorProto.DataType."""

    type: int
    shape: tuple[int, ...]
    _raw: Buffer
    _integers: tuple[int, ...]
    _external: Mapping[str, str]

    @property
    def uniform(self) -> bool:
        """Returns whether all values of an 8-bit tensor are equal; they must be stored in the file itself."""
        return len(set(bytes(self._raw)) | set(self._integers)) < 2

    def int8(self, folder: Path) -> NDArray[np.int8]:
        """Returns the values of an int8 tensor.

        Args:
            folder: the folder of the ONNX file, which may contain further files with large tensors.

        Raises:
            ValueError: the tensor has another type, or the values are missing.
        """
        size = math.prod(self.shape)
        if self.type != INT8:
            raise ValueError(f"the tensor has type {self.type}, not int8 ({INT8})")
        if self._external:
            raw = _beside(folder, self._external, size)
        else:
            raw = bytes(self._raw) or bytes(one & 0xFF for one in self._integers)
        if len(raw) != size:
            raise ValueError(f"the tensor has {len(raw)} values instead of {size}")
        return np.frombuffer(raw, np.int8).reshape(self.shape)


def _beside(folder: Path, external: Mapping[str, str], size: int) -> bytes:
    path = (folder / external["location"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"its values are outside of its folder ({external['location']})")
    with path.open("rb") as stream:
        stream.seek(int(external.get("offset", 0)))
        return stream.read(size)


@dataclass(frozen=True)
class Graph:
    """A graph: its nodes in their order, and its initializers by name."""

    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class OnnxFile:
    """The contents of an ONNX file.

    Attributes:
        ir_version: the version of the format.
        opsets: the opset versions by domain; "" is ONNX's own domain.
        graph: the outermost graph.
    """

    ir_version: int
    opsets: Mapping[str, int]
    graph: Graph

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the graph, in its order."""
        return self.graph.nodes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the initializers, by name."""
        return {name: one.shape for name, one in self.graph.tensors.items()}

    @property
    def types(self) -> dict[str, int]:
        """The types of the initializers, by name, as numbers of TensorProto.DataType."""
        return {name: one.type for name, one in self.graph.tensors.items()}


def read_onnx(path: str | Path) -> OnnxFile:
    """Reads a file.

    Raises:
        ConfigError: the file cannot be read, or is not an ONNX file.
    """
    try:
        return _model(memoryview(Path(path).read_bytes()))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            "onnx file", path, reason=f"the file can't be read as ONNX ({error or type(error).__name__})"
        ) from error


def _model(message: Buffer) -> OnnxFile:
    ir_version, opsets, graph = 0, dict[str, int](), None
    for name, value in _named(message, _MODEL):
        if name == "ir_version":
            ir_version = _number(value)
        elif name == "opset":
            fields = dict(_named(_bytes(value), _PAIR))
            opsets[_text(fields.get("first", b""))] = _number(fields.get("second", 0))
        elif name == "graph":
            graph = _graph(_bytes(value))
    if graph is None or not opsets:
        raise ValueError("it has no graph or no opset")
    return OnnxFile(ir_version, opsets, graph)


def _graph(message: Buffer) -> Graph:
    nodes, tensors = list[Node](), dict[str, Tensor]()
    for name, value in _named(message, _GRAPH):
        if name == "node":
            nodes.append(_node(_bytes(value)))
        elif name == "initializer":
            tensor, found = _tensor(_bytes(value))
            tensors[tensor] = found
    return Graph(tuple(nodes), tensors)


def _tensor(message: Buffer) -> tuple[str, Tensor]:
    name, kind, raw = "", 0, memoryview(b"")
    dims, integers, external = list[int](), list[int](), dict[str, str]()
    for key, one in _named(message, _TENSOR):
        if key == "name":
            name = _text(one)
        elif key == "type":
            kind = _number(one)
        elif key == "raw":
            raw = _bytes(one)
        elif key == "external":
            pair = dict(_named(_bytes(one), _PAIR))
            external[_text(pair["first"])] = _text(pair["second"])
        elif key == "dims":
            dims += [one] if isinstance(one, int) else list(_packed(one))
        elif kind == INT8 or isinstance(one, int):
            integers += [one] if isinstance(one, int) else list(_packed(one))
    return name, Tensor(kind, tuple(dims), raw, tuple(integers), external)


def _node(message: Buffer) -> Node:
    texts = {"op_type": "", "domain": "", "name": ""}
    inputs, outputs, ints, graphs = list[str](), list[str](), dict[str, int](), list[Graph]()
    for name, value in _named(message, _NODE):
        if name in texts:
            texts[name] = _text(value)
        elif name == "attribute":
            fields = list(_named(_bytes(value), _ATTRIBUTE))
            if "i" in dict(fields):
                ints[_text(dict(fields)["name"])] = _number(dict(fields)["i"])
            graphs += [_graph(_bytes(one)) for key, one in fields if key == "graph"]
        else:
            (inputs if name == "input" else outputs).append(_text(value))
    return Node(
        texts["op_type"], texts["domain"], texts["name"], tuple(inputs), tuple(outputs), ints, tuple(graphs)
    )


def _named(message: Buffer, names: Mapping[int, str]) -> Iterator[tuple[str, int | Buffer]]:
    """Yields the fields of a message whose numbers are in `names`."""
    return ((names[number], value) for number, value in _fields(message) if number in names)


def _fields(message: Buffer) -> Iterator[tuple[int, int | Buffer]]:
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field has the unknown kind {kind}")
        if place + size > end:
            raise ValueError("it is cut off")
        yield number, message[place : place + size]
        place += size


def _varint(message: Buffer, place: int) -> tuple[int, int]:
    """Reads a varint: seven bits per byte, lowest first; the highest bit says that more bytes follow."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _packed(message: Buffer) -> Iterator[int]:
    place = 0
    while place < len(message):
        value, place = _varint(message, place)
        yield value


def _text(value: int | Buffer | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("a string was expected, but a number was found")
    return bytes(value).decode()


def _bytes(value: int | Buffer) -> Buffer:
    if isinstance(value, int):
        raise ValueError("a message was expected, but a number was found")
    return value


def _number(value: int | Buffer) -> int:
    if not isinstance(value, int):
        raise ValueError("a number was expected, but a message was found")
    return value
