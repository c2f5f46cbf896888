"""Changes pairs of QuantizeLinear and DequantizeLinear of a quantized file to forms that some compilers require."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from qatkit.export.clean.graphs import graphs
from qatkit.export.clean.rewrite.place import before, held
from qatkit.export.matching import made
from qatkit.export.quiet import quiet
from qatkit.verify.graph_view import constant, operand
from qatkit_verify.errors import ConfigError

_HALVES = (ir.DataType.BFLOAT16.value, ir.DataType.FLOAT16.value)
_BFLOAT16 = (("min", -(2.0**128 - 2.0**120)), ("max", 2.0**128 - 2.0**120))


def dedicated_pairs(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Gives each reader of a DequantizeLinear its own copy of the node, and of the QuantizeLinear before it, if any."""
    if node.op_type != "DequantizeLinear":
        return False
    result = node.outputs[0]
    readers = [(reader, index) for reader, index in result.uses() if reader.graph is graph]
    others = len(result.uses()) > len(readers) or result.is_graph_output()
    copied = readers if others else readers[1:]
    for reader, index in copied:
        source = operand(node, 0)
        quantize = made(source, "QuantizeLinear")
        if quantize is not None:
            source = _copy(model, reader, quantize, [*quantize.inputs])
        reader.replace_input_with(index, _copy(model, reader, node, [source, *node.inputs[1:]]))
    return bool(copied)


def weight_pairs(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Stores an int8 or uint8 weight in float, with a QuantizeLinear before its DequantizeLinear."""
    source = operand(node, 0)
    integers, scale = constant(source), constant(operand(node, 1))
    if node.op_type != "DequantizeLinear" or source is None or integers is None or scale is None:
        return False
    if integers.dtype not in (np.int8, np.uint8) or scale.dtype != np.float32:
        return False
    if node.attributes.get_int("block_size", 0) > 0:
        return False
    zero = constant(operand(node, 2))
    axis = node.attributes.get_int("axis", 1)
    numbers = _along(scale, integers.ndim, axis)
    zeros = np.float32(0) if zero is None else _along(zero.astype(np.float32), integers.ndim, axis)
    weight = held(model, node, "float", (integers.astype(np.float32) - zeros) * numbers)
    scales = [one for one in node.inputs[1:] if one is not None]
    if zero is None and integers.dtype == np.int8:  # without a zero_point, QuantizeLinear gives uint8
        scales.append(held(model, node, "zero", np.zeros(scale.shape, np.int8)))
    rounded = before(model, node, "QuantizeLinear", [weight, *scales], {"axis": axis} if scale.ndim else {})
    rounded.type, rounded.shape = ir.TensorType(ir.DataType(source.dtype or 0)), source.shape
    node.replace_input_with(0, rounded)
    return True


def fold_relu(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Removes a Relu if all its readers are QuantizeLinear nodes that clip negative values themselves.

    They do so if their zero_point is the lowest integer of its type.
    """
    result, source = node.outputs[0], operand(node, 0)
    if node.op_type != "Relu" or source is None or not result.uses() or result.is_graph_output():
        return False
    for reader, index in result.uses():
        zero = constant(operand(reader, 2))
        if reader.op_type != "QuantizeLinear" or index != 0 or len(reader.inputs) < 3 or zero is None:
            return False
        if zero.dtype.kind not in "iu" or np.any(zero != np.iinfo(zero.dtype).min):
            return False
    result.replace_all_uses_with(source)
    graph.remove(node, safe=True)
    return True


def bfloat16_clip(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Clips the input of a Cast to bfloat16 to the finite range of bfloat16; other values would become infinite."""
    x = operand(node, 0)
    if node.op_type != "Cast" or node.attributes["to"].as_int() != ir.DataType.BFLOAT16.value:
        return False
    if x is None or x.dtype != ir.DataType.FLOAT or constant(x) is not None:
        return False
    bounds = [held(model, node, what, np.asarray(one, np.float32)) for what, one in _BFLOAT16]
    node.replace_input_with(0, before(model, node, "Clip", [x, *bounds]))
    return True


def drop_pairs(model: ir.Model, asked: Sequence[str]) -> list[str]:
    """Removes pairs between operators, so that the tensor between them is no longer rounded.

    A pair is a QuantizeLinear and a DequantizeLinear, or a Cast to bfloat16 or float16 and a Cast back to float32.

    Args:
        model: the model, changed in place.
        asked: entries MAKER:READER for the operators before and after a pair. Each part is the type of an operator, the
            name of a node, or * for any.

    Returns:
        A line for each entry, with the number of removed pairs.

    Raises:
        ConfigError: an entry matches no pair.
    """
    lines = []
    for text in asked:
        pairs = [
            node
            for graph in graphs(model.graph)
            for node in graph
            if node.op_type in ("DequantizeLinear", "Cast")
        ]
        count = sum(_dropped(pair, text) for pair in pairs)
        if not count:
            reason = "the file has no pair between such operators; write MAKER:READER, each a type, a node's name or *"
            raise ConfigError("clean.drop_pairs", text, reason=reason)
        lines.append(f"{text}: {count} dropped")
    with quiet():
        common.RemoveUnusedNodesPass()(model)
    return lines


def _dropped(pair: ir.Node, text: str) -> bool:
    """Connects the matching readers of a pair to the tensor before the pair; returns whether there were any."""
    first, result = _first_of(pair), pair.outputs[0]
    source = None if first is None else operand(first, 0)
    maker = None if source is None else source.producer()
    if source is None or (maker is None and not source.is_graph_input()):
        return False
    found = [use for use in result.uses() if _matches(text, maker, use[0])]
    for reader, index in found:
        reader.replace_input_with(index, source)
    if not (result.is_graph_output() and _matches(text, maker, None)):
        return bool(found)
    name = result.name
    ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
    result.name, source.name = f"{name}_dropped", name
    return True


def _first_of(pair: ir.Node) -> ir.Node | None:
    """Returns the first node of the pair whose last node is `pair`; None if `pair` does not end a pair."""
    if pair.op_type == "DequantizeLinear":
        return made(operand(pair, 0), "QuantizeLinear")
    first = made(operand(pair, 0), "Cast")
    back = pair.attributes["to"].as_int() == ir.DataType.FLOAT.value
    return first if back and first is not None and first.attributes["to"].as_int() in _HALVES else None


def _matches(text: str, maker: ir.Node | None, reader: ir.Node | None) -> bool:
    """Returns whether MAKER:READER matches both nodes; None (an input or output of the file) is matched only by *."""
    first, second = (("*",) if one is None else ("*", one.op_type, one.name) for one in (maker, reader))
    return any(
        text[:place] in first and text[place + 1 :] in second
        for place, letter in enumerate(text)
        if letter == ":"
    )


def _copy(model: ir.Model, reader: ir.Node, node: ir.Node, inputs: list[ir.Value | None]) -> ir.Value:
    new = before(model, reader, node.op_type, inputs)
    producer = new.producer()
    assert producer is not None
    for attribute in node.attributes.values():
        producer.attributes.add(attribute)
    new.type, new.shape = node.outputs[0].type, node.outputs[0].shape
    return new


def _along(values: NDArray[Any], rank: int, axis: int) -> NDArray[Any]:
    """Returns scales in a shape that broadcasts along one axis of a tensor with `rank` axes."""
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    return values.reshape([-1 if one == axis % rank else 1 for one in range(rank)])
