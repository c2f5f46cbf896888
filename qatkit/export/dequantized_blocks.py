"""Writes products with packed weights as blockwise DequantizeLinear and MatMul, which other runtimes can read too.

    before   x ── MatMulNBits(packed weight [out, inputs]) ── y
    after    x ── MatMul(DequantizeLinear(integers [inputs, out], axis 0)) ── Add of a bias, if any ── y

If integers of 2 bits have a number of outputs that is not a multiple of 4, they stay [out, inputs], with a Transpose
before the MatMul. Integers of 4 bits need opset 21 and integers of 2 bits opset 25; the opset of the file is raised if
necessary. Without zero points, the integers are signed.

A weight that is also the table of an Embedding is stored twice, since DequantizeLinear would dequantize the whole table
instead of the rows that are looked up. Weights of convolutions stay unchanged: ONNX Runtime runs the standard operators
that unpack them only once, but would run a DequantizeLinear again in every inference.

When ONNX Runtime loads the file, it turns such a MatMul back into a MatMulNBits. Its accuracy level is 4, unless the
session sets another one (session.qdq_matmulnbits_accuracy_level).

Source: ONNX, docs/Operators.md, DequantizeLinear-21 (`block_size`) and -25 (2 bits).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import version_converter
from onnx_ir.passes import common

from qatkit.export.quiet import quiet
from qatkit.export.rewrite import MICROSOFT
from qatkit.export.write_model import write_model

Array = NDArray[Any]

# The opset and the IR version that introduced the integer type, by its number of bits.
FIRST_OPSET, _FIRST_IR = {4: 21, 2: 25}, {4: 10, 2: 13}
_SIGNED = {4: ml_dtypes.int4, 2: ml_dtypes.int2}
_UNSIGNED = {4: ml_dtypes.uint4, 2: ml_dtypes.uint2}


def as_dequantized_blocks(path: Path) -> int | None:
    """Rewrites a file in place, atomically. A file without products with packed weights stays as it is.

    Returns:
        The opset to which the file was raised; None if it keeps its own.

    Raises:
        ValueError: ONNX's checker or ONNX Runtime refuses the new file.
    """
    model = ir.load(path)
    bits = {node.attributes["bits"].as_int() for node in _products(model.graph)}
    if not bits:
        return None
    opset = max(FIRST_OPSET[one] for one in bits)
    raises = model.opset_imports[""] < opset
    with quiet():
        if raises:
            model = ir.from_proto(version_converter.convert_version(ir.to_proto(model), opset))
        for node in _products(model.graph):
            _Product(model.graph, node).rewrite()
        for cleaning in (common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass()):
            cleaning(model)
    model.ir_version = max(model.ir_version, *(_FIRST_IR[one] for one in bits))
    write_model(model, path)
    return opset if raises else None


def _products(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "MatMulNBits" and node.domain == MICROSOFT]


class _Product:
    """A MatMulNBits node of a graph."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node
        names = ("N", "K", "bits", "block_size")
        self.out, self.inputs, self.bits, self.block = (node.attributes[name].as_int() for name in names)
        # ONNX Runtime 1.31.1 computes wrong products with 2-bit weights unless the number of outputs is a multiple
        # of 4.
        self.by_inputs = self.bits != 2 or self.out % 4 == 0

    def rewrite(self) -> None:
        """Replaces the node by a DequantizeLinear, a MatMul and the Add of a bias."""
        x, data, scale, zero, _, bias = (*self.node.inputs, None, None, None)[:6]
        assert x is not None and data is not None and scale is not None
        name, middle = str(data.name), 2 ** (self.bits - 1)
        codes = self._codes(data, self.inputs)
        if zero is None:
            weight = self._stored((codes - middle).astype(_SIGNED[self.bits]), f"{name}_integers")
            given = [weight, self._scale(scale)]
        else:
            weight = self._stored(codes.astype(_UNSIGNED[self.bits]), f"{name}_integers")
            zeros = self._codes(zero, -(-self.inputs // self.block)).astype(_UNSIGNED[self.bits])
            given = [weight, self._scale(scale), self._stored(zeros, f"{name}_zero_points")]
        settings = {"axis": int(not self.by_inputs), "block_size": self.block}
        values = self._made("DequantizeLinear", given, settings, f"{name}_dequantized")
        if not self.by_inputs:
            values = self._made("Transpose", [values], {"perm": [1, 0]}, f"{name}_transposed")
        y = self._made("MatMul", [x, values], {}, str(self.node.name))
        if bias is not None:
            y = self._made("Add", [y, bias], {}, f"{self.node.name}_bias")
        old = self.node.outputs[0]
        own, y.shape, y.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        old.name, y.name = f"{own}_packed", own

    def _codes(self, held: ir.Value, count: int) -> Array:
        """Returns the first `count` unsigned integers of each output channel, int16 [out, count]."""
        each = _array(held).reshape(self.out, -1, 1) >> np.arange(0, 8, self.bits, dtype=np.uint8)
        found: Array = (each & (2**self.bits - 1)).reshape(self.out, -1)[:, :count].astype(np.int16)
        return found

    def _scale(self, value: ir.Value) -> ir.Value:
        """Returns the scales with their axes in the order of the stored integers; copies nodes that compute them."""
        maker = value.producer()
        if maker is None:
            held = _array(value)
            return self._stored(held.reshape(1 if held.size == 1 else self.out, -1), f"{value.name}_by_block")
        given = [self._scale(one) for one in maker.inputs if one is not None]
        return self._made(maker.op_type, given, maker.attributes, f"{self.node.name}_{maker.name}")

    def _stored(self, array: Array, name: str) -> ir.Value:
        """Adds values [out, ...] as a constant, transposed if integers are stored as [inputs, out]; returns it."""
        array = array.T.copy() if self.by_inputs else array
        known = self.graph.initializers.get(name)
        if known is not None and np.array_equal(_array(known), array):
            return known
        while name in self.graph.initializers:
            name = f"{name}_"
        tensor = ir.tensor(array, name=name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _made(self, operator: str, given: list[ir.Value], settings: Any, name: str) -> ir.Value:
        """Inserts a node before the product, and returns its output."""
        node = ir.node(operator, given, settings, name=name)
        self.graph.insert_before(self.node, node)
        return node.outputs[0]


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    found: Array = np.asarray(value.const_value.numpy())
    return found
