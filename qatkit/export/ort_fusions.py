"""Rewrites a graph into the forms that ONNX Runtime's kernels and fusions recognize, at any opset.

ONNX Runtime fuses a GELU only if its factors are in one order. It has an int8 kernel for only one of the operators that
compute a global mean, and its int8 kernels for pools do not round sizes up. After a DequantizeLinear, it runs a SiLU as
one operator only if the file has one node for it. Source: experiments with ONNX Runtime's optimizer, node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from qatkit.export.pads import fold_into_conv, pad_bytes
from qatkit.export.rewrite import MICROSOFT, Rule, ints, length, new_int64, rewrite


def for_onnxruntime(model: ir.Model, opset: int, *, bytes_too: bool = True) -> None:
    """Rewrites a model in place to forms that ONNX Runtime fuses, or for which it has 8-bit kernels.

    Args:
        model: a graph from torch's exporter, changed in place.
        opset: the opset of the file, for the body of the function that a SiLU becomes.
        bytes_too: whether a Pad between a DequantizeLinear and a QuantizeLinear pads bytes instead of float values.
            Runtimes other than ONNX Runtime may not support this.
    """
    rewrite(model.graph, _RULES)
    if bytes_too:
        rewrite(model.graph, {"QuantizeLinear": [pad_bytes]})
    if any(node.domain == MICROSOFT for node in model.graph):
        model.opset_imports[MICROSOFT] = 1
        function = silu_function(opset)
        model.functions[function.identifier()] = function


def _global_pool(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites a ReduceMean over the last two of four axes as GlobalAveragePool, which has an int8 kernel."""
    axes, shape = ints(node.inputs[1]) if len(node.inputs) > 1 else None, node.inputs[0].shape  # type: ignore[union-attr]
    if axes is None or shape is None or len(shape) != 4 or not node.attributes.get_int("keepdims", 1):
        return None
    if sorted(a % 4 for a in axes) != [2, 3]:
        return None
    return builder.op("GlobalAveragePool", [node.inputs[0]])


def _gelu(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Reorders x · (½ · (1 + erf)) to (x · (1 + erf)) · ½, which ONNX Runtime fuses into Gelu."""
    for x, other in (node.inputs, node.inputs[::-1]):
        inner = None if other is None else other.producer()
        if inner is None or inner.op_type != "Mul":
            continue
        half = next((v for v in inner.inputs if v is not None and _is_scalar(v, 0.5)), None)
        total = next((v for v in inner.inputs if v is not half), None)
        if half is None or total is None or not _follows(total, "Add", "Erf"):
            continue
        return builder.op("Mul", [builder.op("Mul", [x, total]), half])
    return None


def _is_scalar(value: ir.Value, number: float) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(-1)[0]) == number


def _follows(value: ir.Value, *op_types: str) -> bool:
    """Returns whether `value` is the output of a chain of operators, given from the last one to the first one."""
    producer = value.producer()
    if producer is None or producer.op_type != op_types[0]:
        return False
    return len(op_types) == 1 or any(v is not None and _follows(v, *op_types[1:]) for v in producer.inputs)


def _silu(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Joins x · sigmoid(x) of a dequantized x into one node.

    ONNX Runtime would give each of the two nodes its own DequantizeLinear, and could not fuse them any more.
    """
    x = next((v for v in node.inputs if v is not None and _follows(v, "DequantizeLinear")), None)
    gate = next((v for v in node.inputs if v is not None and v is not x), None)
    if x is None or gate is None or not _follows(gate, "Sigmoid") or gate.producer().inputs[0] is not x:  # type: ignore[union-attr]
        return None
    return builder.op("QuickGelu", [x], {"alpha": 1.0}, domain=MICROSOFT)


def silu_function(opset: int) -> ir.Function:
    """Returns `QuickGelu` with alpha 1 as a function of standard operators.

    ONNX Runtime has a kernel for QuickGelu; runtimes without one use the function.
    """
    x = ir.Value(name="x")
    gate = ir.Node("", "Sigmoid", [x], outputs=[ir.Value(name="gate")])
    product = ir.Node("", "Mul", [x, gate.outputs[0]], outputs=[ir.Value(name="y")])
    graph = ir.Graph([x], product.outputs, nodes=[gate, product], opset_imports={"": opset})
    alpha = ir.Attr("alpha", ir.AttributeType.FLOAT, None)
    return ir.Function(MICROSOFT, "QuickGelu", graph=graph, attributes=[alpha])


def _whole_windows(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Replaces the ceil_mode of an AveragePool by padding that does not count in the mean, if all sizes are known.

    With ceil_mode, ONNX Runtime's int8 kernel would count the cells that rounding up adds. If the pool counts its own
    padding, and cells are added, its own padding becomes a Pad node.
    """
    x, kernel = node.inputs[0], list(node.attributes.get_ints("kernel_shape", []))
    rank = len(kernel)
    sizes = [length(x, axis - rank) for axis in range(rank)]
    if not node.attributes.get_int("ceil_mode", 0) or None in sizes:
        return None
    pads = list(node.attributes.get_ints("pads", [0] * 2 * rank))
    steps = node.attributes.get_ints("strides", [1] * rank)
    beyond = []
    for size, k, step, before, after in zip(sizes, kernel, steps, pads, pads[rank:], strict=False):
        padded = cast(int, size) + before + after
        windows = -(-(padded - k) // step) + 1
        windows -= (windows - 1) * step >= cast(int, size) + before  # no window may start after the input
        beyond.append(max(0, (windows - 1) * step + k - padded))
    counted = bool(node.attributes.get_int("count_include_pad", 0))
    if counted and any(pads) and any(beyond):
        amounts = [0, 0, *pads[:rank], 0, 0, *pads[rank:]]
        x, pads = builder.op("Pad", [x, new_int64(builder, node, "pads", *amounts)]), [0] * 2 * rank
    attributes: dict[str, Any] = {
        "kernel_shape": kernel, "strides": list(steps), "count_include_pad": int(counted and not any(beyond)),
        "pads": pads[:rank] + [after + more for after, more in zip(pads[rank:], beyond, strict=True)],
    }  # fmt: skip
    return builder.op("AveragePool", [x], attributes)


def _norm_of_rows(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Replaces the barrier (a Sum of one operand) before a LayerNormalization by a Flatten.

    No fusion crosses a Flatten either, and unlike a Sum it copies nothing.
    """
    apart = node.inputs[0].producer() if node.inputs[0] is not None else None
    if apart is None or apart.op_type != "Sum" or len(apart.inputs) > 1 or len(node.outputs) > 1:
        return None
    x = cast(ir.Value, apart.inputs[0])
    axes = [] if x.shape is None else [length(x, i) for i in range(len(x.shape))]
    last = len(axes) - 1
    if last < 2 or axes.count(None) > 1 or node.attributes.get_int("axis", -1) not in (-1, last):
        return None
    flat = builder.op("Flatten", [x], {"axis": last})
    flat.shape, flat.type = (
        ir.Shape([None, axes[last]]),
        x.type,
    )  # the older form of LayerNormalization needs them
    norm = builder.op(
        "LayerNormalization", [flat, *node.inputs[1:]], {**node.attributes, "axis": ir.AttrInt64("axis", 1)}
    )
    sizes = (-1 if size is None else size for size in axes)
    return builder.op("Reshape", [norm, new_int64(builder, node, "shape", *sizes)])


def _per_tensor_axis(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes the axis of a rank-0 scale, which has no meaning."""
    scale = node.inputs[1]
    if scale is not None and scale.shape is not None and len(scale.shape) == 0:
        node.attributes.pop("axis", None)
    return None


def _bias_zero_point(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes the zero_point of an int32 bias, which is 0 by definition; small models become 1 to 2 % smaller."""
    tensor = None if node.inputs[0] is None else ir.convenience.get_const_tensor(node.inputs[0])
    if tensor is not None and tensor.dtype == ir.DataType.INT32:
        node.resize_inputs(2)
    return None


def _padded_max(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Inserts a barrier between a Pad and a MaxPool, since ONNX Runtime before 1.32 fuses them and pads with -inf."""
    x = node.inputs[0]
    before = None if x is None else x.producer()
    if before is None or before.op_type != "Pad" or len(node.outputs) > 1:
        return None
    return builder.op("MaxPool", [builder.op("Sum", [x])], dict(node.attributes))


def _second_pair(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Inserts a barrier between two consecutive QDQ pairs with different scales or zero points.

    They occur if the operator between them does nothing in ONNX. Without the barrier, ONNX Runtime would merge them
    into one pair, whose scale differs from both.
    """
    x, scale, zero_point = node.inputs
    before = None if x is None else x.producer()
    if before is None or before.op_type != "DequantizeLinear" or before.inputs[0] is None:
        return None
    first = before.inputs[0].producer()
    if first is None or first.op_type != "QuantizeLinear" or _same(first.inputs[1:], (scale, zero_point)):
        return None
    return builder.op("QuantizeLinear", [builder.op("Sum", [x]), scale, zero_point], dict(node.attributes))


def _same(some: Sequence[ir.Value | None], others: Sequence[ir.Value | None]) -> bool:
    """Returns whether all values are constants and pairwise equal."""
    tensors = [
        [None if v is None else ir.convenience.get_const_tensor(v) for v in values]
        for values in (some, others)
    ]
    return all(
        a is not None and b is not None and np.array_equal(a.numpy(), b.numpy())
        for a, b in zip(*tensors, strict=True)
    )


_RULES: dict[str, list[Rule]] = {
    "Conv": [fold_into_conv],
    "ReduceMean": [_global_pool],
    "AveragePool": [_whole_windows],
    "MaxPool": [_padded_max],
    "Mul": [_gelu, _silu],
    "LayerNormalization": [_norm_of_rows],
    "QuantizeLinear": [_per_tensor_axis, _second_pair],
    "DequantizeLinear": [_per_tensor_axis, _bias_zero_point],
}
