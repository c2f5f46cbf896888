"""Writes a file that takes uint8 pixels and gives 8-bit outputs, for devices that have only integers.

    input float → Q → …                     pixels uint8 → DQ(1/255) → Conv 1x1, one filter a channel → Q → …
    … → output float                        … → Q → output, uint8 or int8 as the file's other tensors

(p/255 - mean)/std is a depthwise 1x1 convolution: its weights ±127 with scale 1/(127·std), its bias -mean/std.
It ends in the quantization that the file has anyway, so that the tensor after it is the same except for ties,
borders included: folded into the first Conv, the means would differ from its padding, which has one zero point
for all channels, and its weights would be rounded a second time. What remains is the rounding of the int32 bias
(1/254 of a pixel).
The range of the output comes from the calibration images. The scales at both ends are in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.for_ort_tools import add_constant
from qatkit.export.write_model import write_model
from qatkit.verify.graph_view import constant, made_by, operand
from qatkit_verify.errors import ConfigError
from qatkit_verify.integer_ends import WEIGHT, IntegerIO, bias_steps


@dataclass(frozen=True)
class _Ends:
    """The QuantizeLinear that reads the input, and what makes the output."""

    quantize: ir.Node
    output: ir.Node


def to_integer_io(
    source: Path,
    target: Path,
    mean: Sequence[float],
    std: Sequence[float],
    ends_of_output: tuple[float, float],
) -> IntegerIO:
    """Writes `source` with integer ends to `target` (may be the same), atomically.

    Args:
        source: a QDQ file with one input, normalised float images [N, C, H, W], and one output.
        mean, std: of the normalisation, C numbers each, of pixels in 0..1.
        ends_of_output: lowest and highest output that stay distinct; what lies outside is clipped.

    Raises:
        ConfigError: the input is no image, or is not quantized where it comes in.
    """
    model = ir.load(source)
    graph = model.graph
    ends = _ends(graph, len(mean))
    dtype = _array(ends.quantize, 2).dtype
    nodes = _normalisation(graph, ends.quantize, mean, std, dtype)
    graph.insert_before(graph[0], nodes)
    scale, zero_point = _quantized_output(graph, ends.output, ends_of_output, dtype)
    graph.inputs[0].type = ir.TensorType(ir.DataType.UINT8)
    about = IntegerIO(tuple(mean), tuple(std), dtype.name, scale, zero_point)
    model.metadata_props.clear()
    model.metadata_props.update(about.to_metadata())
    write_model(model, target)
    return about


def _ends(graph: ir.Graph, channels: int) -> _Ends:
    def refuse(why: str) -> ConfigError:
        return ConfigError("export.io", "uint8", f"float32: {why}")

    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise refuse("the model has several inputs or outputs")
    image = graph.inputs[0]
    shape = [size if isinstance(size, int) else 0 for size in image.shape or ()]
    if len(shape) != 4 or shape[1] != channels:
        raise refuse(f"its input {shape} is no batch of images with {channels} channels")
    readers = image.consumers()
    if [node.op_type for node in readers] != ["QuantizeLinear"]:
        kinds = ", ".join(dict.fromkeys(node.op_type for node in readers))
        raise refuse(f"its input is not quantized, {kinds} reads it in float")
    if (held := _array(readers[0], 2).dtype) not in (np.uint8, np.int8):
        raise refuse(f"its input is quantized to {held}, and pixels and outputs are bytes")
    output = graph.outputs[0].producer()
    assert output is not None, "a file that was checked computes its output"
    return _Ends(readers[0], output)


def _normalisation(
    graph: ir.Graph,
    quantize: ir.Node,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: np.dtype[Any],
) -> list[ir.Node]:
    """Returns the nodes from the pixels to `quantize`, which then reads the last one."""
    image = graph.inputs[0]
    spread = np.asarray(std, np.float64)
    step, weight_scale = 1 / 255, 1 / (spread * WEIGHT)
    bias_scale = weight_scale * step
    constants: dict[str, Any] = {
        "pixel_scale": np.float32(step),
        "pixel_zero_point": np.uint8(0),
        "weight": np.full((len(spread), 1, 1, 1), WEIGHT, np.int8),
        "weight_scale": weight_scale.astype(np.float32),
        "weight_zero_point": np.zeros(len(spread), np.int8),
        "bias": bias_steps(mean).astype(np.int32),
        "bias_scale": bias_scale.astype(np.float32),
    }
    if dtype == np.int8:
        constants["signed_zero_point"] = np.int8(-128)
    place = f"{image.name}_normalize"
    at = {key: add_constant(graph, f"{place}.{key}", np.asarray(v)) for key, v in constants.items()}
    nodes: list[ir.Node] = []

    def node(kind: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        before = sum(other.op_type == kind for other in nodes)
        name = f"{place}/{kind}_{before}" if before else f"{place}/{kind}"
        made = ir.Value(name=f"{name}_output")
        nodes.append(ir.node(kind, inputs, attributes, outputs=[made], name=name))
        return made

    pixels = node("DequantizeLinear", [image, at["pixel_scale"], at["pixel_zero_point"]])
    if dtype == np.int8:  # a kernel's input and output are of one type: pixels - 128, at the same scale
        signed = [at["pixel_scale"], at["signed_zero_point"]]
        pixels = node("QuantizeLinear", [pixels, *signed])
        pixels = node("DequantizeLinear", [pixels, *signed])
    parts = [at["weight"], at["weight_scale"], at["weight_zero_point"]]
    weight = node("DequantizeLinear", parts, axis=0)
    bias = node("DequantizeLinear", [at["bias"], at["bias_scale"]], axis=0)
    result = node("Conv", [pixels, weight, bias], group=len(spread), kernel_shape=(1, 1))
    quantize.replace_input_with(0, result)
    return nodes


def _quantized_output(
    graph: ir.Graph, last: ir.Node, ends_of_output: tuple[float, float], dtype: np.dtype[Any]
) -> tuple[float, int]:
    """Ends the graph in a quantized tensor of the output's name, and returns its scale and zero_point."""
    output = graph.outputs[0]
    name = output.name
    before = made_by(operand(last, 0), "QuantizeLinear") if last.op_type == "DequantizeLinear" else None
    if before is not None:
        if (held := _array(before, 2).dtype) != dtype:
            allowed = f"float32: the input is quantized to {dtype}, the output to {held}"
            raise ConfigError("export.io", "uint8", allowed)
        scale, zero_point = float(_array(before, 1)), int(_array(before, 2))
        result = before.outputs[0]
        graph.outputs[0] = result
        graph.remove(last, safe=True)
    else:
        scale, zero_point = _range(ends_of_output, dtype)
        output.name = f"{last.name}_output"
        parts = [
            add_constant(graph, f"{name}_quant.scale", np.asarray(scale, np.float32)),
            add_constant(graph, f"{name}_quant.zero_point", np.asarray(zero_point, dtype)),
        ]
        result = ir.Value(name=name)
        at = f"{name}_quant/QuantizeLinear"
        graph.append(ir.node("QuantizeLinear", [output, *parts], outputs=[result], name=at))
        graph.outputs[0] = result
        scale = float(np.float32(scale))
    result.name, result.shape = name, output.shape
    result.type = ir.TensorType(ir.DataType.from_numpy(dtype))
    return scale, zero_point


def _array(node: ir.Node, index: int) -> NDArray[Any]:
    """Returns a constant operand."""
    values = constant(operand(node, index))
    assert values is not None, f"{node.name} has no constant at {index}"
    return values


def _range(ends_of_output: tuple[float, float], dtype: np.dtype[Any]) -> tuple[float, int]:
    """Returns scale and zero_point that make [low, high], widened to hold 0, the whole range of `dtype`."""
    low, high = min(ends_of_output[0], 0.0), max(ends_of_output[1], 0.0)
    info = np.iinfo(dtype)
    scale = max((high - low) / (info.max - info.min), 1e-12)
    return scale, int(np.clip(info.min - np.rint(low / scale), info.min, info.max))
