"""Stores weights of up to 4 bits as int4 or uint4 initializers instead of bytes, from opset 21 on.

By default the integers are stored in bytes, which ONNX Runtime's int8 kernels can read. With 8-bit activations, ONNX
Runtime converts an int4 initializer to float when it loads the file (docs/onnxruntime-qdq.md, 2).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from torch import nn

from qatkit.graph.convert.integer_modules import Quantized
from qatkit.quant.spec import FEW_BITS


def pack(model: ir.Model, module: nn.Module) -> None:
    """Packs the weights of `module` that fit into 4 bits, and their zero points, in place.

    Weights that any operator other than DequantizeLinear reads stay in bytes.

    Args:
        model: the exported `module`, of opset 21 or higher; its initializers have the names of the module's buffers.
        module: the converted module.
    """
    wanted = {
        f"{path}.weight"
        for path, one in module.named_modules()
        if isinstance(one, Quantized) and one.dtype in FEW_BITS
    }
    for name in wanted & set(model.graph.initializers):
        value = model.graph.initializers[name]
        if all(use.node.op_type == "DequantizeLinear" for use in value.uses()):
            _pack(model.graph, value)


def _pack(graph: ir.Graph, value: ir.Value) -> None:
    kind = value.dtype
    for node, _ in list(value.uses()):
        zero = node.inputs[2]
        if zero is not None and zero.const_value is not None and zero.dtype == kind:
            packed = _in_4_bits(zero, f"{value.name}_zero_point_{len(graph.initializers)}")
            graph.register_initializer(packed)
            node.replace_input_with(2, packed)
    small = _in_4_bits(value, str(value.name))
    value.const_value, value.type = small.const_value, small.type


def _in_4_bits(value: ir.Value, name: str) -> ir.Value:
    assert value.const_value is not None
    signed = value.dtype == ir.DataType.INT8
    kind = ir.DataType.INT4 if signed else ir.DataType.UINT4
    array = np.asarray(value.const_value.numpy()).astype(ml_dtypes.int4 if signed else ml_dtypes.uint4)
    tensor = ir.Tensor(array, dtype=kind, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
