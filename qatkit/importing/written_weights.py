"""Writes weights of a converted module as initializers of the file: integers and scales, or new float values.

    Conv, Gemm, MatMul                  integers with a DequantizeLinear; an integer bias with another one
    BatchNormalization without a Conv   becomes a depthwise Conv
    Gather of a constant table          Gather of int8 rows, Cast, Mul with a Gather of scales
    LSTM, GRU, RNN                      int8 with Cast and Mul, which ONNX Runtime computes once
    float operators                     new values if training or folding changed them

Each weight is in the layout that the node reads. Equal constants are stored once, except the biases of
quantized operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from qatkit.graph.convert.integer_modules import Quantized, QuantizedEmbedding
from qatkit.graph.convert.recurrent_modules import QuantizedRecurrent, _to_onnx
from qatkit.graph.weights.transposed import from_phases
from qatkit.importing.operators.table import Array
from qatkit.importing.program import Original, Step
from qatkit.importing.written_file import WrittenFile, other_float, refused

_FLOAT = 1  # the number of the type in onnx.TensorProto
_BYTE = 255
_PRODUCTS = ("Conv", "Gemm", "MatMul", "BatchNormalization")


class WrittenWeights:
    """Writes the weights of modules into the nodes of a file."""

    def __init__(self, file: WrittenFile) -> None:
        self.file = file
        self._stored: dict[Any, ir.Value] = {}

    def write(self, step: Step, module: nn.Module) -> None:
        """Gives the node of `step` the weights of the converted module.

        Raises:
            ConfigError: the node cannot have the module's weights.
        """
        node = self.file.maker(next(name for name in step.outputs if name))
        if isinstance(module, Quantized):
            self._product(step, node, module)
        elif isinstance(module, QuantizedEmbedding):
            self._table(node, module)
        elif isinstance(module, QuantizedRecurrent):
            self._recurrent(node, module)
        elif any(True for _ in module.parameters()):
            self._floats(step, node, module)

    def stored(self, array: Array, name: str) -> ir.Value:
        """Returns an initializer with the given values, the same one for equal arrays of the same type."""
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._stored:
            self._stored[key] = self.file.constant(array, name)
        return self._stored[key]

    def operands(
        self, module: Quantized, weight: Array, scale: Array, axis: int, names: tuple[str, str]
    ) -> list[ir.Value]:
        """Returns the dequantized weight of a product, and its bias if the module has one.

        Args:
            module: the converted module.
            weight, scale: the integers and scales in the layout of the node; scales have rank 0 or 1, along `axis`.
            axis: the axis of the scales.
            names: the names of weight and bias, from which the names of new nodes and constants are derived.
        """
        count = scale.size if scale.ndim else weight.shape[axis]
        zero = array_of(module.weight_zero_point)
        zero = zero[:count] if zero.ndim else zero
        given: list[ir.Value | None] = [
            self.stored(weight, f"{names[0]}_quantized"),
            self.stored(scale, f"{names[0]}_scale"),
            self.stored(zero, f"{names[0]}_zero_point"),
        ]
        along = [ir.AttrInt64("axis", axis)] if scale.ndim else []
        found = [self.file.node(None, "DequantizeLinear", given, names[0], along)]
        if module.float_bias is not None:
            found.append(self.file.constant(array_of(module.float_bias)[:count], names[1]))
        elif module.bias is not None:
            # The constant is not shared, since the scale of a bias fits only one operator.
            bias = self.file.constant(array_of(module.bias)[:count], f"{names[1]}_quantized")
            own = array_of(module.bias_scale)
            own = own[:count] if own.ndim else own
            factor = self.file.constant(own, f"{names[1]}_scale")
            along = [ir.AttrInt64("axis", 0)] if own.ndim else []
            given = [bias, factor]
            if module.bias_multiplier is not None:  # only an int32 bias has zero_point 0 by definition
                zeros = np.zeros_like(own, array_of(module.bias).dtype)
                given.append(self.stored(zeros, f"{names[1]}_zero_point"))
            found.append(self.file.node(None, "DequantizeLinear", given, names[1], along))
        return found

    def _product(self, step: Step, node: ir.Node, module: Quantized) -> None:
        if node.op_type not in _PRODUCTS or node.domain not in ("", "ai.onnx"):
            raise refused(
                self.file.path,
                f"node '{step.name}' ({node.op_type}) cannot have a quantized weight; "
                "keep it in float with backend.overrides",
            )
        kind = other_float(cast(ir.Value, node.inputs[1]))
        if kind is not None:
            raise refused(self.file.path, f"node '{step.name}' computes in {kind.numpy()} instead of float32")
        weight, scale = array_of(module.weight), array_of(module.weight_scale)
        axis, alone = 0, node.op_type == "BatchNormalization"
        if module.is_linear and not (node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1):
            weight, axis = np.ascontiguousarray(weight.T), 1
        sizes = (math.prod(step.shape(1)), 1) + (1,) * (weight.ndim - 2) if alone else step.shape(1)
        weight = weight[tuple(slice(size) for size in sizes)]  # without channels that were padded for kernels
        scale = scale[: weight.shape[axis]] if scale.ndim else scale
        bias = node.inputs[2] if len(node.inputs) > 2 and not alone else None
        names = (
            str(cast(ir.Value, node.inputs[1]).name),
            f"{_name(node)}.bias" if bias is None else str(bias.name),
        )
        found = self.operands(module, weight, scale, axis, names)
        if axis == 1 and module.input_steps > _BYTE:
            # Otherwise ONNX Runtime 1.32 turns it into a MatMulNBits, which by default rounds the 16 bits to 8.
            found[0] = self.file.node(found[0], "Sum", [found[0]], names[0])
        if alone:
            _as_depthwise(node, len(weight), weight.ndim - 2)
        elif node.op_type == "MatMul" and len(found) > 1:  # the bias comes from a BatchNorm after it
            node.op_type = "Gemm"
        if node.op_type == "Gemm":
            for name in ("alpha", "beta"):
                node.attributes.pop(name, None)  # they are folded into the weights
        node.resize_inputs(1 + len(found))
        for place, value in enumerate(found):
            node.replace_input_with(1 + place, value)

    def _table(self, node: ir.Node, module: QuantizedEmbedding) -> None:
        table, rows = cast(ir.Value, node.inputs[0]), node.inputs[1]
        name, base, output = str(table.name), str(node.outputs[0].name), node.outputs[0]
        whole = self.stored(array_of(module.weight), f"{name}_quantized")
        if module.weight_zero_point is not None:
            raise refused(
                self.file.path, f"node '{node.name}' cannot have a table with zero points in the file"
            )
        scale = self.stored(array_of(module.weight_scale), f"{name}_scale")
        scales = self.file.node(node, "Gather", [scale, rows], f"{base}_scale")
        node.replace_input_with(0, whole)
        kind, shape = output.type, output.shape
        looked_up = self.file.node(
            cast(ir.Node, scales.producer()), "Cast", [None], base, [ir.AttrInt64("to", _FLOAT)]
        )
        found = self.file.node(cast(ir.Node, looked_up.producer()), "Mul", [looked_up, scales], base)
        ir.convenience.replace_all_uses_with(output, found, replace_graph_outputs=True)
        cast(ir.Node, looked_up.producer()).replace_input_with(0, output)
        found.type, found.shape, output.type, output.shape = kind, shape, None, None
        self._take_name(output, found, f"{name}_rows")

    def _take_name(self, old: ir.Value, new: ir.Value, other: str) -> None:
        """Gives `new` the name of `old`, and `old` the name `other`."""
        name = str(old.name)
        old.name = self.file.name(other)
        new.name = name
        self.file.values[name] = new

    def _recurrent(self, node: ir.Node, module: QuantizedRecurrent) -> None:
        if "_zero_point" in module.tails:
            raise refused(
                self.file.path, f"node '{node.name}' cannot have weights with zero points in the file"
            )
        for place, name in ((1, "weight_ih_l0"), (2, "weight_hh_l0")):
            base = str(cast(ir.Value, node.inputs[place]).name)
            whole = self.stored(array_of(getattr(module, name)), f"{base}_quantized")
            scale = self.stored(array_of(getattr(module, f"{name}_scale")), f"{base}_scale")
            cast_ = self.file.node(None, "Cast", [whole], base, [ir.AttrInt64("to", _FLOAT)])
            product = self.file.node(cast(ir.Node, cast_.producer()), "Mul", [cast_, scale], base)
            node.replace_input_with(place, product)
        if module.biased:
            self._float(node, 3, array_of(cast(Tensor, module.bias_l0)), None)

    def _floats(self, step: Step, node: ir.Node, module: nn.Module) -> None:
        """Writes the float values of the module that differ from those of the file."""
        found = _float_inputs(node, module)
        if node.op_type == "ConvTranspose" and not isinstance(module, nn.modules.conv._ConvTransposeNd):
            found = self._transposed(step, node, found)
        for place, array in found.items():
            self._float(node, place, array, step.original(place))

    def _transposed(self, step: Step, node: ir.Node, found: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the weight and bias of a transposed convolution, from those of the convolution that computes it."""
        kernel = step.shape(1)[2:]
        stride = list(node.attributes.get_ints("strides", [1] * len(kernel)))
        groups = node.attributes.get_int("group", 1)
        turned = {1: array_of(from_phases(torch.from_numpy(found[1]), kernel, stride, groups))}
        if 2 in found:
            phases = found[2].reshape(-1, math.prod(stride))
            if (phases != phases[:, :1]).any():
                raise refused(
                    self.file.path, f"node '{step.name}' cannot have a different bias for each phase"
                )
            turned[2] = np.ascontiguousarray(phases[:, 0])
        return turned

    def _float(self, node: ir.Node, place: int, array: Array, known: Original | None) -> None:
        old = node.inputs[place] if place < len(node.inputs) else None
        held = held_by(old) if known is None and old is not None else None
        known = known if held is None else Original.of(held)
        if known is not None and known.equals(array):
            return
        if old is None and not array.any():
            return
        shape = array.shape if known is None else known.shape
        if [size for size in shape if size != 1] != [size for size in array.shape if size != 1]:
            told = (
                f"input {place} of node '{_name(node)}' has the shape {list(shape)} in the file, "
                f"but {list(array.shape)} in the converted module"
            )
            raise refused(self.file.path, told)
        base = f"{_name(node)}.input_{place}" if old is None else str(old.name)
        if place >= len(node.inputs):
            node.resize_inputs(place + 1)
        node.replace_input_with(place, self.stored(array.reshape(shape), f"{base}_trained"))


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def held_by(value: ir.Value) -> Array | None:
    """Returns the values of a constant; None if the value is not constant."""
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _float_inputs(node: ir.Node, module: Any) -> Mapping[int, Array]:
    """Returns the parameters of a float module by the index of the node's input."""
    if isinstance(module, nn.Linear):
        weight, bias = array_of(module.weight), module.bias
        turned = weight if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1 else weight.T
        alpha, beta = (
            node.attributes.get_float(name, 1.0) if node.op_type == "Gemm" else 1.0
            for name in ("alpha", "beta")
        )
        found = {1: np.ascontiguousarray(turned / np.float32(alpha))}
        if bias is not None:
            found[2] = array_of(bias) / np.float32(beta)
        return found
    if isinstance(module, nn.RNNBase):
        return _recurrent_inputs(module)
    names: dict[type[nn.Module], tuple[str, ...]] = {
        nn.modules.batchnorm._BatchNorm: ("weight", "bias", "running_mean", "running_var"),
        nn.modules.conv._ConvNd: ("weight", "bias"),
        nn.LayerNorm: ("weight", "bias"),
        nn.PReLU: ("weight",),
    }
    if isinstance(module, nn.Embedding):
        return {0: array_of(module.weight)}
    own = next((names[kind] for kind in names if isinstance(module, kind)), ())
    tensors = {place: getattr(module, name) for place, name in enumerate(own, 1)}
    return {place: array_of(tensor) for place, tensor in tensors.items() if tensor is not None}


def _recurrent_inputs(module: nn.RNNBase) -> dict[int, Array]:
    mode = str(module.mode)
    ends = ("", "_reverse") if module.bidirectional else ("",)

    def rows(name: str) -> Array:
        return array_of(
            torch.stack([_to_onnx(cast(Tensor, getattr(module, name + end)), mode) for end in ends])
        )

    bias = np.concatenate([rows("bias_ih_l0"), rows("bias_hh_l0")], axis=1)
    return {1: rows("weight_ih_l0"), 2: rows("weight_hh_l0"), 3: bias}


def _as_depthwise(node: ir.Node, channels: int, rank: int) -> None:
    """Turns a BatchNormalization into the depthwise Conv that the graph has instead."""
    node.op_type = "Conv"
    node.attributes.clear()
    node.attributes.add(ir.AttrInt64("group", channels))
    node.attributes.add(ir.AttrInt64s("kernel_shape", [1] * rank))


def array_of(tensor: Tensor) -> Array:
    """Returns a tensor as an array in C order, which may share its memory."""
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tuple(tensor.shape))
