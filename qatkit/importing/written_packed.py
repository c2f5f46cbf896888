"""Writes packed weights of a converted module (`qatkit.graph.convert.weight_only_modules`) into the nodes of a file.

    MatMul, Gemm of 4 bits or fewer   becomes com.microsoft MatMulNBits, with its bias
    MatMul, Gemm of 8 bits; Conv      gets a float weight that operators unpack from constants; ONNX Runtime
                                      computes it once, when it loads the file
    Gather of a constant table        becomes Gathers of packed rows, scales and zero points, which are then unpacked

Source: the definition of MatMulNBits in onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from qatkit.export.rewrite import MICROSOFT
from qatkit.graph.convert.weight_only_modules import PackedEmbedding, WeightOnly, table
from qatkit.importing.operators.table import Array
from qatkit.importing.program import Step
from qatkit.importing.written_file import refused
from qatkit.importing.written_weights import WrittenWeights, array_of, held_by

_PRODUCTS = ("Conv", "Gemm", "MatMul")
_UNIT = 2  # the index of the units in the result of `_stored`
_FLOAT, _INT32 = 1, 6  # the numbers of the types in onnx.TensorProto


def is_packed(module: nn.Module | None) -> TypeGuard[WeightOnly | PackedEmbedding]:
    """Returns whether a module of a converted graph has a packed weight."""
    return isinstance(module, (WeightOnly, PackedEmbedding))


class PackedWeights:
    """Writes packed weights into the nodes of a file.

    Args:
        weights: the writer of unpacked weights of the same file, which stores equal constants once.
    """

    def __init__(self, weights: WrittenWeights) -> None:
        self.file, self.weights = weights.file, weights

    def write(self, step: Step, module: WeightOnly | PackedEmbedding) -> None:
        """Gives the node of `step` the weight of the converted module.

        Raises:
            ConfigError: the node cannot have the module's weight.
        """
        node = self.file.maker(next(name for name in step.outputs if name))
        if isinstance(module, PackedEmbedding):
            self._table(node, module)
            return
        if node.op_type not in _PRODUCTS or node.domain not in ("", "ai.onnx"):
            raise refused(
                self.file.path,
                f"node '{step.name}' ({node.op_type}) cannot have a packed weight; "
                "keep it in float with backend.overrides",
            )
        held = held_by(cast(ir.Value, node.inputs[1]))
        if held is not None and held.dtype != np.float32:
            raise refused(self.file.path, f"node '{step.name}' computes in {held.dtype} instead of float32")
        if module.multiplies_packed:
            self._packed_product(node, module)
        else:
            self._float_product(step, node, module)

    def operands(self, module: WeightOnly, shape: Sequence[int], name: str) -> ir.Value:
        """Returns the float weight, in torch's layout and the given shape, computed from constants by new nodes."""
        held, scale, zero = self._operands(module, name)
        rows = self._rows(module, held, scale, zero, name, scale)
        return self._reshaped(rows, shape, name)

    def _packed_product(self, node: ir.Node, module: WeightOnly) -> None:
        """Turns the node into a MatMulNBits."""
        x, name = node.inputs[0], str(cast(ir.Value, node.inputs[1]).name)
        given: list[ir.Value | None] = [x, *self._operands(module, name)]
        bias = self._bias(node, module)
        if bias is not None:
            given += [None, bias]
        while given[-1] is None:
            given.pop()
        settings = {
            "K": module.inputs,
            "N": len(module.weight),
            "bits": module.bits,
            "block_size": module.weight.shape[2] * 8 // module.bits,
        }
        self._becomes(node, "MatMulNBits", given, settings)
        node.domain = MICROSOFT
        self.file.model.opset_imports.setdefault(MICROSOFT, 1)

    def _float_product(self, step: Step, node: ir.Node, module: WeightOnly) -> None:
        linear = len(module.shape) == 2
        name = str(cast(ir.Value, node.inputs[1]).name)
        bias = self._bias(node, module)
        weight = self.operands(module, module.shape if linear else step.shape(1), name)
        if linear and not (node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1):
            weight = self.file.node(weight, "Transpose", [weight], name, [ir.AttrInt64s("perm", [1, 0])])
        if linear and bias is not None:
            node.op_type = "Gemm"  # a MatMul that got its bias from a BatchNorm
        for attribute in ("alpha", "beta"):
            node.attributes.pop(attribute, None)  # they are folded into the weights
        given = [weight] if bias is None else [weight, bias]
        node.resize_inputs(1 + len(given))
        for place, value in enumerate(given):
            node.replace_input_with(1 + place, value)

    def _bias(self, node: ir.Node, module: WeightOnly) -> ir.Value | None:
        """Returns the bias [out], which is the file's constant if both are equal; None if the module has none."""
        if module.bias is None:
            return None
        wanted = array_of(module.bias)
        own = node.inputs[2] if len(node.inputs) > 2 else None
        held = None if own is None else held_by(own)
        if held is not None and held.dtype == wanted.dtype and np.array_equal(held, wanted):
            return own
        base = str(node.name) if own is None else str(own.name)
        return self.weights.stored(wanted, f"{base}.bias" if own is None else f"{base}_trained")

    def _table(self, node: ir.Node, module: PackedEmbedding) -> None:
        """Turns the node into a Reshape of unpacked rows."""
        table_name, places = str(cast(ir.Value, node.inputs[0]).name), cast(ir.Value, node.inputs[1])
        base = str(node.outputs[0].name)
        flat = last = self._reshaped(places, [-1], base)
        found = self._stored(module, table_name)
        for place, value in enumerate(found):
            if value is None or (place == _UNIT and value.shape == (1, 1)):  # one value for all rows
                continue
            found[place] = last = self.file.node(last, "Gather", [value, flat], base)
        held, own, unit, zero = found
        assert held is not None and own is not None
        scale = self._decoded(module, own, unit, base, last)
        rows = self._rows(module, held, scale, zero, base, last if scale is own else scale)
        sizes = self.file.node(rows, "Shape", [places], base)
        width = self._constant(np.array([module.inputs], np.int64), base, "width")
        sizes = self.file.node(sizes, "Concat", [sizes, width], base, [ir.AttrInt64("axis", 0)])
        self._becomes(node, "Reshape", [rows, sizes], {})

    def _stored(self, module: WeightOnly | PackedEmbedding, name: str) -> list[ir.Value | None]:
        """Returns the constants that store a weight; None for those that the weight does not have.

        They are bytes [out, blocks, bytes per block], scales [out, blocks], units of the scales, and zero
        points [out, bytes].
        """
        held = {
            "quantized": module.weight,
            "scale": module.weight_scale,
            "scale_unit": module.weight_scale_unit,
            "zero_point": module.weight_zero_point,
        }
        return [
            None if one is None else self.weights.stored(array_of(one), f"{name}_{what}")
            for what, one in held.items()
        ]

    def _operands(
        self, module: WeightOnly | PackedEmbedding, name: str
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Returns bytes, scales in float32, and zero points or None."""
        held, scale, unit, zero = self._stored(module, name)
        assert held is not None and scale is not None
        return held, self._decoded(module, scale, unit, name, None), zero

    def _decoded(
        self,
        module: WeightOnly | PackedEmbedding,
        scale: ir.Value,
        unit: ir.Value | None,
        base: str,
        after: ir.Value | None,
    ) -> ir.Value:
        """Returns scales in float32, decoded from stored ones (`qatkit.quant.held_scales`)."""
        if module.weight_scale.dtype == torch.float32:
            return scale
        found = self.file.node(after, "Cast", [scale], base, [ir.AttrInt64("to", _FLOAT)])
        return found if unit is None else self.file.node(found, "Mul", [found, unit], base)

    def _rows(
        self,
        module: WeightOnly | PackedEmbedding,
        held: ir.Value,
        scale: ir.Value,
        zero: ir.Value | None,
        base: str,
        after: ir.Value,
    ) -> ir.Value:
        """Returns float32 rows [n, inputs] from packed rows, scales and zero points; inserts nodes after `after`."""
        _, blocks, size = module.weight.shape
        each, bits = 8 // module.bits, module.bits
        width = size * each
        counted = self._integers(held, bits, [0, blocks, width], base, after)
        last = counted
        if zero is None:
            shift = self._constant(np.array(2.0 ** (bits - 1), np.float32), base, "middle")
        else:
            count = cast(Any, module.weight_zero_point).shape[1] * each
            shift = self._integers(zero, bits, [0, count], base, last)
            shift = last = self._first(shift, count, blocks, base)
            shift = last = self._reshaped(shift, [0, blocks, 1], base)
        factor = last = self._reshaped(scale, [0, blocks, 1], base, last)
        counted = last = self.file.node(last, "Sub", [counted, shift], base)
        rows = self.file.node(last, "Mul", [counted, factor], base)
        return self._first(
            self._reshaped(rows, [0, blocks * width], base), blocks * width, module.inputs, base
        )

    def _integers(
        self, held: ir.Value, bits: int, shape: Sequence[int], base: str, after: ir.Value | None
    ) -> ir.Value:
        """Returns the integers that are stored in bytes, as float32 in the given shape."""
        if bits == 8:
            return self.file.node(after, "Cast", [held], base, [ir.AttrInt64("to", _FLOAT)])
        places = self.file.node(after, "Cast", [held], base, [ir.AttrInt64("to", _INT32)])
        every = self._constant(array_of(table(bits)), base, "integers_of_bytes")
        return self._reshaped(self.file.node(places, "Gather", [every, places], base), shape, base)

    def _first(self, value: ir.Value, count: int, wanted: int, base: str) -> ir.Value:
        """Returns the first `wanted` of the `count` values of each row."""
        if count == wanted:
            return value
        ends = [self._constant(np.array([one], np.int64), base, f"at_{one}") for one in (0, wanted, 1)]
        return self.file.node(value, "Slice", [value, *ends], base)

    def _reshaped(
        self, value: ir.Value, shape: Sequence[int], base: str, after: ir.Value | None = None
    ) -> ir.Value:
        sizes = self._constant(np.array(shape, np.int64), base, "sizes")
        return self.file.node(value if after is None else after, "Reshape", [value, sizes], base)

    def _constant(self, array: Array, base: str, what: str) -> ir.Value:
        return self.weights.stored(array, f"{base}_{what}")

    def _becomes(
        self, node: ir.Node, kind: str, given: Sequence[ir.Value | None], settings: dict[str, int]
    ) -> None:
        """Changes the operator, inputs and attributes of a node, but not its output."""
        node.op_type = kind
        node.attributes.clear()
        for name, number in settings.items():
            node.attributes.add(ir.AttrInt64(name, number))
        node.resize_inputs(len(given))
        for place, value in enumerate(given):
            node.replace_input_with(place, value)
