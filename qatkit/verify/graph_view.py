"""Queries an ONNX graph in `onnx_ir`: which constant a tensor comes from, and which operators lie between.

The producer and the readers of a value come from the value itself (`producer()`, `consumers()`). Constant
nodes count as initializers, so a file reads the same however its constants are stored. This module does not
need torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from qatkit.graph.operators import lookup, onnx_operators, operator, operators
from qatkit_verify.errors import ConfigError, one_line


@lookup
def shape_ops() -> frozenset[str]:
    """Returns the operators that only move or cast values, so that a weight is still the same weight after them."""
    return onnx_operators([operator("shape")]) | {"Identity", "Cast"}


@lookup
def conv_ops() -> frozenset[str]:
    """Returns the convolutions, including ONNX Runtime's variants."""
    return onnx_operators([operator("conv")], kernels=True)


@lookup
def weighted_ops() -> frozenset[str]:
    """Returns ONNX's own operators that multiply by a weight."""
    return onnx_operators([record for record in operators() if record.weighted])


@lookup
def matrix_ops() -> frozenset[str]:
    """Returns the operators that multiply by a weight (`weighted_ops`), with ONNX Runtime's variants of them."""
    return onnx_operators([record for record in operators() if record.weighted], kernels=True)


@lookup
def clip_ops() -> frozenset[str]:
    """Returns the activations that a quantized range can replace."""
    return onnx_operators([record for record in operators() if record.activation is not None])


@lookup
def same_scale_ops() -> frozenset[str]:
    """Returns the operators whose 8-bit kernels pass values through: input and output share their scale."""
    return onnx_operators([record for record in operators() if record.keeps_range])


@lookup
def eight_bit_ops() -> frozenset[str]:
    """Returns the operators, except Conv, Gemm and MatMul, that run in 8 bits on the CPU between Q/DQ pairs."""
    requantizing = [record for record in operators() if record.kernels and not record.weighted]
    return onnx_operators(requantizing) | same_scale_ops()


@dataclass(frozen=True)
class Weight:
    """A constant operand of a reader.

    Attributes:
        value: the initializer.
        dequantize: the DequantizeLinear between the initializer and the reader; None if there is none.
        between: an operator between the DequantizeLinear and the reader; None if there is none.
    """

    value: ir.Value
    dequantize: ir.Node | None
    between: ir.Node | None

    @property
    def name(self) -> str:
        """The initializer's name."""
        return str(self.value.name)


def read_model(path: str | Path) -> ir.Model:
    """Reads a file.

    Raises:
        ConfigError: the file is not an ONNX model.
    """
    try:
        model = with_initializers(ir.load(str(path)))
    except Exception as error:  # protobuf's DecodeError cannot be imported from a stable place
        raise ConfigError(
            "onnx file", path, reason=f"the file can't be read as ONNX ({one_line(_cause(error))})"
        ) from error
    for node in model.graph:
        node.name = node.name or ""  # for messages
    return model


def with_initializers(model: ir.Model) -> ir.Model:
    """Turns the Constant nodes of `model` into initializers, in place, and returns it."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def _cause(error: BaseException) -> BaseException:
    """Returns the original error, which onnx_ir wraps in errors that name its own functions."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Returns an input of a node, or None if it is omitted."""
    return node.inputs[index] if index < len(node.inputs) else None


def stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the tensor that the file stores for `value`; None for a computed value or an input."""
    return value.const_value if value is not None and value.is_initializer() else None


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Returns the value of a constant tensor, or None."""
    tensor = stored(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def element_type(value: ir.Value | None) -> ir.DataType | None:
    """Returns the data type of a constant, or None if the tensor is not constant."""
    tensor = stored(value)
    return None if tensor is None else tensor.dtype


def quantized_type(pair: ir.Node) -> ir.DataType | None:
    """Returns the integer type of a Q or DQ node from its zero point: uint8 without one, None if it is computed."""
    zero_point = operand(pair, 2)
    return ir.DataType.UINT8 if zero_point is None else element_type(zero_point)


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Returns the producer of `value` if its type is `op_type`, else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def back(value: ir.Value | None) -> Iterator[ir.Node]:
    """Yields the producer of `value`, then that of the producer's first input, and so on up the graph."""
    while value is not None and (node := value.producer()) is not None:
        yield node
        value = operand(node, 0)


def weight(value: ir.Value | None) -> Weight | None:
    """Returns the constant from which only a Q/DQ pair and shape operators lead to `value`; None if none does."""
    dequantize = between = None
    for node in back(value):
        if node.op_type == "DequantizeLinear" and dequantize is None:
            dequantize = node
        elif node.op_type in shape_ops() or node.op_type == "QuantizeLinear":
            between = node if dequantize is None else between
        else:
            return None
        value = operand(node, 0)
    return Weight(value, dequantize, between) if value is not None and value.is_initializer() else None


def weight_of(node: ir.Node) -> Weight | None:
    """Returns the constant operand of a matrix operator (Conv, Gemm, MatMul and fused variants), or None."""
    found = (weight(operand(node, index)) for index in _operand_indices(node))
    return next((one for one in found if one is not None), None)


def _operand_indices(node: ir.Node) -> tuple[int, ...]:
    """Returns the possible positions of a matrix operator's weight among its inputs, the usual one first."""
    if node.op_type in ("QLinearConv", "QLinearConvTranspose", "QLinearMatMul", "QGemm"):
        return (3, 0) if node.op_type in ("QLinearMatMul", "QGemm") else (3,)
    return (1,) if node.op_type in conv_ops() else (1, 0)
