"""A file that takes uint8 pixels and gives 8-bit logits, for devices that have integers alone.

    input float → Q → …                     pixels uint8 → DQ(1/255) → Conv 1x1, one filter a channel → Q → …
    … → logits float                        … → Q → logits, uint8 or int8 as the file's other tensors

(p/255 - mean)/std is a depthwise 1x1 convolution: its weights ±127 with scale 1/(127·std), its bias -mean/std.
It ends in the quantization that the file has anyway, so that the tensor behind it is the same but for ties,
borders included: folded into the first Conv, the means would differ from its padding, which has one zero point
for all channels, and its weights would be rounded a second time. What remains is the rounding of the int32 bias
(1/254 of a pixel).
The range of the logits comes from the calibration images. The scales at both ends are in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qatkit.errors import ConfigError
from qatkit.export.torch_to_onnx import write_model
from qatkit.integer_ends import WEIGHT, IntegerIO, bias_steps


@dataclass(frozen=True)
class _Ends:
    """The QuantizeLinear that reads the input, and what makes the output."""

    quantize: onnx.NodeProto
    output: onnx.NodeProto


def to_integer_io(
    source: Path,
    target: Path,
    mean: Sequence[float],
    std: Sequence[float],
    logits: tuple[float, float],
) -> IntegerIO:
    """Writes `source` with integer ends to `target` (may be the same), whole or not at all.

    Args:
        source: a QDQ file with one input, normalised float images [N, C, H, W], and one output.
        mean, std: of the normalisation, C numbers each, of pixels in 0..1.
        logits: lowest and highest output to be told apart; what lies outside is clipped.

    Raises:
        ConfigError: the input is no image, or is not quantized where it comes in.
    """
    model = onnx.load(str(source))
    ends = _ends(model.graph, len(mean))
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    dtype = numpy_helper.to_array(stored[ends.quantize.input[2]]).dtype
    nodes = _normalisation(model.graph, ends.quantize, mean, std, dtype)
    others = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *others])
    scale, zero_point = _quantized_output(model.graph, ends.output, logits, dtype)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    model.graph.output[0].type.tensor_type.elem_type = kind
    about = IntegerIO(tuple(mean), tuple(std), dtype.name, scale, zero_point)
    helper.set_model_props(model, about.to_metadata())
    write_model(ir.from_proto(model), target)
    return about


def _ends(graph: onnx.GraphProto, channels: int) -> _Ends:
    def refuse(why: str) -> ConfigError:
        return ConfigError("export.io", "uint8", f"float32: {why}")

    if len(graph.input) != 1 or len(graph.output) != 1:
        raise refuse("the model has several inputs or outputs")
    name = graph.input[0].name
    shape = [axis.dim_value for axis in graph.input[0].type.tensor_type.shape.dim]
    if len(shape) != 4 or shape[1] != channels:
        raise refuse(f"its input {shape} is no batch of images with {channels} channels")
    readers = [node for node in graph.node if name in node.input]
    if [node.op_type for node in readers] != ["QuantizeLinear"]:
        kinds = ", ".join(dict.fromkeys(node.op_type for node in readers))
        raise refuse(f"its input is not quantized, {kinds} reads it in float")
    output = next(node for node in graph.node if graph.output[0].name in node.output)
    return _Ends(readers[0], output)


def _normalisation(
    graph: onnx.GraphProto,
    quantize: onnx.NodeProto,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: np.dtype[Any],
) -> list[onnx.NodeProto]:
    """The nodes from the pixels to `quantize`, which then reads the last one."""
    image = quantize.input[0]
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
    at = {key: f"{image}_normalize.{key}" for key in constants}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), at[k]) for k, v in constants.items())

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        name = f"{image}_normalize/{output}"
        return helper.make_node(kind, inputs, [name], f"{image}_normalize/{kind}/{output}", **attributes)

    nodes = [node("DequantizeLinear", [image, at["pixel_scale"], at["pixel_zero_point"]], "pixels")]
    if dtype == np.int8:  # a kernel's input and output are of one type: pixels - 128, at the same scale
        signed = [at["pixel_scale"], at["signed_zero_point"]]
        nodes.append(node("QuantizeLinear", [nodes[-1].output[0], *signed], "signed"))
        nodes.append(node("DequantizeLinear", [nodes[-1].output[0], *signed], "signed_pixels"))
    weight = [at["weight"], at["weight_scale"], at["weight_zero_point"]]
    nodes.append(node("DequantizeLinear", weight, "weight", axis=0))
    nodes.append(node("DequantizeLinear", [at["bias"], at["bias_scale"]], "bias", axis=0))
    operands = [nodes[-3].output[0], nodes[-2].output[0], nodes[-1].output[0]]
    nodes.append(node("Conv", operands, "image", group=len(spread), kernel_shape=(1, 1)))
    quantize.input[0] = nodes[-1].output[0]
    return nodes


def _quantized_output(
    graph: onnx.GraphProto, last: onnx.NodeProto, logits: tuple[float, float], dtype: np.dtype[Any]
) -> tuple[float, int]:
    """Ends the graph in a quantized tensor of the output's name; its scale and zero point."""
    output = graph.output[0].name
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    above = {name: node for node in graph.node for name in node.output}
    before = above.get(last.input[0])
    if last.op_type == "DequantizeLinear" and before is not None and before.op_type == "QuantizeLinear":
        graph.node.remove(last)
        _rename(graph, before.output[0], output)
        return float(stored[before.input[1]]), int(stored[before.input[2]])
    scale, zero_point = _range(logits, dtype)
    _rename(graph, output, f"{output}_float")
    names = [f"{output}_scale", f"{output}_zero_point"]
    values: list[NDArray[Any]] = [np.asarray(scale, np.float32), np.asarray(zero_point, dtype)]
    graph.initializer.extend(map(numpy_helper.from_array, values, names))
    reads = [f"{output}_float", *names]
    graph.node.append(helper.make_node("QuantizeLinear", reads, [output], f"{output}_quant/QuantizeLinear"))
    return float(np.float32(scale)), zero_point


def _range(logits: tuple[float, float], dtype: np.dtype[Any]) -> tuple[float, int]:
    """Scale and zero point that make [low, high], widened to hold 0, the whole range of `dtype`."""
    low, high = min(logits[0], 0.0), max(logits[1], 0.0)
    info = np.iinfo(dtype)
    scale = max((high - low) / (info.max - info.min), 1e-12)
    return scale, int(np.clip(info.min - np.rint(low / scale), info.min, info.max))


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
