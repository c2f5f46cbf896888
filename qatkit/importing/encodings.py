"""Reads the encodings (scales and zero points by tensor name) of an ONNX file that any tool has quantized.

    activation     a computed tensor that a QuantizeLinear reads
    parameter      a constant that a QuantizeLinear or a DequantizeLinear reads
    format         a tensor that a function of the domain `qatkit` rounds to a number format

Activations and parameters get their names in the float file, which are derived from the quantized file. For a constant
X, qatkit (when it edits a given file), onnxruntime.quantization and tools that follow it write `X_quantized` and
`X_DequantizeLinear_Output`. If a pair of QuantizeLinear and DequantizeLinear computes an output of the graph, this
output has the tensor's name, and the input of the pair has another one. The operators may also be those of
`com.microsoft` or AMD Quark (Extended..., Vitis...), whose inputs are in the same order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qatkit.importing.read import name_of, read
from qatkit.records.encodings import Encoding, Encodings, made
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_OF_OTHERS = ("Extended", "Vitis")  # prefixes of operator names
_CONSTANT = re.compile(rf"(.+)_{DEQUANTIZE}(_Output|_output)?(_\d+)?")
_TENSOR = re.compile(rf"(.+)_{QUANTIZE}(_\d+)?")
_COMPUTED = "scale or zero point is computed"
_BIAS, _AXIS = "int32", 1  # the type of a bias, and the default axis of a DequantizeLinear
# Operators that compute with integers directly, without pairs.
_WITHOUT_PAIRS = re.compile(
    r"QLinear.*|QGemm|.*Integer|MatMulNBits|GatherBlockQuantized|Dynamic.*|BFP.*|MX.*"
)


def encodings_of(path: Path) -> Encodings:
    """Returns the encodings of a file.

    Raises:
        ConfigError: the file cannot be read, or has neither QuantizeLinear or DequantizeLinear with constant scales nor
            number formats.
    """
    from qatkit.graph.convert.format_modules import DOMAIN

    formats: dict[str, str] = {}

    def look(graph: onnx.GraphProto) -> None:  # before functions are inlined
        formats.update({node.input[0]: node.op_type for node in graph.node if node.domain == DOMAIN})

    model = read(path, as_is=True, check=look)
    from qatkit.verify.graph_view import with_initializers

    found = _Found(with_initializers(model))
    if not (found.activations or found.parameters or formats):
        reason = "the file has no QuantizeLinear or DequantizeLinear with constant scales"
        others = found.others()
        raise ConfigError(
            "onnx", path, reason=f"{reason}; scales of {others} cannot be read" if others else reason
        )
    notes = (*found.notes, *(f"not listed: {listed}" for listed in [found.others()] if listed))
    return Encodings(found.activations, found.parameters, formats, notes)


class _Found:
    """The encodings of the tensors that the nodes of a model quantize."""

    def __init__(self, model: ir.Model) -> None:
        import onnx_ir as ir

        self.nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
        made = (str(value.name) for node in self.nodes for value in node.outputs)
        self.names = {*made, *(str(value.name) for value in model.graph.inputs)}
        self.activations: dict[str, Encoding] = {}
        self.parameters: dict[str, Encoding] = {}
        self.notes: list[str] = []
        self._stored: dict[str, Any] = {}
        for node in self.nodes:
            kind = _kind(node)
            if kind == QUANTIZE:
                self._quantized(node)
            elif kind == DEQUANTIZE and _constant(node.inputs[0]) is not None:
                self._parameter(node)

    def others(self) -> str:
        """Returns the operators that quantize without QuantizeLinear, with their counts, as text; "" if none."""
        count = Counter(node.op_type for node in self.nodes if _WITHOUT_PAIRS.fullmatch(node.op_type))
        return ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))

    def _quantized(self, node: ir.Node) -> None:
        value, encoding = node.inputs[0], _encoding(node)
        if encoding is None or value is None:
            self.notes.append(f"'{name_of(node)}' is not listed, because its {_COMPUTED}")
            return
        if _constant(value) is not None:  # a float weight before a pair
            self.parameters.setdefault(str(value.name), encoding)
            return
        names = list(self._activation_names(node, str(value.name)))
        known = next((name for name in names if name not in self.activations), None)
        if any(name in self.activations and self.activations[name].equals(encoding) for name in names):
            return
        if known is None:
            self.notes.append(f"'{names[0]}' is quantized in several ways, of which only the first is listed")
            return
        self.activations[known] = encoding

    def _activation_names(self, node: ir.Node, given: str) -> Iterator[str]:
        """Yields possible names of the tensor that a node quantizes, best first; `given` is the name of its input."""
        for reader in node.outputs[0].consumers():
            yield from (str(one.name) for one in reader.outputs if one.is_graph_output())
        told = _TENSOR.fullmatch(node.name or "")
        if told is not None and told[1] in self.names:
            yield told[1]
        else:
            yield given

    def _parameter(self, node: ir.Node) -> None:
        encoding, constant = _encoding(node), node.inputs[0]
        if encoding is None or constant is None:
            self.notes.append(f"'{name_of(node)}' is not listed, because its {_COMPUTED}")
            return
        for name in _parameter_names(node):
            if name in self.names and name != node.outputs[0].name:
                continue  # the name belongs to a computed tensor, and this is a constant inside its computation
            if name not in self.parameters:
                self.parameters[name] = encoding
                self._stored[name] = constant
                return
            if self._stored.get(name) is constant and self.parameters[name].equals(encoding):
                return  # one constant, dequantized for each reader
        self.notes.append(
            f"the constant of '{name_of(node)}' is not listed, because it has no name of its own"
        )


def _kind(node: ir.Node) -> str:
    kind = node.op_type
    for start in _OF_OTHERS:
        kind = kind.removeprefix(start)
    return kind


def _parameter_names(node: ir.Node) -> Iterator[str]:
    """Yields names that a constant may have had before quantization, the best first.

    Constants with equal bytes are stored once, under the name of the first one, so the name of the stored constant is
    not the best guess.
    """
    output, stored, scale = str(node.outputs[0].name), *(str(one.name) for one in node.inputs[:2] if one)
    told = _CONSTANT.fullmatch(output)
    if told is not None:
        yield told[1]
    yield stored.removesuffix("_quantized")
    if scale.endswith(("_scale", ".scale")):
        yield scale[: -len("_scale")]
    yield output


def _constant(value: ir.Value | None) -> Any:
    import onnx_ir as ir

    return None if value is None else ir.convenience.get_const_tensor(value)


def _encoding(node: ir.Node) -> Encoding | None:
    """Returns the encoding of a node that quantizes or dequantizes; None if scale or zero point is computed."""
    value, scale = node.inputs[0], _constant(node.inputs[1])
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    held = _constant(zero)
    if value is None or scale is None or (zero is not None and held is None):
        return None
    scales = scale.numpy().astype(np.float32)
    zeros = np.zeros(scales.shape) if held is None else held.numpy().astype(np.float64)
    size = node.attributes.get_int("block_size", 0)
    axis: int | None = node.attributes.get_int("axis", _AXIS)
    if size < 1 and _is_lone(scales, value, axis):
        scales, zeros, axis = scales.reshape(()), zeros.reshape(()), None
    elif axis is not None and axis < 0 and value.shape is not None:
        axis += len(value.shape)
    name = str(node.name or node.outputs[0].name)
    return made(name, _dtype(node), scales, zeros, axis, size if size > 0 else None, name)


def _is_lone(scales: Any, value: ir.Value, axis: int | None) -> bool:
    """Returns whether the scale is per tensor; one scale [1] is per channel if the tensor has one channel."""
    if scales.ndim == 0:
        return True
    shape = value.shape
    one_channel = shape is not None and axis is not None and axis < len(shape) and shape[axis] == 1
    return bool(scales.size == 1 and not one_channel)


def _dtype(node: ir.Node) -> str:
    """Returns the type of the quantized values.

    It is the type of zero_point, else of the input of a DequantizeLinear, else `output_dtype`, else uint8.
    """
    import onnx_ir as ir

    zero = node.inputs[2] if len(node.inputs) > 2 else None
    told = node.attributes.get_int("output_dtype", 0) if _kind(node) == QUANTIZE else 0
    value = zero if zero is not None else node.inputs[0] if _kind(node) == DEQUANTIZE else None
    kind = value.dtype if value is not None else None
    if value is not None and kind is None and (held := _constant(value)) is not None:
        kind = held.dtype
    if kind is None:
        kind = ir.DataType(told) if told else ir.DataType.UINT8
    return str(kind.name).lower()
