"""Lowering an opset-18 model to opset 13, and the rewrites that ONNX Runtime's kernels and fusions want.

torch's exporter supports opset 18 and up. Each rule below looks at one node of the opset-18 graph and
changes it in place, or builds its replacement. What differs in types only needs no rule. Anything that has
no rule and no opset-13 form is refused by `onnx.checker` afterwards, with the node's name.

Source of every difference: the operator changelog of the ONNX specification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

Rule = Callable[[ir.Node, tape.Tape], "ir.Value | None"]
MICROSOFT = "com.microsoft"
IR_VERSION = 8  # the oldest that holds every type used here; ONNX Runtime 1.10 and later read it


def lower(model: ir.Model, opset: int) -> None:
    """Rewrites `model` (opset 18) in place to `opset` 13..17; for 18 and up only ONNX Runtime's rewrites apply.

    Returned values of rules replace the node's single output; None means "changed in place, or nothing to do".
    """
    graph = model.graph
    for node in list(graph):
        for rule in _RUNTIME_RULES.get(node.op_type, []) + (
            _RULES.get(node.op_type, []) if opset < 18 else []
        ):
            builder = tape.Tape()
            new = rule(node, builder)
            for value in builder.initializers:
                graph.register_initializer(value)
            if new is not None:
                old = node.outputs[0]
                new.name, new.shape, new.type = old.name, old.shape, old.type
                scopes = node.metadata_props
                for created in builder.nodes:
                    created.metadata_props.update(scopes)
                ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, [old], [new])
                break
    model.opset_imports[""] = opset
    if any(node.domain == MICROSOFT for node in graph):
        model.opset_imports[MICROSOFT] = 1
        function = silu_function(opset)
        model.functions[function.identifier()] = function
    model.ir_version = IR_VERSION if opset <= 18 else model.ir_version


def constant(builder: tape.Tape, name: str, array: np.ndarray) -> ir.Value:
    """An initializer."""
    return builder.initializer(ir.tensor(array, name=name), name=name)


def _name(node: ir.Node, what: str) -> str:
    return f"{node.outputs[0].name}/{what}"


def _int64(builder: tape.Tape, node: ir.Node, what: str, *values: int) -> ir.Value:
    return constant(builder, _name(node, what), np.array(values, np.int64))


def _ints(value: ir.Value | None) -> list[int] | None:
    """Contents of a constant integer input."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(v) for v in tensor.numpy().reshape(-1)]


def _global_pool(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """ReduceMean over the last two of four axes → GlobalAveragePool, which has an int8 kernel."""
    axes, shape = _ints(node.inputs[1]) if len(node.inputs) > 1 else None, node.inputs[0].shape  # type: ignore[union-attr]
    if axes is None or shape is None or len(shape) != 4 or not node.attributes.get_int("keepdims", 1):
        return None
    if sorted(a % 4 for a in axes) != [2, 3]:
        return None
    return builder.op("GlobalAveragePool", [node.inputs[0]])


def _gelu(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """X · (½ · (1 + erf)) → (x · (1 + erf)) · ½, the order that ONNX Runtime fuses into Gelu."""
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
    """Whether `value` comes out of this chain of operators, the last one first."""
    producer = value.producer()
    if producer is None or producer.op_type != op_types[0]:
        return False
    return len(op_types) == 1 or any(v is not None and _follows(v, *op_types[1:]) for v in producer.inputs)


def _silu(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """X · sigmoid(x) of a dequantized x → one node. As two, ONNX Runtime would give each a DequantizeLinear of
    its own and not fuse them any more.
    """
    x = next((v for v in node.inputs if v is not None and _follows(v, "DequantizeLinear")), None)
    gate = next((v for v in node.inputs if v is not None and v is not x), None)
    if x is None or gate is None or not _follows(gate, "Sigmoid") or gate.producer().inputs[0] is not x:  # type: ignore[union-attr]
        return None
    return builder.op("QuickGelu", [x], {"alpha": 1.0}, domain=MICROSOFT)


def silu_function(opset: int) -> ir.Function:
    """What `QuickGelu` with alpha 1 is, in standard operators: a runtime that has no kernel of that name (ONNX
    Runtime has one) reads this.
    """
    x = ir.Value(name="x")
    gate = ir.Node("", "Sigmoid", [x], outputs=[ir.Value(name="gate")])
    product = ir.Node("", "Mul", [x, gate.outputs[0]], outputs=[ir.Value(name="y")])
    graph = ir.Graph([x], product.outputs, nodes=[gate, product], opset_imports={"": opset})
    alpha = ir.Attr("alpha", ir.AttributeType.FLOAT, None)
    return ir.Function(MICROSOFT, "QuickGelu", graph=graph, attributes=[alpha])


def _per_tensor_axis(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """The axis of a rank-0 scale means nothing; left out, nobody wonders."""
    scale = node.inputs[1]
    if scale is not None and scale.shape is not None and len(scale.shape) == 0:
        node.attributes.pop("axis", None)
    return None


def _bias_zero_point(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """The zero point of an int32 bias is 0 by definition: left out, a small model shrinks by 1 or 2 %."""
    tensor = None if node.inputs[0] is None else ir.convenience.get_const_tensor(node.inputs[0])
    if tensor is not None and tensor.dtype == ir.DataType.INT32:
        node.resize_inputs(2)
    return None


def _axes_to_attribute(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Reduce*(x, axes) → Reduce*(x) with the attribute (ReduceSum has the input since 13)."""
    given = len(node.inputs) > 1 and node.inputs[1] is not None
    axes = _ints(node.inputs[1]) if given else []
    if axes is None:
        raise ValueError(f"export.opset=13: {node.name} reduces over axes that are not constant")
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        return builder.op("Identity", [node.inputs[0]])
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    return None


def _layer_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """LayerNormalization → ((x - mean) / sqrt(mean((x - mean)²) + ε))·γ + β, the form that ONNX Runtime fuses."""
    x, gamma = node.inputs[0], node.inputs[1]
    beta = node.inputs[2] if len(node.inputs) > 2 else None
    assert x is not None and x.shape is not None
    axis = node.attributes.get_int("axis", -1)
    axes: dict[str, Any] = {
        "axes": [a - len(x.shape) for a in range(axis % len(x.shape), len(x.shape))],
        "keepdims": 1,
    }
    epsilon = constant(
        builder, _name(node, "epsilon"), np.array(node.attributes.get_float("epsilon", 1e-5), np.float32)
    )
    two = constant(builder, _name(node, "two"), np.array(2.0, np.float32))
    centred = builder.op("Sub", [x, builder.op("ReduceMean", [x], axes)])
    variance = builder.op("ReduceMean", [builder.op("Pow", [centred, two])], axes)
    deviation = builder.op("Sqrt", [builder.op("Add", [variance, epsilon])])
    result = builder.op("Mul", [builder.op("Div", [centred, deviation]), gamma])
    return result if beta is None else builder.op("Add", [result, beta])


def _hard_swish(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """HardSwish → x · HardSigmoid(x) with alpha 1/6, beta 1/2."""
    x = node.inputs[0]
    return builder.op("Mul", [x, builder.op("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})])


def _split(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Split(num_outputs) → Split with the sizes as input."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return None
    axis = node.attributes.get_int("axis", 0)
    shape = node.inputs[0].shape  # type: ignore[union-attr]
    parts = node.attributes.pop("num_outputs").as_int()
    length = None if shape is None else shape[axis]
    if not isinstance(length, int):
        raise ValueError(f"export.opset=13: {node.name} splits an axis of unknown length")
    each = -(-length // parts)
    sizes = [each] * (parts - 1) + [length - each * (parts - 1)]
    node.resize_inputs(2)
    node.replace_input_with(1, _int64(builder, node, "sizes", *sizes))
    return None


def _pad(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Pad(axes) → Pad with zeros for the axes that were not named."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    axes, pads = _ints(node.inputs[3]), _ints(node.inputs[1])
    shape = node.inputs[0].shape  # type: ignore[union-attr]
    if axes is None or pads is None or shape is None:
        raise ValueError(f"export.opset=13: {node.name} pads by amounts that are not constant")
    full = [0] * (2 * len(shape))
    for i, axis in enumerate(axes):
        full[axis % len(shape)] = pads[i]
        full[axis % len(shape) + len(shape)] = pads[i + len(axes)]
    node.replace_input_with(1, _int64(builder, node, "pads", *full))
    node.resize_inputs(3)
    return None


def _scatter(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if node.attributes.get_string("reduction", "none") != "none":
        raise ValueError(f"export.opset=13: {node.name} reduces while it scatters, which opset 13 can't")
    node.attributes.pop("reduction", None)
    return None


def _shape(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Shape(start, end) → Slice of Shape."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get("end")
    if start == 0 and end is None:
        node.attributes.pop("start", None)
        return None
    whole = builder.op("Shape", [node.inputs[0]])
    last = np.iinfo(np.int64).max if end is None else end.as_int()
    starts, ends = _int64(builder, node, "start", start), _int64(builder, node, "end", int(last))
    return builder.op("Slice", [whole, starts, ends])


def _reshape(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Allowzero came with opset 14; without a zero in the shape it means nothing."""
    shape = _ints(node.inputs[1])
    if node.attributes.get_int("allowzero", 0) and shape is not None and 0 in shape:
        raise ValueError(f"export.opset=13: {node.name} reshapes to an empty tensor")
    node.attributes.pop("allowzero", None)
    return None


def _batch_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    node.attributes.pop("training_mode", None)
    return None


def _resize(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Attributes of opset 18 at their defaults are dropped; antialias has no form in opset 13."""
    if node.attributes.get_int("antialias", 0):
        raise ValueError(f"export.opset=13: {node.name} resizes with antialias, which opset 13 can't")
    node.attributes.pop("antialias", None)
    node.attributes.pop("keep_aspect_ratio_policy", None)
    return None


_RUNTIME_RULES: dict[str, list[Rule]] = {
    "ReduceMean": [_global_pool],
    "Mul": [_gelu, _silu],
    "QuantizeLinear": [_per_tensor_axis],
    "DequantizeLinear": [_per_tensor_axis, _bias_zero_point],
}
_RULES: dict[str, list[Rule]] = {
    **{
        f"Reduce{kind}": [_axes_to_attribute]
        for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    "LayerNormalization": [_layer_norm],
    "HardSwish": [_hard_swish],
    "Split": [_split],
    "Pad": [_pad],
    "ScatterND": [_scatter],
    "ScatterElements": [_scatter],
    "Shape": [_shape],
    "Reshape": [_reshape],
    "BatchNormalization": [_batch_norm],
    "Resize": [_resize],
}
