"""A float file as ONNX Runtime's quantization tools can take it, and computing what it did.

Constants and BatchNorms are folded, or each would keep its float weights; functions are inlined, every node has
a name. Then what the tools get wrong is put out of their way: a Gemm's beta (dropped in silence), biases that are
no vector, tensors with the names that they make up, weights that two operators read in different ways.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_ir.passes import common
from onnxruntime.quantization.shape_inference import quant_pre_process

from qatkit.export.torch_to_onnx import quiet

# The axis of a weight that numbers the output channels; Gemm's depends on transB.
_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}
# What the tools call the parts of a quantized tensor.
_TAKEN = ("_quantized", "_scale", "_zero_point")


def prepared(source: Path) -> onnx.ModelProto:
    """The model of a float file."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        inlined = ir.from_proto(onnx.load(str(source)))
        common.InlinePass()(inlined)
        raw, folded = Path(folder) / "raw.onnx", Path(folder) / "folded.onnx"
        onnx.save(ir.to_proto(inlined), str(raw))
        quant_pre_process(str(raw), str(folded), skip_symbolic_shape=True)
        model = ir.from_proto(onnx.load(str(folded)))
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    taken = {node.name for node in model.graph}
    for index, node in enumerate(model.graph):
        if not node.name:
            node.name = _free(f"{node.op_type}_{index}", taken)
    _free_names(model)
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # the tools transpose weights and trip over their old shapes
    for node in proto.graph.node:
        while node.input and not node.input[-1]:
            del node.input[-1]
    _plain_gemms(proto)
    return proto


def constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}


def weights(model: onnx.ModelProto) -> dict[str, int]:
    """The float weights of Conv, ConvTranspose, Gemm and MatMul: name to the axis of the output channels."""
    known = constants(model)
    found: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type not in _CHANNEL_AXIS:
            continue
        for index in (1, 0):  # of a MatMul, the first operand may be the weight
            tensor = known.get(node.input[index])
            if tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
                found.setdefault(tensor.name, _channel_axis(node, index, len(tensor.dims)))
    return found


def weight_rank(model: onnx.ModelProto, node: onnx.NodeProto) -> int:
    """Dimensions of the constant that a MatMul multiplies with; 0 for anything else."""
    tensor = constants(model).get(node.input[1]) if node.op_type == "MatMul" else None
    return 0 if tensor is None else len(tensor.dims)


def own_weights(model: onnx.ModelProto, *, each_gemm: bool = False) -> None:
    """Gives operators that read one weight in different ways a copy each.

    Per channel, a weight that is read by rows and by columns needs two sets of scales.

    Args:
        each_gemm: one for each Gemm: the dynamic tool transposes a weight in place, once for every reader.
    """
    shared = {name for name, count in _readers(model).items() if count > 1}
    copied = {name: dict[object, str]() for name in weights(model) if name in shared}
    known, names = constants(model), _unused_names(model)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name not in copied:
                continue
            kept = copied[name]
            alone = each_gemm and node.op_type == "Gemm"
            way = node.name if alone else _way(node, index, len(known[name].dims))
            if way not in kept:
                kept[way] = name if not kept else next(names)
                if kept[way] != name:
                    copy = model.graph.initializer.add()
                    copy.CopyFrom(known[name])
                    copy.name = kept[way]
            node.input[index] = kept[way]


def _readers(model: onnx.ModelProto) -> Counter[str]:
    return Counter(name for node in model.graph.node for name in node.input)


def _way(node: onnx.NodeProto, index: int, rank: int) -> object:
    """How an operator reads a weight: those that do it alike can share its scales."""
    if node.op_type not in _CHANNEL_AXIS or index > 1:
        return "values"
    kind = "matrix" if node.op_type in ("Gemm", "MatMul") else node.op_type
    return kind, _channel_axis(node, index, rank)


def _channel_axis(node: onnx.NodeProto, index: int, rank: int) -> int:
    if node.op_type == "Gemm" and index == 1:
        return 0 if any(item.name == "transB" and item.i for item in node.attribute) else 1
    if index == 0:
        transposed = any(item.name == "transA" and item.i for item in node.attribute)
        return rank - 1 if transposed else rank - 2
    return _CHANNEL_AXIS[node.op_type] % rank


def _free_names(model: ir.Model) -> None:
    """Other names for tensors that are called as the tools will call theirs; the file's ends keep theirs."""
    graph = model.graph
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = ends | {value.name for value in values}
    for value in values:
        if value.name and value.name.endswith(_TAKEN) and value.name not in ends:
            value.name = _free(f"{value.name}_", taken)


def _free(name: str, taken: set[str | None]) -> str:
    """`name`, or more underscores after it, and from now on taken."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _unused_names(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    used = {name for node in graph.node for name in (*node.input, *node.output)} | set(constants(model))
    return (name for i in itertools.count() if (name := f"copy_{i}") not in used)


def _plain_gemms(model: onnx.ModelProto) -> None:
    """Makes the constant third input of a Gemm a vector [columns] with beta in it, where it has that shape."""
    known, names = constants(model), _unused_names(model)
    for node in model.graph.node:
        if node.op_type != "Gemm" or len(node.input) < 3 or not {*node.input[1:3]} <= known.keys():
            continue
        beta = next((item.f for item in node.attribute if item.name == "beta"), 1.0)
        bias = numpy_helper.to_array(known[node.input[2]])
        columns = known[node.input[1]].dims[_channel_axis(node, 1, 2)]
        if bias.size not in (1, columns) or bias.shape[:-1] not in ((), (1,)):
            continue
        if beta == 1 and bias.shape == (columns,):
            continue
        vector = np.broadcast_to((bias * np.float32(beta)).reshape(-1), (columns,))
        node.input[2] = next(names)
        model.graph.initializer.append(numpy_helper.from_array(vector.astype(bias.dtype), node.input[2]))
        for item in [item for item in node.attribute if item.name == "beta"]:
            node.attribute.remove(item)
