"""int4 weights in 4 bits: DequantizeLinear(int8 initializer) → DequantizeLinear(int4 initializer), from opset 21 on.

Without it the integers of an int4 weight are bytes, which is what ONNX Runtime's int8 kernels take; of an int4 weight
beside 8-bit activations it makes floats when it loads the file (docs/onnxruntime-qdq.md, 2).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from torch import nn

from qatkit.graph.integer_modules import Quantized


def pack(model: ir.Model, module: nn.Module) -> None:
    """Changes the weights of `module` that are int4, and their zero points, in place.

    Args:
        model: of opset 21 or higher, made of `module`, whose buffers name its initializers.
        module: converted.
    """
    wanted = {
        f"{path}.weight"
        for path, one in module.named_modules()
        if isinstance(one, Quantized) and one.dtype == "int4"
    }
    for name in wanted & set(model.graph.initializers):
        value = model.graph.initializers[name]
        if all(use.node.op_type == "DequantizeLinear" for use in value.uses()):
            _pack(model.graph, value)


def _pack(graph: ir.Graph, value: ir.Value) -> None:
    for node, _ in list(value.uses()):
        zero = node.inputs[2]
        if zero is not None and zero.const_value is not None and zero.dtype == ir.DataType.INT8:
            packed = _as_int4(zero, f"{value.name}_zero_point_{len(graph.initializers)}")
            graph.register_initializer(packed)
            node.replace_input_with(2, packed)
    small = _as_int4(value, str(value.name))
    value.const_value, value.type = small.const_value, small.type


def _as_int4(value: ir.Value, name: str) -> ir.Value:
    assert value.const_value is not None
    array = np.asarray(value.const_value.numpy()).astype(ml_dtypes.int4)
    tensor = ir.Tensor(array, dtype=ir.DataType.INT4, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.INT4), const_value=tensor)
