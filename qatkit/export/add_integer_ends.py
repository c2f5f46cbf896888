"""Writes a file that accepts uint8 pixels and returns 8-bit outputs, for devices that compute only with integers.

    input float → Q → …                     pixels uint8 → DQ(1/255) → depthwise Conv 1x1 → Q → …
    … → output float                        … → Q → output, uint8 or int8 like the file's other tensors

The normalization (p/255 - mean)/std becomes a depthwise 1x1 convolution with weights ±127, scale 1/(127·std) and
bias -mean/std. The QuantizeLinear that the file already has reads its output, so the quantized tensor stays the same
except for ties. The only further error is the rounding of the int32 bias, at most 1/254 of the step between two pixel
values.

Folding the normalization into the first Conv would be less exact: the Conv pads all channels with one value, which
cannot equal the mean of each channel, and its weights would be rounded a second time.

The range of the output comes from the calibration images, unless the file quantizes its output already. The
normalization of the input and the scale of the output are stored in the file's metadata.
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
    """The QuantizeLinear that reads the input, and the node that computes the output."""

    quantize: ir.Node
    output: ir.Node


def to_integer_io(
    source: Path,
    target: Path,
    mean: Sequence[float],
    std: Sequence[float],
    ends_of_output: tuple[float, float],
) -> IntegerIO:
    """Writes `source` with integer inputs and outputs to `target`, atomically.

    Args:
        source: a QDQ file with one input, normalized float images [N, C, H, W], and one output.
        target: the file to write, which may be `source`.
        mean, std: the normalization of pixels in 0..1, with one number per channel.
        ends_of_output: the lowest and the highest output that the file can represent, extended to include 0; values
            beyond them are clipped. Not used if the file quantizes its output already.

    Returns:
        The description of the integer input and output, as stored in the file's metadata.

    Raises:
        ConfigError: the file has several inputs or outputs, the input is not a batch of images, its only reader is not
            a QuantizeLinear to 8 bits, or the output is already quantized to a type other than that of the input.
        ValueError: the checker or ONNX Runtime refuses the file.
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
        return ConfigError("export.io", "uint8", f"float32, because {why}")

    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise refuse("the model has several inputs or outputs")
    image = graph.inputs[0]
    shape = [size if isinstance(size, int) else 0 for size in image.shape or ()]
    if len(shape) != 4 or shape[1] != channels:
        sizes = ", ".join(str(size or "?") for size in shape)
        raise refuse(f"the model's input [{sizes}] is not a batch of images with {channels} channels")
    readers = image.consumers()
    if [node.op_type for node in readers] != ["QuantizeLinear"]:
        kinds = list(dict.fromkeys(node.op_type for node in readers if node.op_type != "QuantizeLinear"))
        if not kinds:
            readers_of_input = "several QuantizeLinear read" if readers else "no operator reads"
            raise refuse(f"{readers_of_input} the model's input")
        verb = "reads" if len(kinds) == 1 else "read"
        raise refuse(f"{' and '.join(kinds)} {verb} the model's input in float")
    if (held := _array(readers[0], 2).dtype) not in (np.uint8, np.int8):
        raise refuse(f"the model's input is quantized to {held}, but pixels and outputs have 8 bits")
    output = graph.outputs[0].producer()
    assert output is not None, "onnx.checker has accepted the file, so a node computes the output"
    return _Ends(readers[0], output)


def _normalisation(
    graph: ir.Graph,
    quantize: ir.Node,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: np.dtype[Any],
) -> list[ir.Node]:
    """Returns the nodes that normalize pixels; `quantize` then reads the last one."""
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
    if dtype == np.int8:  # kernels need the same type for input and output: pixels - 128, with the same scale
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
    """Replaces the output of the file by a quantized tensor of the same name; returns its scale and zero_point."""
    output = graph.outputs[0]
    name = output.name
    before = made_by(operand(last, 0), "QuantizeLinear") if last.op_type == "DequantizeLinear" else None
    if before is not None:
        if (held := _array(before, 2).dtype) != dtype:
            allowed = f"float32, because the input is quantized to {dtype} and the output to {held}"
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
    """Returns the scale and zero_point that map [low, high], widened to include 0, to the whole range of `dtype`."""
    low, high = min(ends_of_output[0], 0.0), max(ends_of_output[1], 0.0)
    info = np.iinfo(dtype)
    scale = max((high - low) / (info.max - info.min), 1e-12)
    return scale, int(np.clip(info.min - np.rint(low / scale), info.min, info.max))
