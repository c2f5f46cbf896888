"""Lowers the integers of convolution weights by 1 and sets zero_point -1, so that ONNX Runtime uses other kernels.

    DequantizeLinear(w, scale, 0) ──> DequantizeLinear(w - 1, scale, -1)

ONNX Runtime's int8 convolution kernel, which does not use AMX, requires weights with zero_point 0. Other convolutions
run as im2col and a GEMM, which uses AMX if the CPU has it (docs/onnxruntime-qdq.md, 3b). The integer sums and the
outputs are the same bit for bit.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_LOWEST = -128  # the lowest int8 value


def shift_weights(model: ir.Model) -> int:
    """Shifts, in place, each int8 weight that only convolutions without groups read.

    A weight that contains -128 is not changed. Depthwise and grouped convolutions are not changed either, because their
    GEMMs are too small to benefit from AMX.

    Returns:
        The number of shifted weights.
    """
    graph = model.graph
    found = [value for value in graph.initializers.values() if _can_shift(value)]
    for value in found:
        assert value.const_value is not None
        array = value.const_value.numpy()
        value.const_value = ir.tensor(array - np.int8(1), name=value.name)
        for node, _ in list(value.uses()):
            zero = node.inputs[2]
            assert zero is not None and zero.const_value is not None
            name = f"{value.name}_zero_point"
            while name in graph.initializers:
                name += "_"
            tensor = ir.Tensor(np.full(zero.const_value.numpy().shape, -1, np.int8), name=name)
            shifted = ir.Value(name=name, shape=tensor.shape, type=value.type, const_value=tensor)
            graph.register_initializer(shifted)
            node.replace_input_with(2, shifted)
    return len(found)


def _can_shift(value: ir.Value) -> bool:
    if value.dtype != ir.DataType.INT8 or value.const_value is None or value.is_graph_output():
        return False
    uses = list(value.uses())
    if not uses or not all(_is_weight(node, index) for node, index in uses):
        return False
    return int(value.const_value.numpy().min()) > _LOWEST


def _is_weight(node: ir.Node, index: int) -> bool:
    """Returns whether an input is the weight of convolutions without groups, dequantized with zero_point 0."""
    if node.op_type != "DequantizeLinear" or index != 0 or len(node.inputs) < 3:
        return False
    zero = node.inputs[2]
    if zero is None or zero.const_value is None or zero.const_value.numpy().any():
        return False
    readers = list(node.outputs[0].uses())
    return bool(readers) and all(
        reader.op_type == "Conv" and place == 1 and _groups(reader) == 1 for reader, place in readers
    )


def _groups(node: ir.Node) -> int:
    found = node.attributes.get("group")
    return 1 if found is None else found.as_int()
