"""Finds why an operator runs in float, from the Q/DQ pairs around it in the INT8 file.

ONNX Runtime fuses an operator with the DequantizeLinear before it and the QuantizeLinear after it only if the
pattern is exactly right; if not, it gives no warning. These are the rules that it applies on the CPU, in the
order in which they are usually broken. `why_float` and `why_float_other` return the first reason found, as a
text for the user.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qatkit.verify.graph_view import (
    Weight,
    back,
    clip_ops,
    constant,
    conv_ops,
    eight_bit_ops,
    made_by,
    operand,
    quantized_type,
    same_scale_ops,
    shape_ops,
    weight,
    weight_of,
)

_BIAS_ERROR = 0.01
_SIXTEEN = (ir.DataType.INT16, ir.DataType.UINT16)
_FLOAT_BIAS = (
    "its bias is float and its output has no QuantizeLinear; the int8 kernel for this case needs an int32 bias"
    " (backend.bias_dtype=int32)"
)
_BIAS_SCALE = "its bias scale is off from input scale x weight scale by {:.1f} % (1 % allowed)"


def why_float(node: ir.Node, became: str, options: Mapping[str, str]) -> str:
    """Returns why a matrix operator (Conv, Gemm, MatMul) of the INT8 file became a float `became`."""
    found = weight_of(node)
    if found is None:
        return _two_activations(node)
    return (
        _weight_reason(found)
        or _input_reason(node, found)
        or _bias_reason(node, found, became)
        or (_output_reason(node) if node.op_type in conv_ops() else "")
        or _int8_reason(node, options)
        or "its Q/DQ pairs look right, yet ONNX Runtime did not fuse them"
    )


def takes_16_bits(node: ir.Node) -> bool:
    """Returns whether the node reads dequantized tensors and one of them or of its outputs has 16 bits."""
    found = weight_of(node)
    inputs = node.inputs if found is None else node.inputs[:2]  # without the bias (`has_narrow_bias`)
    made = [made_by(value, "DequantizeLinear") for value in inputs]
    before = [one for one in (*made, None if found is None else found.dequantize) if one is not None]
    after = [reader for output in node.outputs for reader in output.consumers()]
    pairs = [*before, *(reader for reader in after if reader.op_type == "QuantizeLinear")]
    return bool(before) and any(quantized_type(pair) in _SIXTEEN for pair in pairs)


def has_narrow_bias(node: ir.Node) -> bool:
    """Returns whether the node's bias is dequantized from 8 or 16 bits."""
    bias = weight(operand(node, 2))
    pair = None if bias is None else bias.dequantize
    return pair is not None and quantized_type(pair) in (*_SIXTEEN, ir.DataType.INT8, ir.DataType.UINT8)


def wrong_bias(node: ir.Node) -> str:
    """Returns what is wrong with the bias of an int8 matrix operator; "" if nothing is.

    The kernel of a Gemm assumes a bias scale of input scale x weight scale, whatever the bias's own scale is.
    So did that of a Conv before ONNX Runtime 1.27; since then a Conv with another bias scale stays in float.
    """
    found, bias = weight_of(node), weight(operand(node, 2))
    if found is None or found.dequantize is None or bias is None or bias.dequantize is None:
        return ""
    if made_by(operand(node, 0), "DequantizeLinear") is None:
        return ""
    error = _bias_scale_error(node, found, bias)
    return _BIAS_SCALE.format(100 * error) if error > _BIAS_ERROR else ""


def why_float_other(node: ir.Node, became: str) -> str:
    """Returns why any other operator of the INT8 file became a float `became`."""
    if became not in eight_bit_ops() | clip_ops():
        return f"ONNX Runtime has no 8-bit {became} on the CPU"
    if _yields_places(node):
        return f"ONNX Runtime has no 8-bit {became} with indices as second output on the CPU"
    inputs = activations(node)
    bare = [value for value in inputs if not _dequantized(value)]
    if bare:
        return "its input has no DequantizeLinear" if len(bare) == len(inputs) else "one input is float"
    output = _output_reason(node)
    if output:
        return output
    if _has_float_constant(node):
        return "one input is a float constant"
    if _pads_with_a_value(node):
        return "it pads with a value other than zero"
    if node.op_type in same_scale_ops() and not _same_scale(node):
        return "input and output have different scales or zero points"
    return "its Q/DQ pairs look right, yet ONNX Runtime did not fuse them"


def surrounded(node: ir.Node) -> bool:
    """Returns whether the file asks for an 8-bit kernel by dequantized activations and quantized outputs.

    It is False for a node that no 8-bit kernel computes: a MaxPool with indices, an elementwise operator or
    Concat with a float constant, or a Pad with a value other than 0.
    """
    inputs = activations(node)
    readers = [reader for output in node.outputs for reader in output.consumers()]
    quantized = bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)
    own = _yields_places(node) or _has_float_constant(node) or _pads_with_a_value(node)
    return quantized and not own and bool(inputs) and all(map(_dequantized, inputs))


def _yields_places(node: ir.Node) -> bool:
    """Returns whether a pool also outputs the indices of its values."""
    return node.op_type == "MaxPool" and len(node.outputs) > 1 and bool(node.outputs[1].consumers())


def _has_float_constant(node: ir.Node) -> bool:
    """Returns whether one of the operands is a constant that no Q/DQ pair quantizes."""
    if node.op_type not in ("Add", "Concat", "Div", "Mul", "Sub"):
        return False
    found = [weight(value) for value in node.inputs if value is not None]
    return any(one is not None and one.dequantize is None for one in found)


def _pads_with_a_value(node: ir.Node) -> bool:
    """Returns whether a Pad inserts a value other than 0."""
    number = operand(node, 2) if node.op_type == "Pad" else None
    value = None if number is None else constant(number)
    return value is not None and bool(np.any(value))


def activations(node: ir.Node) -> list[ir.Value]:
    """Returns the inputs of a node that are neither absent nor constant."""
    return [value for value in node.inputs if value is not None and weight(value) is None]


def _dequantized(value: ir.Value | None) -> bool:
    return made_by(value, "DequantizeLinear") is not None


def _two_activations(node: ir.Node) -> str:
    if not all(map(_dequantized, node.inputs[:2])):
        return f"activation-by-activation {node.op_type}: kept float by the backend (no Q/DQ on its inputs)"
    return "both activations are dequantized right before it, yet ONNX Runtime did not fuse them"


def _weight_reason(found: Weight) -> str:
    if found.dequantize is None:
        return "its weight is float in the file (no DequantizeLinear)"
    if found.between is not None:
        return f"{found.between.op_type} is between its weight's DequantizeLinear and the operator"
    return ""


def _input_reason(node: ir.Node, found: Weight) -> str:
    value = operand(node, 1 if weight(operand(node, 0)) == found else 0)
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "DequantizeLinear":
        via = f" (it comes from {maker.op_type} '{maker.name}')" if maker is not None else ""
        return f"its input has no DequantizeLinear{via}"
    kind = quantized_type(maker)
    if kind not in (ir.DataType.UINT8, ir.DataType.INT8):
        name = (kind or ir.DataType.UNDEFINED).name.lower()
        return f"its input is quantized to {name}, but the kernels need 8 bits"
    return ""


def _int8_reason(node: ir.Node, options: Mapping[str, str]) -> str:
    """Returns the reason if an input is int8, for which x86 has no kernel; "" if none is or int8 is allowed.

    ONNX Runtime converts such an input to uint8, but only if it has a single reader.
    """
    makers = (made_by(value, "DequantizeLinear") for value in activations(node))
    kinds = [quantized_type(maker) for maker in makers if maker is not None]
    if ir.DataType.INT8 in kinds and options.get("session.qdqisint8allowed") != "1":
        return "its input is int8, but x86 kernels need uint8 activations (session.qdqisint8allowed is off)"
    return ""


def _bias_reason(node: ir.Node, found: Weight, became: str) -> str:
    """Returns why the bias keeps the operator in float; "" if it does not.

    There are three cases: ONNX Runtime merges a MatMul with the float bias of an Add into a Gemm; the bias
    of a Gemm is float and its output is not quantized; the bias of a convolution has a wrong scale.
    """
    after = node.outputs[0].consumers()
    quantized = any(reader.op_type == "QuantizeLinear" for reader in after)
    if node.op_type == "MatMul":
        adds = [reader for reader in after if reader.op_type == "Add"]
        if "Gemm" in became and adds:
            return f"ONNX Runtime merged it with the float bias of Add '{adds[0].name}' into one Gemm"
        return ""
    bias = weight(operand(node, 2))
    if bias is None:
        return ""
    if bias.dequantize is None:
        return "" if quantized or node.op_type in conv_ops() else _FLOAT_BIAS
    error = _bias_scale_error(node, found, bias)
    if node.op_type in conv_ops() and error > _BIAS_ERROR:
        return _BIAS_SCALE.format(100 * error)
    return ""


def _bias_scale_error(node: ir.Node, found: Weight, bias: Weight) -> float:
    """Returns the largest relative deviation of the bias scales from s_x * s_w; 0 if a scale is computed."""
    source = made_by(operand(node, 0), "DequantizeLinear")
    assert source is not None and found.dequantize is not None and bias.dequantize is not None
    scales = [constant(operand(pair, 1)) for pair in (source, found.dequantize, bias.dequantize)]
    if any(scale is None for scale in scales):
        return 0.0
    s_x, s_w, s_b = (np.asarray(scale, np.float64).ravel() for scale in scales)
    return float(np.max(np.abs(s_b / (s_x * s_w) - 1)))


def _output_reason(node: ir.Node) -> str:
    """Returns why an output, directly or through a clip, is not read by exactly one QuantizeLinear alone.

    It is "" if the output is read in this way.
    """
    output = node.outputs[0]
    if len(node.outputs) > 1 and node.op_type == "Split":  # judge the first part that is not quantized
        bare = (one for one in node.outputs if any(r.op_type != "QuantizeLinear" for r in one.consumers()))
        output = next(bare, output)
    readers = output.consumers()
    quantizes = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
    if len(quantizes) > 1:
        return f"{'two' if len(quantizes) == 2 else len(quantizes)} QuantizeLinear on its output"
    others = [reader for reader in readers if reader.op_type != "QuantizeLinear"]
    if quantizes and (others or output.is_graph_output()):
        reader = f"{others[0].op_type} '{others[0].name}'" if others else "the graph's output"
        return f"its output is also read in float by {reader}"
    if quantizes:
        return ""
    if len(others) == 1 and others[0].op_type in clip_ops():
        return _clip_reason(others[0])
    into = f" (it goes to {others[0].op_type} '{others[0].name}')" if others else ""
    return f"its output has no QuantizeLinear{into}"


def _clip_reason(clip: ir.Node) -> str:
    """Returns why a ReLU or a clip between an operator and its QuantizeLinear was not absorbed."""
    readers = clip.outputs[0].consumers()
    quantizes = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
    if len(quantizes) != 1 or len(readers) != 1:
        return f"{clip.op_type} '{clip.name}' after it has {len(quantizes) or 'no'} QuantizeLinear" + (
            " and float readers" if len(readers) > len(quantizes) else ""
        )
    given = operand(quantizes[0], 2)
    zero = np.zeros(()) if given is None else constant(given)
    lowest = -128 if zero is not None and zero.dtype == np.int8 else 0
    if zero is not None and int(zero.max()) != lowest:
        return f"{clip.op_type} before a QuantizeLinear of zero point {int(zero.max())} (must be {lowest})"
    if clip.op_type == "Clip":
        return f"Clip '{clip.name}' does not coincide with the range of the QuantizeLinear after it"
    return ""


def _same_scale(node: ir.Node) -> bool:
    source = made_by(node.inputs[0], "DequantizeLinear")
    target = node.outputs[0].consumers()[0]
    if source is None:  # its first input consists of bytes that no Q/DQ pair produced
        return True
    pairs = zip(source.inputs[1:], target.inputs[1:], strict=False)
    return all(np.array_equal(constant(a), constant(b)) for a, b in pairs)  # type: ignore[arg-type]


def layernorm_blocker(value: ir.Value | None) -> str:
    """Returns why the LayerNorm that reads `value` is not fused.

    The reason is a DequantizeLinear or a Transpose right before it, else that its pattern is unknown.
    """
    passed = ""
    for node in back(value):
        if node.op_type == "DequantizeLinear":
            return f"a DequantizeLinear comes right before it{passed}"
        if node.op_type not in shape_ops():
            break
        passed = passed or f" (after a {node.op_type})"
        if node.op_type == "Transpose":
            return "a Transpose comes right before it"
    return "its pattern was not recognised"
