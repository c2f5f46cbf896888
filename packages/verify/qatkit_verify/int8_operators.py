"""Finds the operators of a file that can exceed 16 bits on a processor that adds two products in 16 bits.

The graph into which ONNX Runtime optimizes the file is searched. In it, an operator that runs in int8 reads
its weights directly, whether the file has Q/DQ pairs, QLinear operators or dynamic quantization. If the
weights are small enough, no input leads to a sum beyond 16 bits. The processors are x86 without VNNI, for
uint8 x int8, and ARM without the dot product, for int8 x int8 (`qatkit_verify.pairs`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.onnx_file import INT8, Graph, Node, Tensor, read_onnx
from qatkit_verify.pairs import convolution_rows, overflowing_channels, overflowing_on_arm, product_rows

# If "1", ONNX Runtime turns int8 weights into uint8 on loading. The results are then exact on every processor,
# but slow to compute on x86 without VNNI.
PRECISE = "session.x64quantprecision"


@dataclass(frozen=True)
class Places:
    """The indices of inputs: activation zero point (None: float activations), weights, their zero points."""

    x_zero: int | None
    weights: tuple[int, ...]
    weight_zeros: tuple[int, ...]


# Operators whose weights are judged, but whose sums are not emulated (`qatkit.verify.int8_nodes`).
ONLY_JUDGED = {"QAttention": Places(6, (1,), (7,)), "DynamicQuantizeLSTM": Places(None, (1, 2), (9, 11))}
# Operators that multiply uint8 by int8 in pairs. ConvInteger and MatMulNBits are exact. So is, on x86, a
# product whose first operand is int8.
PLACES = {
    "QLinearConv": Places(2, (3,), (5,)),
    "QLinearMatMul": Places(2, (3,), (5,)),
    "QGemm": Places(2, (3,), (5,)),
    "MatMulIntegerToFloat": Places(4, (1,), (5,)),
    "MatMulInteger": Places(2, (1,), (3,)),
    "DynamicQuantizeMatMul": Places(None, (1,), (3,)),
    **ONLY_JUDGED,
}


@dataclass(frozen=True)
class Int8Operator:
    """An operator that multiplies uint8 or int8 activations by int8 weights.

    Attributes:
        name: the name of the node, or of its output if it has none.
        op_type: the type of ONNX Runtime's operator.
        channels: the number of channels of its weights; 0 if the weights are computed.
        saturating: the number of channels whose weights allow a sum of two products beyond 16 bits. 0 proves
            that no input exceeds 16 bits. None: the weights are computed, so the number is unknown.
    """

    name: str
    op_type: str
    channels: int
    saturating: int | None


def int8_operators(
    path: str | Path, *, options: Mapping[str, str] | None = None, signed: bool = False
) -> list[Int8Operator]:
    """Returns the operators of a file that add uint8 x int8 products in pairs, in the order of the nodes.

    Operators in bodies of If and Loop are included. Depthwise convolutions, which add in 32 bits, are not. With
    the session option `PRECISE`, there are none.

    Args:
        path: an ONNX file.
        options: the backend's session config entries.
        signed: whether to return the int8 x int8 operators instead.

    Raises:
        ConfigError: ONNX Runtime cannot load the file.
    """
    if (options or {}).get(PRECISE) == "1":
        return []
    import onnxruntime as ort

    from qatkit_verify.session import open_session

    with tempfile.TemporaryDirectory() as folder:
        saved, level = Path(folder) / "optimized.onnx", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        open_session(path, threads=1, optimize=level, options=options, optimized_path=saved)
        return list(_operators(read_onnx(saved).graph, {}, {}, Path(folder), signed))


def _operators(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    makers: Mapping[str, Node],
    folder: Path,
    signed: bool,
) -> Iterator[Int8Operator]:
    """Yields the operators of a graph and of its inner graphs that add products with int8 weights in pairs.

    Args:
        graph: a graph of the file that ONNX Runtime optimized.
        tensors: the constants of the outer graphs, by name.
        makers: the nodes of the outer graphs, by the names of their outputs.
        folder: the folder of the file, from which external data is read.
        signed: whether to yield the int8 x int8 operators instead of the uint8 x int8 ones.
    """
    tensors = {**tensors, **graph.tensors}
    makers = {**makers, **{name: node for node in graph.nodes for name in node.outputs if name}}
    beyond = overflowing_on_arm if signed else overflowing_channels
    for node in graph.nodes:
        if node.op_type in PLACES and _is_signed(node, tensors) == signed:
            name = node.name or next((one for one in node.outputs if one), node.op_type)
            found = _rows(node, tensors, makers, folder)
            if found is None or found:
                channels = 0 if found is None else sum(map(len, found))
                ends = None if found is None else sum(int(beyond(one).sum()) for one in found)
                yield Int8Operator(name, node.op_type, channels, ends)
        for body in node.graphs:
            yield from _operators(body, tensors, makers, folder, signed)


def _is_signed(node: Node, tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether activations are int8, by a constant zero point; without one they count as uint8."""
    place = PLACES[node.op_type].x_zero
    zero = None if place is None else tensors.get(_input(node, place))
    return zero is not None and zero.type == INT8


def _rows(
    node: Node, tensors: Mapping[str, Tensor], makers: Mapping[str, Node], folder: Path
) -> list[NDArray[np.int8]] | None:
    """Returns the int8 weights as rows in the order in which the kernel multiplies.

    Returns [] if there are none or for a depthwise convolution, and None if the weights are computed.
    """
    places, found = PLACES[node.op_type], []
    for place, zero in zip(places.weights, places.weight_zeros, strict=True):
        weight = tensors.get(_input(node, place))
        if weight is None and _may_be_int8(node, place, zero, tensors, makers):
            return None
        if weight is not None and weight.type == INT8 and not _depthwise(node, weight.shape):
            values = weight.int8(folder)
            rows = convolution_rows(values) if node.op_type == "QLinearConv" else product_rows(values)
            if node.op_type == "QGemm" and node.ints.get("transB", 0):
                rows = values
            found.append(rows.reshape(-1, rows.shape[-1]))
    return found


def _may_be_int8(
    node: Node, place: int, zero: int, tensors: Mapping[str, Tensor], makers: Mapping[str, Node]
) -> bool:
    """Returns whether a computed operand may be int8, judged by its zero point or its quantizer.

    If it has neither, its type is unknown and may be int8, unless DynamicQuantizeLinear (uint8) computes it.
    """
    known = tensors.get(_input(node, zero))
    if known is not None:
        return known.type == INT8
    maker = makers.get(_input(node, place))
    if maker is None or maker.op_type != "QuantizeLinear":
        return maker is None or maker.op_type != "DynamicQuantizeLinear"
    known = tensors.get(_input(maker, 2))
    return known is not None and known.type == INT8


def _depthwise(node: Node, shape: tuple[int, ...]) -> bool:
    """Returns whether a node is a depthwise convolution, which multiplies in 32 bits."""
    count = node.ints.get("group", 1)
    return node.op_type == "QLinearConv" and count > 1 and shape[0] == count and shape[1] == 1


def _input(node: Node, place: int) -> str:
    return node.inputs[place] if place < len(node.inputs) else ""
