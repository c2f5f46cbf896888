"""Lowering an opset-18 model to an older opset, operator by operator.

torch's exporter supports opset 18 and up. Each rule below has the opset in which the form that it rewrites became
legal, and applies when a lower one is asked for: at 14 to 17 whatever is legal there stays. What differs in types
only needs no rule. What has neither a rule nor a form in the opset is refused with the lowest that has one.

Source of every difference: the operator changelog of the ONNX specification.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import tape

from qatkit.errors import ConfigError
from qatkit.export.node_names import place
from qatkit.export.rewrite import Rule, ints, new_constant, new_int64, rewrite

IR_VERSION = 8  # the oldest that holds every type used here; ONNX Runtime 1.10 and later read it
_NEWEST = onnx.defs.onnx_opset_version()


class _Newer(Exception):  # noqa: N818  a message on its way to the user
    """What a node does that only its newer form can say."""


def lower(model: ir.Model, opset: int) -> None:
    """Rewrites `model` (opset 18) in place to `opset` 13..17; a model of 18 and up stays as it is.

    Raises:
        ValueError: a node that has no form in `opset`; names it and the lowest opset that has one.
    """
    rules = {
        kind: [_applied(rule, since, opset) for since, rule in forms if opset < since]
        for kind, forms in _RULES.items()
    }
    rewrite(model.graph, rules)
    _refuse_newer(model.graph, opset)
    model.opset_imports[""] = opset
    model.ir_version = IR_VERSION if opset <= 18 else model.ir_version


def _applied(rule: Rule, since: int, opset: int) -> Rule:
    """The rule, whose refusals tell what was asked for and what it takes."""

    def apply(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
        try:
            return rule(node, builder)
        except _Newer as error:
            allowed = f"{place(node)} {error}, which needs opset {since}"
            raise ConfigError("export.opset", opset, allowed) from None

    return apply


def _refuse_newer(graph: ir.Graph, opset: int) -> None:
    for node in graph:
        if node.domain or _known(node, opset):
            continue
        since = next((newer for newer in range(opset + 1, _NEWEST + 1) if _known(node, newer)), None)
        if since is not None:
            allowed = f"{place(node)} has no form there: this {node.op_type} needs opset {since}"
            raise ConfigError("export.opset", opset, allowed)


def _known(node: ir.Node, opset: int) -> bool:
    """Whether the operator has these attributes and as many inputs in `opset`."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    return schema.attributes.keys() >= node.attributes.keys() and len(node.inputs) <= schema.max_input


def _axes_to_attribute(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Reduce*(x, axes) → Reduce*(x) with the attribute (ReduceSum has the input since 13)."""
    given = len(node.inputs) > 1 and node.inputs[1] is not None
    axes = ints(node.inputs[1]) if given else []
    if axes is None:
        raise _Newer("reduces over axes that are not constant")
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
    small = np.array(node.attributes.get_float("epsilon", 1e-5), np.float32)
    epsilon = new_constant(builder, node, "epsilon", small)
    two = new_constant(builder, node, "two", np.array(2.0, np.float32))
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
        raise _Newer("splits an axis of unknown length")
    each = -(-length // parts)
    sizes = [each] * (parts - 1) + [length - each * (parts - 1)]
    node.resize_inputs(2)
    node.replace_input_with(1, new_int64(builder, node, "sizes", *sizes))
    return None


def _pad(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Pad(axes) → Pad with zeros for the axes that were not named."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    axes, pads = ints(node.inputs[3]), ints(node.inputs[1])
    shape = node.inputs[0].shape  # type: ignore[union-attr]
    if axes is None or pads is None or shape is None:
        raise _Newer("pads by amounts that are not constant")
    full = [0] * (2 * len(shape))
    for i, axis in enumerate(axes):
        full[axis % len(shape)] = pads[i]
        full[axis % len(shape) + len(shape)] = pads[i + len(axes)]
    node.replace_input_with(1, new_int64(builder, node, "pads", *full))
    node.resize_inputs(3)
    return None


def _extreme_scatter(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if (kind := node.attributes.get_string("reduction", "none")) in ("max", "min"):
        raise _Newer(f"takes the {kind} while it scatters")
    return None


def _scatter(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if node.attributes.get_string("reduction", "none") != "none":
        raise _Newer("reduces while it scatters")
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
    starts, ends = new_int64(builder, node, "start", start), new_int64(builder, node, "end", int(last))
    return builder.op("Slice", [whole, starts, ends])


def _reshape(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Without a zero in the shape, allowzero means nothing."""
    shape = ints(node.inputs[1])
    if node.attributes.get_int("allowzero", 0) and shape is not None and 0 in shape:
        raise _Newer("reshapes to an empty tensor")
    node.attributes.pop("allowzero", None)
    return None


def _batch_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    node.attributes.pop("training_mode", None)
    return None


def _resize(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Attributes at their defaults are dropped; antialias has no older form."""
    if node.attributes.get_int("antialias", 0):
        raise _Newer("resizes with antialias")
    node.attributes.pop("antialias", None)
    node.attributes.pop("keep_aspect_ratio_policy", None)
    return None


# Operator → rules, each behind the opset since which the form that it rewrites is legal; of several, the newest
# form comes first, so that a refusal names the opset that can.
_RULES: dict[str, list[tuple[int, Rule]]] = {
    **{
        f"Reduce{kind}": [(18, _axes_to_attribute)]
        for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    "LayerNormalization": [(17, _layer_norm)],
    "HardSwish": [(14, _hard_swish)],
    "Split": [(18, _split)],
    "Pad": [(18, _pad)],
    "ScatterND": [(18, _extreme_scatter), (16, _scatter)],
    "ScatterElements": [(18, _extreme_scatter), (16, _scatter)],
    "Shape": [(15, _shape)],
    "Reshape": [(14, _reshape)],
    "BatchNormalization": [(14, _batch_norm)],
    "Resize": [(18, _resize)],
}
