"""What an ONNX file says of itself, read from its bytes without the onnx package: versions, nodes, constants.

A file is a protobuf message: fields of (number, kind, value), of which a value is a number or bytes, and bytes may be a
message again (https://protobuf.dev/programming-guides/encoding, onnx/onnx.proto). Of a tensor its shape and type are
read; its values are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qatkit_verify.errors import ConfigError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Buffer = memoryview
# Of onnx.proto, the numbers of the fields that are read.
_MODEL = {1: "ir_version", 8: "opset", 7: "graph"}
_GRAPH = {1: "node", 5: "initializer", 11: "input", 12: "output"}
_NODE = {1: "input", 2: "output", 3: "name", 4: "op_type", 5: "attribute", 7: "domain"}
_TENSOR = {1: "dims", 2: "type", 8: "name"}
_PAIR = {1: "first", 2: "second"}
_ATTRIBUTE = {1: "name", 3: "i"}


@dataclass(frozen=True)
class Node:
    """One node: `ints` are its attributes that are one integer."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ints: Mapping[str, int]


@dataclass(frozen=True)
class OnnxFile:
    """A file.

    Attributes:
        ir_version: of the format.
        opsets: version by domain; "" is ONNX's own.
        nodes: of the graph, in its order.
        shapes: of the initializers, by name.
        types: of the initializers, by name, as numbers of TensorProto.DataType.
    """

    ir_version: int
    opsets: Mapping[str, int]
    nodes: tuple[Node, ...]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, int]


def read_onnx(path: str | Path) -> OnnxFile:
    """Reads a file.

    Raises:
        ConfigError: it can't be read, or is no ONNX file.
    """
    try:
        return _model(memoryview(Path(path).read_bytes()))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            "onnx file", path, f"can't be read as ONNX ({error or type(error).__name__})"
        ) from error


def _model(message: Buffer) -> OnnxFile:
    ir_version, opsets = 0, dict[str, int]()
    nodes, shapes, types, found = list[Node](), dict[str, tuple[int, ...]](), dict[str, int](), False
    for name, value in _named(message, _MODEL):
        if name == "ir_version":
            ir_version = _number(value)
        elif name == "opset":
            fields = dict(_named(_bytes(value), _PAIR))
            opsets[_text(fields.get("first", b""))] = _number(fields.get("second", 0))
        elif name == "graph":
            found = True
            _graph(_bytes(value), nodes, shapes, types)
    if not found or not opsets:
        raise ValueError("it holds no graph")
    return OnnxFile(ir_version, opsets, tuple(nodes), shapes, types)


def _graph(
    message: Buffer, nodes: list[Node], shapes: dict[str, tuple[int, ...]], types: dict[str, int]
) -> None:
    for name, value in _named(message, _GRAPH):
        if name == "node":
            nodes.append(_node(_bytes(value)))
        elif name == "initializer":
            tensor, shape, kind = _initializer(_bytes(value))
            shapes[tensor], types[tensor] = shape, kind


def _initializer(message: Buffer) -> tuple[str, tuple[int, ...], int]:
    dims, name, kind = list[int](), "", 0
    for key, one in _named(message, _TENSOR):
        if key == "name":
            name = _text(one)
        elif key == "type":
            kind = _number(one)
        else:
            dims += [one] if isinstance(one, int) else list(_packed(one))
    return name, tuple(dims), kind


def _node(message: Buffer) -> Node:
    texts = {"op_type": "", "domain": "", "name": ""}
    inputs, outputs, ints = list[str](), list[str](), dict[str, int]()
    for name, value in _named(message, _NODE):
        if name in texts:
            texts[name] = _text(value)
        elif name == "attribute":
            fields = dict(_named(_bytes(value), _ATTRIBUTE))
            if "i" in fields:
                ints[_text(fields["name"])] = _number(fields["i"])
        else:
            (inputs if name == "input" else outputs).append(_text(value))
    return Node(texts["op_type"], texts["domain"], texts["name"], tuple(inputs), tuple(outputs), ints)


def _named(message: Buffer, names: Mapping[int, str]) -> Iterator[tuple[str, int | Buffer]]:
    """The fields of a message whose numbers are in `names`."""
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
            raise ValueError(f"a field of kind {kind}")
        if place + size > end:
            raise ValueError("it is cut off")
        yield number, message[place : place + size]
        place += size


def _varint(message: Buffer, place: int) -> tuple[int, int]:
    """Seven bits a byte, the least first; the highest bit says that more follow."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _packed(message: Buffer) -> Iterator[int]:
    place = 0
    while place < len(message):
        value, place = _varint(message, place)
        yield value


def _text(value: int | Buffer | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("a number in place of a text")
    return bytes(value).decode()


def _bytes(value: int | Buffer) -> Buffer:
    if isinstance(value, int):
        raise ValueError("a number in place of a message")
    return value


def _number(value: int | Buffer) -> int:
    if not isinstance(value, int):
        raise ValueError("a message in place of a number")
    return value
