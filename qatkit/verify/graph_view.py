"""An ONNX graph with its edges indexed: who makes a tensor, who reads it, what is constant.

Constant nodes count as initializers, so that a file reads the same however its constants are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from qatkit.errors import ConfigError

# Operators that move values without computing: a weight behind one of them is still that weight.
SHAPE_OPS = frozenset(
    {
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Flatten",
        "Expand",
        "Identity",
        "Cast",
        "Gather",
        "Split",
    }
)
# Operators that multiply matrices, by what their operands look like. Includes ONNX Runtime's fused forms.
CONV_OPS = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "FusedConv",
        "NhwcFusedConv",
        "QLinearConv",
        "QLinearConvTranspose",
        "ConvInteger",
    }
)
MATMUL_OPS = frozenset(
    {
        "Gemm",
        "MatMul",
        "FusedGemm",
        "FusedMatMul",
        "QGemm",
        "QLinearMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "MatMulNBits",
    }
)
MATRIX_OPS = CONV_OPS | MATMUL_OPS


@dataclass(frozen=True)
class Weight:
    """A constant operand: the initializer's name, the DequantizeLinear on the way, and the operator between.

    `between` stands between the DequantizeLinear and the reader (None: read directly).
    """

    name: str
    dequantize: onnx.NodeProto | None
    between: onnx.NodeProto | None


class GraphView:
    """Read-only index over a GraphProto."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = [node for node in graph.node if node.op_type != "Constant"]
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.initializers[node.output[0]] = node.attribute[0].t
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.consumers.setdefault(name, []).append(node)

    @classmethod
    def load(cls, path: str | Path) -> GraphView:
        """Reads a file.

        Raises:
            ConfigError: the file is not an ONNX model.
        """
        try:
            return cls(onnx.load(str(path)).graph)
        except Exception as error:  # protobuf's DecodeError is not importable from a stable place
            raise ConfigError("onnx file", path, f"can't be read as ONNX: {error}") from error

    def constant(self, name: str) -> NDArray[Any] | None:
        """The value of a constant tensor, or None."""
        tensor = self.initializers.get(name)
        return None if tensor is None else np.asarray(numpy_helper.to_array(tensor))

    def element_type(self, name: str) -> int:
        """The TensorProto data type of a constant (0 when the tensor is not constant)."""
        tensor = self.initializers.get(name)
        return tensor.data_type if tensor is not None else 0

    def back(self, tensor: str) -> Iterator[onnx.NodeProto]:
        """The producers of `tensor`, walking up first inputs."""
        node = self.producer.get(tensor)
        while node is not None:
            yield node
            node = self.producer.get(node.input[0]) if node.input else None

    def weight(self, tensor: str) -> Weight | None:
        """The constant behind `tensor`, through at most a DequantizeLinear and shape operators."""
        dequantize = between = None
        name = tensor
        for node in self.back(tensor):
            if node.op_type == "DequantizeLinear" and dequantize is None:
                dequantize = node
            elif node.op_type in SHAPE_OPS or node.op_type == "QuantizeLinear":
                between = node if dequantize is None else between
            else:
                return None
            name = node.input[0]
        return Weight(name, dequantize, between) if name in self.initializers else None

    def weight_of(self, node: onnx.NodeProto) -> Weight | None:
        """The constant operand of a matrix operator (Conv, Gemm, MatMul and their fused forms), or None."""
        for index in _operand_indices(node):
            found = self.weight(node.input[index]) if index < len(node.input) else None
            if found is not None:
                return found
        return None


def _operand_indices(node: onnx.NodeProto) -> tuple[int, ...]:
    """Where a matrix operator's weight may stand among its inputs, the usual place first."""
    if node.op_type in ("QLinearConv", "QLinearConvTranspose", "QLinearMatMul", "QGemm"):
        return (3, 0) if node.op_type in ("QLinearMatMul", "QGemm") else (3,)
    return (1,) if node.op_type in CONV_OPS else (1, 0)
