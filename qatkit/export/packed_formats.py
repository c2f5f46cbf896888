"""Packs weights in number formats: stores codes of a few bits and scales instead of float32 numbers, in two forms.

    bytes              operators of opset 13, which any runtime supports, look up the values of codes in tables
    DequantizeLinear   reads a float8 or int8 tensor, blockwise from opset 21 on (`DEQUANTIZED`)

    codes [n] uint8 ── Cast ── Gather(values) ── Reshape ──┐
    scales [.., blocks, ..] uint8 ── Cast ── Gather(powers of two) ── Gather(block of each value) ── Mul ── the weight

Two elements of 4 bits share a byte, and the table has both values for each byte. Four elements of 6 bits share three
bytes and are separated by division. If the number of elements is not a multiple of 2 (4 bits) or 4 (6 bits), each
element takes a byte. ONNX Runtime computes all of this once, when it loads the file. A weight in float16 or bfloat16
becomes a tensor of this type and a Cast.

In both forms, the unpacked weight equals the float32 weight of the simulation bit for bit. This is checked for each
weight; a weight that does not pass, such as one with a NaN, is not packed.

Low bits come first, as in ONNX's 4-bit types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from qatkit.graph.convert.format_modules import HeldWeight
from qatkit.quant.formats.elements import rounded
from qatkit.quant.formats.table import BFLOAT16, DEQUANTIZED, E4M3, E5M2, FLOAT16, INT8, Element, Scale

Array = NDArray[Any]

_HALVES: Mapping[Element, Any] = {FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}
_TYPES: Mapping[Element, Any] = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, INT8: np.int8}
_STEP = 64.0  # steps per unit of an integer element
_BIAS = 127  # the exponent bias of E8M0


def pack_formats(model: ir.Model, module: nn.Module, *, dequantize: bool) -> None:
    """Packs every weight of `module` that has a format and can be packed exactly, in place.

    Weights are found by their values, since the exporter transposes the weights of a MatMul.

    Args:
        model: the exported `module`, changed in place.
        module: the converted module.
        dequantize: whether to use DequantizeLinear where ONNX Runtime supports it for the format.
    """
    held = [one for part in module.modules() if isinstance(one := getattr(part, "held", None), HeldWeight)]
    known: dict[tuple[tuple[int, ...], bytes], tuple[HeldWeight, bool]] = {}
    for one in held:
        array = one.values.numpy()
        known.setdefault((array.shape, array.tobytes()), (one, False))
        if array.ndim == 2:
            known.setdefault((array.T.shape, array.T.tobytes()), (one, True))
    packer = _Packer(model.graph, dequantize=dequantize)
    for value in list(model.graph.initializers.values()):
        array = _array(value)
        found = known.get((array.shape, array.tobytes())) if array.dtype == np.float32 else None
        if found is not None and not value.is_graph_output():
            packer.pack(value, array, *found)


class _Packer:
    """Packs the weights of a graph, which share their tables."""

    def __init__(self, graph: ir.Graph, *, dequantize: bool) -> None:
        self.graph, self.dequantize = graph, dequantize
        self.first = graph[0]
        self.shared: dict[str, ir.Value] = {}

    def pack(self, value: ir.Value, array: Array, held: HeldWeight, turned: bool) -> None:
        """Replaces an initializer by packed constants and the nodes that unpack them, if these give the same bits."""
        self.name = str(value.name)
        form, element = held.form, held.form.element
        if element in _HALVES:
            stored = array.astype(_HALVES[element])
            if not _same(stored.astype(np.float32), array):
                return
            self._replace(value, self._made("Cast", [self._constant(stored, "values")], {"to": 1}))
            return
        scale = held.scale.numpy()
        scale, axis = (scale.T, 1 - held.axis) if turned else (scale, held.axis)
        by_value = scale if form.block is None else _spread(scale, form.block, axis, array.shape)
        codes = _codes(array / by_value, element)
        if codes is None or not _same(table(element)[codes] * by_value, array):
            return
        if self.dequantize and held.dtype in DEQUANTIZED:
            new = self._dequantized(codes, scale, held, axis)
        else:
            of_block = self._scale(scale, held)
            if of_block is None:
                return
            if form.block is not None and scale.shape[axis] > 1:
                places = np.arange(array.shape[axis], dtype=np.int32) // form.block
                index = self._table(f"blocks_of_{form.block}_in_{len(places)}", places)
                of_block = self._made("Gather", [of_block, index], {"axis": axis})
            new = self._made("Mul", [self._elements(codes, element), of_block])
        self._replace(value, new)

    def _elements(self, codes: Array, element: Element) -> ir.Value:
        """Returns the values of codes as an output of nodes, in the same shape."""
        shape = self._constant(np.array(codes.shape, np.int64), "shape")
        flat, values = codes.reshape(-1), table(element)
        if element.bits == 4 and flat.size % 2 == 0:
            pairs = np.arange(256)
            known = self._table("pairs_e2m1", np.stack([values[pairs & 15], values[pairs >> 4]], axis=1))
            return self._looked_up(known, self._constant(flat[::2] | flat[1::2] << 4, "codes"), shape)
        if element.bits == 6 and flat.size % 4 == 0:
            four = flat.reshape(-1, 4).astype(np.uint32) << np.arange(0, 24, 6, dtype=np.uint32)
            word = np.bitwise_or.reduce(four, axis=1)
            packed = (word[:, None] >> np.arange(0, 24, 8, dtype=np.uint32)).astype(np.uint8)
            known = self._table(f"values_e{element.exponent_bits}m{element.mantissa_bits}", values)
            return self._looked_up(known, self._six_bits(packed), shape)
        known = self._table(f"values_e{element.exponent_bits}m{element.mantissa_bits}", values)
        return self._looked_up(known, self._constant(flat, "codes"), shape)

    def _six_bits(self, packed: Array) -> ir.Value:
        """Adds nodes that unpack four 6-bit codes from every three bytes [n, 3]; returns their output [n, 4]."""
        whole = self._made("Cast", [self._constant(packed, "codes")], {"to": int(ir.DataType.INT32)})
        shifted = self._made("Mul", [whole, self._table("byte_weights", _powers(8, 3))])
        word = self._made("ReduceSum", [shifted, self._table("axis_1", np.array([1], np.int64))])
        apart = self._made("Div", [word, self._table("code_weights", _powers(6, 4))])
        return self._made("Mod", [apart, self._table("codes_in_6_bits", np.array(64, np.int32))])

    def _looked_up(self, values: ir.Value, codes: ir.Value, shape: ir.Value | None) -> ir.Value:
        if codes.dtype == ir.DataType.UINT8:
            codes = self._made("Cast", [codes], {"to": int(ir.DataType.INT32)})
        found = self._made("Gather", [values, codes], {"axis": 0})
        return found if shape is None else self._made("Reshape", [found, shape])

    def _scale(self, scale: Array, held: HeldWeight) -> ir.Value | None:
        """Returns the scales as an output of nodes, in the shape of `scale`; None if bytes cannot represent them."""
        if held.form.scale is Scale.FLOAT32:
            return self._constant(scale, "scale")
        if held.form.scale is Scale.E8M0:
            exponents = np.frexp(scale)[1] - 1
            if not _same(np.ldexp(np.float32(1), exponents), scale):
                return None
            powers = np.ldexp(np.float32(1), np.arange(-_BIAS, _BIAS + 1))
            codes = (exponents + _BIAS).astype(np.uint8)
            return self._looked_up(
                self._table("powers_of_two", powers), self._constant(codes, "scales"), None
            )
        tensor = held.of_tensor.numpy()
        by_code = table(E4M3)
        found = _codes(scale / tensor, E4M3)
        if found is None or not _same(by_code[found] * tensor, scale):
            return None
        of_block = self._looked_up(self._table("values_e4m3", by_code), self._constant(found, "scales"), None)
        return self._made("Mul", [of_block, self._constant(tensor, "tensor_scale")])

    def _dequantized(self, codes: Array, scale: Array, held: HeldWeight, axis: int) -> ir.Value:
        """Returns the weight from a DequantizeLinear that is followed by a barrier.

        Without the barrier, ONNX Runtime would look for integer kernels.
        """
        element = held.form.element
        integers = codes.view(_TYPES[element])
        steps = (scale / _STEP if element.integer else scale).astype(np.float32)
        block = held.form.block
        settings: dict[str, Any] = {} if block is None else {"axis": axis, "block_size": block}
        given = [self._constant(integers, "elements"), self._constant(steps, "scale")]
        return self._made("Sum", [self._made("DequantizeLinear", given, settings)])

    def _made(
        self, operator: str, given: list[ir.Value], settings: Mapping[str, Any] | None = None
    ) -> ir.Value:
        """Inserts a node before all others, and returns its output."""
        node = ir.node(operator, given, settings or {})
        self.graph.insert_before(self.first, node)
        return node.outputs[0]

    def _constant(self, array: Array, what: str) -> ir.Value:
        return self._registered(array, f"{self.name}/{what}")

    def _table(self, name: str, array: Array) -> ir.Value:
        if name not in self.shared:
            self.shared[name] = self._registered(array, f"formats/{name}")
        return self.shared[name]

    def _registered(self, array: Array, name: str) -> ir.Value:
        tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _replace(self, value: ir.Value, new: ir.Value) -> None:
        new.shape, new.type = value.shape, value.type
        ir.convenience.replace_all_uses_with(value, new)
        del self.graph.initializers[str(value.name)]


def table(element: Element) -> Array:
    """Returns the values of all codes of an element of up to 8 bits, float32 [2^bits]; NaN for unused codes."""
    found = np.full(1 << element.bits, np.nan, np.float32)
    if element.integer:
        codes = np.arange(-(1 << element.bits - 1) + 1, 1 << element.bits - 1)
        found[codes] = codes / _STEP
        return found
    half = 1 << element.bits - 1
    exponent, mantissa = np.divmod(np.arange(half), 1 << element.mantissa_bits)
    share = mantissa / (1 << element.mantissa_bits) + (exponent > 0)
    sizes = np.ldexp(share, np.maximum(exponent, 1) - element.bias)
    sizes[sizes > element.maximum] = np.nan
    found[:half], found[half:] = sizes, -sizes
    return found


def _codes(steps: Array, element: Element) -> Array | None:
    """Returns the codes of the elements nearest to the given values, uint8; None if a value is not finite."""
    if not np.isfinite(steps).all():
        return None
    held = rounded(torch.from_numpy(np.ascontiguousarray(steps, np.float32)), element).numpy()
    if element.integer:
        return (held * _STEP).astype(np.int8).view(np.uint8)
    sizes = table(element)[: 1 << element.bits - 1]
    places = np.searchsorted(sizes[~np.isnan(sizes)], np.abs(held))
    codes: Array = (places + np.signbit(held) * len(sizes)).astype(np.uint8)
    return codes


def _spread(scale: Array, block: int, axis: int, shape: tuple[int, ...]) -> Array:
    return np.repeat(scale, block, axis).take(range(shape[axis]), axis)


def _powers(bits: int, count: int) -> Array:
    return np.array([math.ldexp(1, bits * i) for i in range(count)], np.int32)


def _same(a: Array, b: Array) -> bool:
    """Returns whether two float32 arrays have the same shape and the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())
