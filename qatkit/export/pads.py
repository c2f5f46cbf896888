"""Moves zero Pads around an image into the convolution that reads them; makes other Pads act on bytes.

    Pad(x) → Conv                                        Conv with these `pads`, which may be asymmetric
    DequantizeLinear → Pad → QuantizeLinear, one scale   Pad of the bytes, with the zero point instead of zeros

ONNX Runtime makes the first change itself if the padding value is constant. Without the second change, it pads in
float.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import tape

from qatkit.export.rewrite import ints


def fold_into_conv(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Moves a zero Pad of image axes into the Conv that reads it, in place; the Pad stays for its other readers."""
    pad = _producer(node.inputs[0], "Pad")
    amounts = None if pad is None else _amounts(pad)
    if pad is None or amounts is None or not _is_zero(pad) or _mode(pad) != "constant":
        return None
    rank = len(amounts) // 2
    begin, end = amounts[:rank], amounts[rank:]
    spatial = [*begin[2:], *end[2:]]
    if any((*begin[:2], *end[:2])) or min(amounts) < 0:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    own = node.attributes.get_ints("pads", [0] * len(spatial))
    node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, spatial, strict=True)])
    node.replace_input_with(0, pad.inputs[0])
    return None


def pad_bytes(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites DequantizeLinear, Pad and QuantizeLinear as a Pad of the bytes, if scale and zero_point are the same.

    A constant padding value must be zero. 16-bit integers stay, since ONNX Runtime cannot pad them.
    """
    pad = _producer(node.inputs[0], "Pad")
    before = None if pad is None else _producer(pad.inputs[0], "DequantizeLinear")
    if pad is None or before is None or not (_mode(pad) != "constant" or _is_zero(pad)):
        return None
    if not all(_same(a, b) for a, b in zip(node.inputs[1:3], before.inputs[1:3], strict=True)):
        return None
    zero_point = node.inputs[2]
    if zero_point is None or zero_point.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        return None  # ONNX Runtime cannot pad 16-bit integers
    mode, (pads, axes) = _mode(pad), (pad.inputs[1], pad.inputs[3] if len(pad.inputs) > 3 else None)
    value = node.inputs[2] if mode == "constant" else None
    inputs = [before.inputs[0], pads, value, axes]
    while inputs[-1] is None:
        inputs.pop()
    return builder.op("Pad", inputs, {"mode": mode})


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _mode(pad: ir.Node) -> str:
    return pad.attributes.get_string("mode", "constant") or "constant"


def _is_zero(pad: ir.Node) -> bool:
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return value is None or (tensor is not None and not tensor.numpy().any())


def _amounts(pad: ir.Node) -> list[int] | None:
    """Returns the padding of all axes, first at their beginnings, then at their ends; None if it is unknown."""
    amounts, shape = ints(pad.inputs[1]), pad.inputs[0].shape  # type: ignore[union-attr]
    axes = ints(pad.inputs[3]) if len(pad.inputs) > 3 and pad.inputs[3] is not None else None
    if amounts is None or axes is None:
        return amounts
    if shape is None:
        return None
    rank, half = len(shape), len(amounts) // 2
    every = [0] * (2 * rank)
    for i, axis in enumerate(axes):
        every[axis % rank], every[axis % rank + rank] = amounts[i], amounts[i + half]
    return every


def _same(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Returns whether two values are the same tensor, or constants of the same type with equal numbers."""
    if one is other:
        return True
    tensors = [None if v is None else ir.convenience.get_const_tensor(v) for v in (one, other)]
    if tensors[0] is None or tensors[1] is None or tensors[0].dtype != tensors[1].dtype:
        return False
    return bool((tensors[0].numpy() == tensors[1].numpy()).all())
