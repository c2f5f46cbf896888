"""Rewrites newer forms of operators as older forms, with attributes instead of inputs and without new attributes.

Each rule is stored with the opset that introduced the form that it rewrites (`lower_opset`). A rule raises `Newer` if
the older form cannot express the node.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from qatkit.export.rewrite import MICROSOFT, Rule, given, ints, length, new_constant, new_int64


class Newer(Exception):  # noqa: N818  it carries a message
    """Raised if only the newer form of an operator can express a node; the message is a verb phrase with the reason."""


def _axes_to_attribute(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites Reduce*(x, axes) as Reduce*(x) with the attribute axes (not ReduceSum, which has the input since 13)."""
    axes = [] if given(node, 1) is None else ints(node.inputs[1])
    if axes is None:
        raise Newer("reduces over axes that are not constant")
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        return builder.op("Identity", [node.inputs[0]])
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    return None


def _split(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites Split(num_outputs) as Split with the sizes of the parts as an input."""
    if given(node, 1) is not None:
        return None
    parts = node.attributes.pop("num_outputs").as_int()
    whole = length(node.inputs[0], node.attributes.get_int("axis", 0))
    if whole is None:
        raise Newer("splits an axis of unknown length")
    each = -(-whole // parts)
    sizes = [each] * (parts - 1) + [whole - each * (parts - 1)]
    node.resize_inputs(2)
    node.replace_input_with(1, new_int64(builder, node, "sizes", *sizes))
    return None


def _pad(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites Pad(axes) as Pad of all axes, with zeros for the other axes; a Gather arranges computed amounts."""
    if given(node, 3) is None:
        return None
    axes, pads, shape = ints(node.inputs[3]), ints(node.inputs[1]), node.inputs[0].shape  # type: ignore[union-attr]
    if axes is None:
        raise Newer("pads axes that are not constant")
    if shape is None:
        raise Newer("pads some axes of a tensor of unknown rank")
    places = [2 * len(axes)] * (2 * len(shape))  # the index of the zero, which follows the amounts
    for i, axis in enumerate(axes):
        places[axis % len(shape)] = i
        places[axis % len(shape) + len(shape)] = i + len(axes)
    if pads is None:
        with_zero = builder.op("Concat", [node.inputs[1], new_int64(builder, node, "zero", 0)], {"axis": 0})
        full = builder.op("Gather", [with_zero, new_int64(builder, node, "places", *places)])
        attributes = {"mode": node.attributes.get_string("mode", "constant")}
        return builder.op("Pad", [node.inputs[0], full, node.inputs[2]], attributes)
    amounts = [*pads, 0]
    node.replace_input_with(1, new_int64(builder, node, "pads", *(amounts[place] for place in places)))
    node.resize_inputs(3)
    return None


def _extreme_scatter(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if (kind := node.attributes.get_string("reduction", "none")) in ("max", "min"):
        raise Newer(f"takes the {kind} while it scatters")
    return None


def _scatter(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if node.attributes.get_string("reduction", "none") != "none":
        raise Newer("reduces while it scatters")
    node.attributes.pop("reduction", None)
    return None


def _shape(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites Shape(start, end) as a Slice of Shape."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get("end")
    if start == 0 and end is None:
        node.attributes.pop("start", None)
        return None
    whole = builder.op("Shape", [node.inputs[0]])
    last = np.iinfo(np.int64).max if end is None else end.as_int()
    starts, ends = new_int64(builder, node, "start", start), new_int64(builder, node, "end", int(last))
    return builder.op("Slice", [whole, starts, ends])


def _reshape(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes allowzero, which matters only if the shape has a zero; computed shapes are assumed to have none."""
    wanted = ints(node.inputs[1])
    if node.attributes.get_int("allowzero", 0) and wanted is not None and 0 in wanted:
        raise Newer("reshapes to an empty tensor")
    node.attributes.pop("allowzero", None)
    return None


def _batch_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    if node.attributes.get_int("training_mode", 0):
        raise Newer("normalizes with statistics of the batch")
    node.attributes.pop("training_mode", None)
    return None


def _resize(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes the newer attributes of Resize, and extends scales or sizes to all axes.

    There is no older form with antialias, or one that keeps the aspect ratio.
    """
    if node.attributes.get_int("antialias", 0):
        raise Newer("resizes with antialias")
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Newer("resizes and keeps the aspect ratio")
    if "axes" in node.attributes:
        _resize_all_axes(node, builder)
    for attribute in ("antialias", "keep_aspect_ratio_policy", "axes"):
        node.attributes.pop(attribute, None)
    return None


def _resize_all_axes(node: ir.Node, builder: tape.Tape) -> None:
    axes, whole = node.attributes["axes"].as_ints(), node.inputs[0].shape  # type: ignore[union-attr]
    index = 2 if given(node, 2) is not None else 3
    tensor = ir.convenience.get_const_tensor(node.inputs[index])  # type: ignore[arg-type]
    if whole is None or tensor is None or given(node, 1) is not None:
        raise Newer("resizes some axes by amounts that are not constant")
    full = [1.0 if index == 2 else length(node.inputs[0], axis) for axis in range(len(whole))]
    for axis, amount in zip(axes, tensor.numpy(), strict=True):
        full[axis] = amount
    if None in full:
        raise Newer("resizes a tensor that also has an axis of unknown length")
    array = np.array(full, tensor.numpy().dtype)
    node.replace_input_with(index, new_constant(builder, node, "sizes" if index == 3 else "scales", array))


def _recurrent(node: ir.Node, builder: tape.Tape) -> list[ir.Value] | None:
    """Rewrites LSTM, GRU and RNN from batch-first to steps-first layout, between Transposes."""
    if node.attributes.get_int("layout", 0) == 0:
        node.attributes.pop("layout", None)
        return None
    states = [given(node, i) for i in (5, 6)]
    inputs = [builder.op("Transpose", [node.inputs[0]], {"perm": [1, 0, 2]}), *node.inputs[1:]]
    for i, state in enumerate(states, 5):
        if state is not None:
            inputs[i] = builder.op("Transpose", [state], {"perm": [1, 0, 2]})
    attributes = {name: value for name, value in node.attributes.items() if name != "layout"}
    results = builder.op_multi_out(node.op_type, inputs, attributes, num_outputs=len(node.outputs))
    orders = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
    pairs = zip(results, orders, strict=False)
    return [builder.op("Transpose", [value], {"perm": order}) for value, order in pairs]


def _pool_of_powers(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes ceil_mode and dilations of LpPool if they have their default values; others have no older form."""
    if not node.attributes.get_int("ceil_mode", 0):
        node.attributes.pop("ceil_mode", None)
    if all(step == 1 for step in node.attributes.get_ints("dilations", [])):
        node.attributes.pop("dilations", None)
    return None


def _regions(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Removes the coordinate mode of a RoiAlign; before opset 16, there is only the mode output_half_pixel."""
    if node.attributes.get_string("coordinate_transformation_mode", "half_pixel") != "output_half_pixel":
        raise Newer("aligns regions to pixel centres")
    node.attributes.pop("coordinate_transformation_mode")
    return None


def _sampled_volume(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Raises `Newer` for a GridSample of volumes, which needs opset 20 (images need opset 16)."""
    whole = node.inputs[0].shape  # type: ignore[union-attr]
    if whole is not None and len(whole) != 4:
        raise Newer("samples volumes")
    return None


def _sixteen_bits(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites 16-bit QuantizeLinear and DequantizeLinear as operators of com.microsoft, which work at any opset."""
    zero_point = given(node, 2)
    if node.domain or zero_point is None or zero_point.dtype not in (ir.DataType.INT16, ir.DataType.UINT16):
        return None
    node.domain = MICROSOFT
    return None


# The rules by operator, each with the opset that introduced the form that it rewrites. The newest form comes first, so
# that an error names an opset that can express the node.
FORMS: dict[str, list[tuple[int, Rule]]] = {
    **{
        f"Reduce{kind}": [(18, _axes_to_attribute)]
        for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    **{kind: [(14, _recurrent)] for kind in ("LSTM", "GRU", "RNN")},
    "Split": [(18, _split)],
    "Pad": [(18, _pad)],
    "ScatterND": [(18, _extreme_scatter), (16, _scatter)],
    "ScatterElements": [(18, _extreme_scatter), (16, _scatter)],
    "Shape": [(15, _shape)],
    "Reshape": [(14, _reshape)],
    "BatchNormalization": [(14, _batch_norm)],
    "Resize": [(18, _resize)],
    "LpPool": [(18, _pool_of_powers)],
    "RoiAlign": [(16, _regions)],
    "GridSample": [(20, _sampled_volume)],
    **{kind: [(21, _sixteen_bits)] for kind in ("QuantizeLinear", "DequantizeLinear")},
}
