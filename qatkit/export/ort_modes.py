"""Other ways to make a float ONNX file small: dynamic, static, float16 and weight-only, file to file.

ONNX Runtime's own tools do the work; what they leave undone is done around them:
- what they stumble over is put straight first (`qatkit.export.for_ort_tools`);
- its dynamic quantization has one scale for all filters of a Conv. `_levelled` divides each filter by its own
  range before, and `_scaled_back` multiplies the scale in the file by it after: per-channel weights, and not
  one node more. (mobilenet_v2 on 4,000 CIFAR-10 images: float 79.65, so 79.65, per tensor 79.53.)
Every function writes a file that has passed the checker and that ONNX Runtime has loaded, whole or not at
all; the same file gives the same bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx_ir.passes import common
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.transformers.float16 import convert_float_to_float16

from qatkit.backends import Backend, OpRule
from qatkit.export.for_ort_tools import constants, own_weights, prepared, weight_rank, weights
from qatkit.export.torch_to_onnx import quiet, write_model
from qatkit.spec import QuantSpec

_INT8_MAX, _FLOAT16_MAX = 127, 65504

# The operators that a backend's classes (`Backend.rules`) stand for.
_OPERATORS = {
    "conv": ("Conv", "ConvTranspose"),
    "linear": ("Gemm", "MatMul"),
    "add": ("Add",),
    "mul": ("Mul",),
    "cat": ("Concat",),
    "avg_pool": ("AveragePool",),
    "global_pool": ("GlobalAveragePool",),
    "sigmoid": ("Sigmoid",),
    "max_pool": ("MaxPool",),
    "shape": ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split"),
    "relu": ("Relu",),
    "relu6": ("Clip",),
}


def dynamic(source: Path, target: Path, *, reduce_range: bool = False) -> list[str]:
    """int8 weights per channel, uint8 activations whose range is measured anew for every run.

    Conv, MatMul and Gemm become ConvInteger and MatMulInteger behind a DynamicQuantizeLinear. A depthwise Conv
    stays float: its weights are few, and ConvInteger has no kernel for it but a slow general one. So does a
    MatMul whose weight is no matrix.

    Args:
        source: a float file of opset 13 or higher.
        target: the file to write.
        reduce_range: 7-bit weights, for x86 CPUs without VNNI.

    Returns:
        The names of the operators that stay float.
    """
    model = prepared(source)
    own_weights(model, each_gemm=True)
    ranges = _levelled(model)
    # MatMulInteger takes no weight per channel that is not a matrix.
    left = [
        n.name for n in model.graph.node if _is_depthwise(model, n) or weight_rank(model, n) not in (0, 2)
    ]
    quantized = _run_tool(
        partial(
            quantize_dynamic,
            model,
            op_types_to_quantize=["Conv", "MatMul"],  # a Gemm becomes a MatMul and an Add first
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=left,
        )
    )
    _scaled_back(quantized, ranges)
    _write(quantized, target)
    return left


def static(source: Path, target: Path, batches: Iterable[NDArray[np.float32]], backend: Backend) -> list[str]:
    """QDQ by ONNX Runtime's quantizer: ranges (min, max) from `batches` of images, specs and places by `backend`.

    What the backend's rules leave float stays float: normalizations, Softmax, GELU, and the residual stream
    of a transformer. (ViT on 500 CIFAR-10 images, float 65.2: with every Add and Mul quantized 51.0.)

    Returns:
        The names of the operators with weights that stay float, since the quantizer gets them wrong.
    """
    model = prepared(source)
    own_weights(model)
    odd = [node.name for node in model.graph.node if _misread(model, node)]
    reader = _Reader(model.graph.input[0].name, batches)
    activation, weight = backend.activation, backend.weight
    rules = {kind: rule for kind, rule in backend.rules.items() if rule.when != "shortcut"}
    kinds = {name: rule for kind, rule in rules.items() for name in _OPERATORS.get(kind, ())}
    options = {
        "ActivationSymmetric": activation.symmetric,
        "WeightSymmetric": weight.symmetric,
        "QuantizeBias": backend.for_onnxruntime,
        "OpTypesToExcludeOutputQuantization": [name for name, rule in kinds.items() if not rule.output],
        # An entry without an axis: one scale for the tensor.
        "TensorQuantOverrides": {name: [{"symmetric": weight.symmetric}] for name in _one_scale(model)},
    }
    quantized = _run_tool(
        partial(
            quantize_static,
            model,
            calibration_data_reader=reader,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(kinds),
            nodes_to_exclude=odd + _left_float(model, kinds, odd),
            per_channel=weight.per_channel,
            reduce_range=weight.reduce_range,
            activation_type=_type_of(activation),
            weight_type=_type_of(weight),
            extra_options=options,
        )
    )
    _write(quantized, target)
    return odd


def float16(source: Path, target: Path) -> None:
    """Weights and activations in float16; the inputs and outputs of the file stay float32.

    Raises:
        ValueError: a weight that float16 can't hold; the tool would clip it.
    """
    model = prepared(source)
    known = constants(model)
    for name in weights(model):
        largest = float(np.abs(numpy_helper.to_array(known[name])).max())
        if largest > _FLOAT16_MAX:
            raise ValueError(
                f"float16 ends at {_FLOAT16_MAX:.0f}, and the weight '{name}' holds {largest:.4g}"
            )
    with quiet():
        half = convert_float_to_float16(model, keep_io_types=True)
    _write(half, target)


def weight_only(source: Path, target: Path) -> None:
    """int8 weights, symmetric per output channel, each behind a DequantizeLinear; activations stay float."""
    model = prepared(source)
    pairs: list[onnx.NodeProto] = []
    for name, axis in weights(model).items():
        tensor = next(item for item in model.graph.initializer if item.name == name)
        pairs.append(_stored_in_int8(model, tensor, axis))
    nodes = [*pairs, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    _write(model, target)


def _left_float(model: onnx.ModelProto, kinds: Mapping[str, OpRule], odd: Iterable[str]) -> list[str]:
    """The operators that are int8 only where all of their inputs are, and have a float one (from `odd`, say)."""
    int8, left, excluded = set(constants(model)), [], set(odd)
    for node in model.graph.node:
        rule = kinds.get(node.op_type)
        if rule is None or node.name in excluded:
            continue
        if rule.when == "inputs" and not int8.issuperset(name for name in node.input if name):
            left.append(node.name)
        elif rule.output:
            int8.update(node.output)
    return left


def _one_scale(model: onnx.ModelProto) -> set[str]:
    """Weights that get one scale: of a ConvTranspose in groups [in, out/groups, ...], whose axis 1 the tool takes
    for all output channels, and stacks of matrices, for which MatMul's 8-bit kernel knows no scale a channel.
    """
    found = set()
    for node in model.graph.node:
        grouped = any(item.name == "group" and item.i > 1 for item in node.attribute)
        if (node.op_type == "ConvTranspose" and grouped) or weight_rank(model, node) > 2:
            found.add(node.input[1])
    return found


def _misread(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    """What the static quantizer gets wrong: a weight that is the first factor or a vector; a Gemm's beta."""
    if node.op_type == "MatMul":
        return weight_rank(model, node) == 1 or node.input[0] in constants(model)
    if node.op_type != "Gemm":
        return False
    bias = constants(model).get(node.input[2]) if len(node.input) > 2 else None
    scaled = any(item.name == "beta" and item.f != 1 for item in node.attribute)
    return (scaled and len(node.input) > 2) or (bias is not None and len(bias.dims) != 1)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Batches of images as ONNX Runtime's calibration asks for them."""

    def __init__(self, name: str, batches: Iterable[NDArray[np.float32]]) -> None:
        self._name, self._batches = name, iter(batches)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def _type_of(spec: QuantSpec) -> QuantType:
    return QuantType.QInt8 if spec.dtype == "int8" else QuantType.QUInt8


def _run_tool(tool: Callable[[Path], Any]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "model.onnx"
        tool(path)
        return onnx.load(str(path))


def _write(proto: onnx.ModelProto, target: Path) -> None:
    """Sorts and cleans what the tools leave behind, then writes."""
    model = ir.from_proto(proto)
    with quiet():
        for cleaning in (
            common.TopologicalSortPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),
        ):
            cleaning(model)
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "qatkit", None
    write_model(model, target)


def _stored_in_int8(model: onnx.ModelProto, tensor: onnx.TensorProto, axis: int) -> onnx.NodeProto:
    """Replaces a weight by its int8 values; returns the DequantizeLinear that has the weight's name."""
    name, values = tensor.name, numpy_helper.to_array(tensor)
    scale = _row_ranges(values, axis) / _INT8_MAX
    shape = [-1 if one == axis else 1 for one in range(values.ndim)]
    rounded = np.clip(np.rint(values / scale.reshape(shape)), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    parts: dict[str, NDArray[Any]] = {
        f"{name}_quantized": rounded,
        f"{name}_scale": scale,
        f"{name}_zero_point": np.zeros(len(scale), np.int8),
    }
    model.graph.initializer.remove(tensor)
    model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in parts.items())
    return onnx.helper.make_node("DequantizeLinear", list(parts), [name], f"{name}_dequantize", axis=axis)


def _row_ranges(values: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """The largest magnitude of each channel [C]; 1 where all are zero."""
    others = tuple(one for one in range(values.ndim) if one != axis)
    ranges = np.abs(values).max(axis=others)
    return np.where(ranges > 0, ranges, 1).astype(np.float32)


def _is_depthwise(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    """Whether each filter of a Conv sees one channel of several."""
    if node.op_type != "Conv" or not any(item.name == "group" and item.i > 1 for item in node.attribute):
        return False
    weight = next((item for item in model.graph.initializer if item.name == node.input[1]), None)
    return weight is not None and weight.dims[1] == 1


def _levelled(model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
    """Divides each filter of a Conv by its range; returns the ranges, shaped to multiply the Conv's output."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    ranges = {}
    for tensor in model.graph.initializer:
        users = readers.get(tensor.name, [])
        convolved = users and all(n.op_type == "Conv" and n.input[1] == tensor.name for n in users)
        if not convolved or tensor.data_type != onnx.TensorProto.FLOAT or _is_depthwise(model, users[0]):
            continue
        values = numpy_helper.to_array(tensor)
        rows = _row_ranges(values, 0).reshape(-1, *[1] * (values.ndim - 1))
        tensor.CopyFrom(numpy_helper.from_array(values / rows, tensor.name))
        ranges[tensor.name] = rows.reshape(1, *rows.shape[:-1])
    return ranges


def _scaled_back(model: onnx.ModelProto, ranges: dict[str, NDArray[np.float32]]) -> None:
    """Multiplies the scale of each levelled weight, so that the scale is of one filter [1, C, 1, 1]."""
    for tensor in model.graph.initializer:
        rows = ranges.get(tensor.name.removesuffix("_scale"))
        if rows is not None and tensor.name.endswith("_scale"):
            scale = numpy_helper.to_array(tensor).reshape(())
            tensor.CopyFrom(numpy_helper.from_array((scale * rows).astype(np.float32), tensor.name))
