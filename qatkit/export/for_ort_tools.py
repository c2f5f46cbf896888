"""Prepares a float file for ONNX Runtime's quantization tools without changing its outputs.

Constants and BatchNorms are folded, because their float weights would otherwise remain. Functions are inlined, and
every node gets a name. Then the following constructs are rewritten, which the tools or kernels handle wrongly:

- beta of a Gemm, which is silently dropped, and alpha, which ONNX Runtime before 1.28 also applies to the bias
- biases that are not vectors
- tensors with names that the tools give to their own tensors
- weights that two operators read in different ways
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes import common

from qatkit.export.hidden_names import free_name, rename_inner, tensor_names
from qatkit.export.quiet import quiet
from qatkit.verify.graph_view import constant, operand, stored
from qatkit_verify.session import open_session

# The axis of the output channels in a weight; for Gemm it depends on transB.
_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}
RECURRENT = ("LSTM", "GRU", "RNN")


def prepared(source: Path) -> ir.Model:
    """Returns the model of a float file after folding, inlining, naming and the rewriting of Gemms and tensor names.

    Raises:
        ConfigError: ONNX Runtime cannot load the file.
    """
    with tempfile.TemporaryDirectory() as folder, quiet():
        inlined = ir.from_proto(onnx.load(str(source)))
        common.InlinePass()(inlined)
        raw, folded = Path(folder) / "raw.onnx", Path(folder) / "folded.onnx"
        ir.save(inlined, raw)
        # Does the work of quant_pre_process, which does not optimize its result before ONNX Runtime 1.31.
        level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        open_session(raw, threads=1, optimize=level, optimized_path=folded)
        onnx.shape_inference.infer_shapes_path(str(folded))
        model = ir.from_proto(onnx.load(str(folded)))
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    taken = {node.name for node in model.graph}
    for node in model.graph:
        if not node.name:
            node.name = free_name(f"{node.outputs[0].name}/{node.op_type}", taken)
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    rename_inner(model)
    _plain_gemms(model)
    return model


def for_tools(model: ir.Model) -> onnx.ModelProto:
    """Returns the model for the tools without recorded shapes, which would be wrong after the tools transpose weights.

    If types cannot be inferred (after an operator of another domain), the tools do not quantize the operators that
    follow. Therefore the inputs and outputs of operators with float weights are declared as float.
    """
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    ends = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    users = (node for value in weights(model) for node in value.consumers())
    readers = [node for node in users if node.op_type in _CHANNEL_AXIS and node.graph is model.graph]
    values = [value for node in readers for value in (*node.inputs[:2], *node.outputs) if value is not None]
    for name in dict.fromkeys(str(value.name) for value in values if stored(value) is None):
        if name not in ends:
            proto.graph.value_info.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
    return proto


def weights(model: ir.Model) -> dict[ir.Value, int]:
    """Returns the constant float operands of Conv, ConvTranspose, Gemm and MatMul, with their output channel axes.

    Operands with fewer than two axes, such as biases, are left out. In a MatMul, the first operand may be the weight.
    """
    found: dict[ir.Value, int] = {}
    for node in model.graph:
        if node.op_type not in _CHANNEL_AXIS or node.domain:
            continue
        for index in (1, 0):  # in a MatMul, the first operand may be the weight
            value = operand(node, index)
            tensor = stored(value)
            if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT:
                continue
            if (rank := len(tensor.shape)) > 1:
                found.setdefault(value, _channel_axis(node, index, rank))
    return found


def recurrent_weights(model: ir.Model) -> list[ir.Value]:
    """Returns the float weights of LSTM, GRU and RNN.

    These are W [directions, gates · size, inputs] and R [directions, gates · size, size].
    """
    nodes = (node for node in model.graph if node.op_type in RECURRENT and not node.domain)
    found = (value for node in nodes for value in (operand(node, 1), operand(node, 2)))
    held = {value: stored(value) for value in found if value is not None}
    return [
        value for value, tensor in held.items() if tensor is not None and tensor.dtype == ir.DataType.FLOAT
    ]


def weight_rank(node: ir.Node) -> int:
    """Returns the number of axes of a MatMul's second operand if this is constant; otherwise 0."""
    tensor = stored(operand(node, 1)) if node.op_type == "MatMul" else None
    return 0 if tensor is None else len(tensor.shape)


def own_weights(model: ir.Model, *, each_gemm: bool = False) -> None:
    """Copies a weight for each way in which operators read it.

    With per-channel scales, a weight that is read by rows and by columns needs two sets of scales. Weights that
    branches read are not changed.

    Args:
        model: the model, changed in place.
        each_gemm: whether each Gemm gets its own copy, which is read by columns. The dynamic tool turns a Gemm into a
            MatMul and transposes a weight that is read by rows. Up to ONNX Runtime 1.31 it does so in place, once for
            every reader; from 1.32 on, under another name.
    """
    copies: dict[ir.Value, dict[object, ir.Value]] = {
        value: {"branches": value} if any(node.graph is not model.graph for node in value.consumers()) else {}
        for value in weights(model)
        if len(value.uses()) > 1
    }
    taken = tensor_names(model)
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            tensor = stored(value)
            if value is None or tensor is None or value not in copies:
                continue
            kept = copies[value]
            alone = each_gemm and node.op_type == "Gemm"
            way = node.name if alone else _way(node, index, len(tensor.shape))
            if way not in kept:
                kept[way] = (
                    copied(model.graph, tensor, free_name(f"{value.name}_copy", taken)) if kept else value
                )
            node.replace_input_with(index, kept[way])
    for node in list(model.graph) if each_gemm else ():
        if node.op_type == "Gemm" and not node.domain and node.attributes.get_int("transB", 0) == 1:
            _read_by_columns(node)


def _read_by_columns(gemm: ir.Node) -> None:
    """Transposes a weight that only this Gemm reads, and changes the Gemm accordingly."""
    value = gemm.inputs[1]
    tensor = stored(value)
    if value is None or tensor is None or len(value.uses()) > 1 or value.is_graph_output():
        return
    turned = ir.tensor(np.ascontiguousarray(tensor.numpy().T), name=value.name)
    value.const_value, value.shape = turned, ir.Shape(turned.shape.numpy())
    gemm.attributes["transB"] = ir.AttrInt64("transB", 0)


def copied(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Adds an initializer with the values of `tensor` to the graph, and returns it."""
    copy = ir.serde.deserialize_tensor(ir.serde.serialize_tensor(tensor))
    copy.name = name
    return add_constant(graph, name, copy)


def add_constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | NDArray[Any]) -> ir.Value:
    """Adds an initializer to the graph, and returns it."""
    held = ir.tensor(tensor, name=name)
    shape = ir.Shape(held.shape.numpy())
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(held.dtype), const_value=held)
    graph.register_initializer(value)
    return value


def _way(node: ir.Node, index: int, rank: int) -> object:
    """Returns a key for how an operator reads a weight: operators with equal keys can share its scales."""
    if node.op_type not in _CHANNEL_AXIS or index > 1:
        return "values"
    kind = "matrix" if node.op_type in ("Gemm", "MatMul") else node.op_type
    return kind, _channel_axis(node, index, rank)


def _channel_axis(node: ir.Node, index: int, rank: int) -> int:
    if node.op_type == "Gemm" and index == 1:
        return 0 if node.attributes.get_int("transB", 0) else 1
    if index == 0:
        return rank - 1 if node.attributes.get_int("transA", 0) else rank - 2
    return _CHANNEL_AXIS[node.op_type] % rank


def _plain_gemms(model: ir.Model) -> None:
    """Multiplies alpha into the constant weight and beta into the constant bias of each Gemm.

    The bias becomes a vector [columns]. If its shape does not allow this, the bias and beta stay as they are.
    """
    _fold_alpha(model)
    taken = tensor_names(model)
    for node in model.graph:
        weight, bias = stored(operand(node, 1)), constant(operand(node, 2))
        if node.op_type != "Gemm" or weight is None or bias is None:
            continue
        beta = node.attributes.get_float("beta", 1.0)
        columns = weight.shape.numpy()[_channel_axis(node, 1, 2)]
        if bias.size not in (1, columns) or bias.shape[:-1] not in ((), (1,)):
            continue
        if beta == 1 and bias.shape == (columns,):
            continue
        vector = np.broadcast_to((bias * np.float32(beta)).reshape(-1), (columns,))
        name = free_name(f"{node.inputs[2].name}_vector", taken)  # type: ignore[union-attr]
        node.replace_input_with(2, add_constant(model.graph, name, vector.astype(bias.dtype)))
        node.attributes.pop("beta", None)


def _fold_alpha(model: ir.Model) -> None:
    """Multiplies alpha into constant weights, since QGemm before ONNX Runtime 1.28 also applies it to the bias."""
    taken = tensor_names(model)
    for node in model.graph:
        alpha = node.attributes.get_float("alpha", 1.0)
        value, weight = operand(node, 1), constant(operand(node, 1))
        if node.op_type != "Gemm" or value is None or weight is None or alpha in (0, 1):
            continue
        scaled = (weight * np.float32(alpha)).astype(weight.dtype)
        node.replace_input_with(
            1, add_constant(model.graph, free_name(f"{value.name}_scaled", taken), scaled)
        )
        node.attributes.pop("alpha", None)
