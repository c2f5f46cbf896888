"""Why an operator runs in float, read off the Q/DQ pairs around it in the INT8 file.

ONNX Runtime fuses an operator with the DequantizeLinear before and the QuantizeLinear after it only when the
pattern is exactly right, and says nothing when it isn't. These are the rules it applies on the CPU, in the
order in which they are usually broken; each returns the first reason found, in the user's words.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from qatkit.verify.graph_view import CONV_OPS, SHAPE_OPS, GraphView, Weight

# Operators other than Conv/Gemm/MatMul with an 8-bit kernel on the CPU when Q/DQ stand around them.
# The first set requantizes; the second passes values through, so that scale and zero point must be the same
# on both sides.
_REQUANTIZING_OPS = frozenset(
    {
        "Add",
        "Mul",
        "AveragePool",
        "GlobalAveragePool",
        "Sigmoid",
        "LeakyRelu",
        "Softmax",
        "Concat",
        "Where",
    }
)
_SAME_SCALE_OPS = frozenset(
    {
        "MaxPool",
        "ReduceMax",
        "ReduceMin",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Split",
        "Gather",
        "Expand",
        "Tile",
        "Flatten",
        "DepthToSpace",
    }
)
EIGHT_BIT_OPS = _REQUANTIZING_OPS | _SAME_SCALE_OPS
_CLIPS = ("Relu", "Clip")


def why_float(view: GraphView, node: onnx.NodeProto, became: str, options: Mapping[str, str]) -> str:
    """The reason why a matrix operator (Conv, Gemm, MatMul) of the INT8 file runs in float, as a `became`."""
    weight = view.weight_of(node)
    if weight is None:
        return _two_activations(view, node)
    return (
        _weight_reason(weight)
        or _input_reason(view, node, weight)
        or _bias_reason(view, node, weight, became)
        or (_output_reason(view, node) if node.op_type in CONV_OPS else "")
        or _int8_reason(view, node, options)
        or "its Q/DQ pairs look right, yet ONNX Runtime did not fuse them"
    )


def why_float_other(view: GraphView, node: onnx.NodeProto, became: str) -> str:
    """The reason why any other operator of the INT8 file runs in float, as a `became`."""
    if became not in EIGHT_BIT_OPS | set(_CLIPS):
        return f"ONNX Runtime has no 8-bit {became} on the CPU"
    inputs = activations(view, node)
    bare = [name for name in inputs if not _dequantized(view, name)]
    if bare:
        return "its input has no DequantizeLinear" if len(bare) == len(inputs) else "one input is float"
    output = _output_reason(view, node)
    if output:
        return output
    if node.op_type in _SAME_SCALE_OPS and not _same_scale(view, node):
        return "input and output have different scales or zero points"
    return "its Q/DQ pairs look right, yet ONNX Runtime did not fuse them"


def surrounded(view: GraphView, node: onnx.NodeProto) -> bool:
    """True when the file asks for an 8-bit kernel: every activation dequantized, the output quantized."""
    names = activations(view, node)
    readers = view.consumers.get(node.output[0], [])
    quantized = bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)
    return quantized and bool(names) and all(_dequantized(view, name) for name in names)


def activations(view: GraphView, node: onnx.NodeProto) -> list[str]:
    """The inputs of a node that are neither absent nor constant."""
    return [name for name in node.input if name and view.weight(name) is None]


def _dequantized(view: GraphView, tensor: str) -> bool:
    producer = view.producer.get(tensor)
    return producer is not None and producer.op_type == "DequantizeLinear"


def _two_activations(view: GraphView, node: onnx.NodeProto) -> str:
    bare = [name for name in node.input[:2] if not _dequantized(view, name)]
    if bare:
        return f"activation-by-activation {node.op_type}: kept float by the backend (no Q/DQ on its inputs)"
    return "both activations are dequantized right before it, yet ONNX Runtime did not fuse them"


def _weight_reason(weight: Weight) -> str:
    if weight.dequantize is None:
        return "its weight is float in the file (no DequantizeLinear)"
    if weight.between is not None:
        return f"a {weight.between.op_type} stands between its weight's DequantizeLinear and it"
    return ""


def _input_reason(view: GraphView, node: onnx.NodeProto, weight: Weight) -> str:
    index = 1 if view.weight(node.input[0]) == weight else 0
    dequantize = view.producer.get(node.input[index])
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        via = f" (it comes from {dequantize.op_type} '{dequantize.name}')" if dequantize is not None else ""
        return f"its input has no DequantizeLinear{via}"
    kind = view.element_type(dequantize.input[2]) if len(dequantize.input) > 2 else TensorProto.UINT8
    if kind not in (TensorProto.UINT8, TensorProto.INT8):
        return f"its input is quantized to {TensorProto.DataType.Name(kind).lower()}: 8-bit kernels only"
    return ""


def _int8_reason(view: GraphView, node: onnx.NodeProto, options: Mapping[str, str]) -> str:
    """int8 activations on x86: an int8 QuantizeLinear is only turned into uint8 when it has one reader."""
    kinds = [view.element_type(view.producer[name].input[2]) for name in activations(view, node)]
    if TensorProto.INT8 in kinds and options.get("session.qdqisint8allowed") != "1":
        return "its input is int8: x86 kernels take uint8 activations (session.qdqisint8allowed is off)"
    return ""


def _bias_reason(view: GraphView, node: onnx.NodeProto, weight: Weight, became: str) -> str:
    """A float bias without an output Q, or (Conv) an int32 bias at another scale than input × weight."""
    after = view.consumers.get(node.output[0], [])
    quantized = any(reader.op_type == "QuantizeLinear" for reader in after)
    if node.op_type == "MatMul":
        adds = [reader for reader in after if reader.op_type == "Add"]
        if "Gemm" in became and adds:
            return f"ONNX Runtime merged it with the float bias of Add '{adds[0].name}' into one Gemm"
        return ""
    bias = view.weight(node.input[2]) if len(node.input) > 2 else None
    if bias is None:
        return ""
    if bias.dequantize is None:
        return "" if quantized or node.op_type in CONV_OPS else "float bias and no output QuantizeLinear"
    error = _bias_scale_error(view, node, weight, bias)
    if node.op_type in CONV_OPS and error > 0.01:
        return f"its bias scale is off from input scale x weight scale by {100 * error:.1f} % (1 % allowed)"
    return ""


def _bias_scale_error(view: GraphView, node: onnx.NodeProto, weight: Weight, bias: Weight) -> float:
    """Largest relative distance of the bias scales from s_x * s_w (0 when a scale is not constant)."""
    source = view.producer[node.input[0]]
    assert weight.dequantize is not None
    assert bias.dequantize is not None
    scales = [view.constant(reader.input[1]) for reader in (source, weight.dequantize, bias.dequantize)]
    if any(scale is None for scale in scales):
        return 0.0
    s_x, s_w, s_b = (np.asarray(scale, np.float64).ravel() for scale in scales)
    return float(np.max(np.abs(s_b / (s_x * s_w) - 1)))


def _output_reason(view: GraphView, node: onnx.NodeProto) -> str:
    """What stands between an operator and the one QuantizeLinear that it needs."""
    output = node.output[0]
    readers = view.consumers.get(output, [])
    quantizes = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
    if len(quantizes) > 1:
        return f"{'two' if len(quantizes) == 2 else len(quantizes)} QuantizeLinear on its output"
    others = [reader for reader in readers if reader.op_type != "QuantizeLinear"]
    if quantizes and (others or output in view.outputs):
        reader = f"{others[0].op_type} '{others[0].name}'" if others else "the graph's output"
        return f"its output is also read in float by {reader}"
    if quantizes:
        return ""
    if len(others) == 1 and others[0].op_type in _CLIPS:
        return _clip_reason(view, others[0])
    into = f" (it goes to {others[0].op_type} '{others[0].name}')" if others else ""
    return f"its output has no QuantizeLinear{into}"


def _clip_reason(view: GraphView, clip: onnx.NodeProto) -> str:
    """Why a ReLU or a clip between an operator and its QuantizeLinear was not absorbed."""
    readers = view.consumers.get(clip.output[0], [])
    quantizes = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
    if len(quantizes) != 1 or len(readers) != 1:
        return f"{clip.op_type} '{clip.name}' after it has {len(quantizes) or 'no'} QuantizeLinear" + (
            " and float readers" if len(readers) > len(quantizes) else ""
        )
    zero = view.constant(quantizes[0].input[2]) if len(quantizes[0].input) > 2 else np.zeros(())
    lowest = -128 if zero is not None and zero.dtype == np.int8 else 0
    if zero is not None and int(zero.max()) != lowest:
        return f"{clip.op_type} before a QuantizeLinear of zero point {int(zero.max())} (must be {lowest})"
    if clip.op_type == "Clip":
        return f"Clip '{clip.name}' does not coincide with the range of the QuantizeLinear after it"
    return ""


def _same_scale(view: GraphView, node: onnx.NodeProto) -> bool:
    source = view.producer[node.input[0]]
    target = view.consumers[node.output[0]][0]
    pairs = zip(list(source.input)[1:], list(target.input)[1:], strict=False)
    return all(np.array_equal(view.constant(a), view.constant(b)) for a, b in pairs)  # type: ignore[arg-type]


def layernorm_blocker(view: GraphView, tensor: str) -> str:
    """What stands before an unfused LayerNorm: a DequantizeLinear, a Transpose."""
    passed = ""
    for node in view.back(tensor):
        if node.op_type == "DequantizeLinear":
            return f"a DequantizeLinear stands right before it{passed}"
        if node.op_type not in SHAPE_OPS:
            break
        passed = passed or f" (behind a {node.op_type})"
        if node.op_type == "Transpose":
            return "a Transpose stands right before it"
    return "its pattern was not recognised"
