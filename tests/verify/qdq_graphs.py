"""Small QDQ files written node by node, so that a test can break exactly one thing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

INPUT_SCALE, OUTPUT_SCALE, LOGITS_SCALE = 0.02, 0.05, 0.125
IMAGE: tuple[int | str, ...] = ("N", 16, 8, 8)
TOKENS: tuple[int | str, ...] = ("N", 5, 16)


class QdqGraph:
    """Collects nodes and initializers; methods that add nodes return the name of their output.

    Args:
        seed: seed of the weights and biases.
        largest: largest magnitude of the weights; up to 64, no CPU saturates and all give the same bits.
    """

    def __init__(self, seed: int = 0, largest: int = 64) -> None:
        self.largest = largest
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, NDArray[Any]] = {}
        self._random = np.random.default_rng(seed)

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.initializers[name] = np.asarray(value, dtype)
        return name

    def node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def quantize(self, tensor: str, name: str, scale: float, zero: int = 128, dtype: Any = np.uint8) -> str:
        """Adds a QuantizeLinear `name` with output `name`_out, and its DequantizeLinear."""
        pair = [
            self.constant(f"{name}_scale", scale),
            self.constant(f"{name}_zero", zero, dtype),
        ]
        self.node("QuantizeLinear", [tensor, *pair], name)
        return self.node("DequantizeLinear", [f"{name}_out", *pair], f"{name}_dq")

    def weight(self, name: str, shape: tuple[int, ...], axis: int = 0) -> str:
        """Adds a per-channel int8 weight and its DequantizeLinear."""
        values = self._random.integers(-self.largest, self.largest + 1, shape)
        scales = self._random.uniform(0.001, 0.01, shape[axis])
        parts = [
            self.constant(f"{name}_q", values, np.int8),
            self.constant(f"{name}_scale", scales),
            self.constant(f"{name}_zero", np.zeros(shape[axis]), np.int8),
        ]
        return self.node("DequantizeLinear", parts, f"{name}_dq", axis=axis)

    def bias(self, name: str, weight: str, input_scale: float, error: float = 1.0) -> str:
        """Adds an int32 bias whose scale is input scale times weight scale (times `error`)."""
        scales = self.initializers[f"{weight}_scale"] * input_scale * error
        parts = [
            self.constant(f"{name}_q", self._random.integers(-500, 500, len(scales)), np.int32),
            self.constant(f"{name}_scale", scales),
            self.constant(f"{name}_zero", np.zeros(len(scales)), np.int32),
        ]
        return self.node("DequantizeLinear", parts, f"{name}_dq", axis=0)

    def conv(self, tensor: str, name: str, scale: float = INPUT_SCALE, bias_error: float = 1.0) -> str:
        """Adds a 3x3 convolution of 16 channels with an int32 bias; its output is not quantized."""
        weight = self.weight(f"{name}.weight", (16, 16, 3, 3))
        bias = self.bias(f"{name}.bias", f"{name}.weight", scale, bias_error)
        return self.node("Conv", [tensor, weight, bias], name, pads=[1, 1, 1, 1])

    def gemm(self, tensor: str, name: str, scale: float = INPUT_SCALE, outputs: int = 16) -> str:
        """Adds a Linear of 16 inputs with an int32 bias; its output is not quantized."""
        weight = self.weight(f"{name}.weight", (outputs, 16))
        bias = self.bias(f"{name}.bias", f"{name}.weight", scale)
        return self.node("Gemm", [tensor, weight, bias], name, transB=1)

    def layer_norm(self, tensor: str, name: str) -> str:
        """Adds a LayerNorm over the last 16 features, decomposed as opset 13 requires."""
        mean = self.node("ReduceMean", [tensor], f"{name}/mean", axes=[-1])
        centred = self.node("Sub", [tensor, mean], f"{name}/sub")
        squared = self.node("Pow", [centred, self.constant(f"{name}.two", 2)], f"{name}/pow")
        variance = self.node("ReduceMean", [squared], f"{name}/variance", axes=[-1])
        shifted = self.node("Add", [variance, self.constant(f"{name}.eps", 1e-5)], f"{name}/eps")
        scaled = self.node("Div", [centred, self.node("Sqrt", [shifted], f"{name}/sqrt")], f"{name}/div")
        gain = self.node("Mul", [scaled, self.constant(f"{name}.weight", np.full(16, 1.1))], f"{name}/mul")
        return self.node("Add", [gain, self.constant(f"{name}.bias", np.ones(16))], f"{name}/add")

    def save(
        self, path: Path, last: str, input_shape: Sequence[int | str], output_rank: int, opset: int = 13
    ) -> Path:
        """Writes a file whose output is an Identity of `last`, after onnx has checked it."""
        nodes = [*self.nodes, helper.make_node("Identity", [last], ["output"], name="output_identity")]
        graph = helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, input_shape)],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, [None] * output_rank)],
            [numpy_helper.from_array(value, name) for name, value in self.initializers.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(path))
        return path


def float_weight(graph: QdqGraph) -> str:
    """Adds a Conv `c1` with a float weight."""
    weight = graph.constant("c1.weight", np.random.default_rng(0).normal(size=(16, 16, 3, 3)))
    return graph.node("Conv", ["input", weight], "c1", pads=[1, 1, 1, 1])


def self_quantized(graph: QdqGraph) -> str:
    """Adds a Conv `c1` with a float weight between QDQ pairs; ONNX Runtime itself quantizes the weight."""
    weight = graph.constant("c1.weight", np.random.default_rng(0).normal(size=(16, 16, 3, 3)))
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    return graph.quantize(graph.node("Conv", [image, weight], "c1", pads=[1, 1, 1, 1]), "c1_q", OUTPUT_SCALE)


def matmul_add(graph: QdqGraph) -> str:
    """Adds a MatMul `fc` with int8 weights, and the Add of its float bias."""
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    product = graph.node("MatMul", [image, graph.weight("fc.weight", (16, 16), axis=1)], "fc")
    return graph.node("Add", [product, graph.constant("fc.bias", np.ones(16))], "fc/add")


def classifier(
    path: Path, batch: int | str = "N", classes: int = 10, output_pair: bool = True, largest: int = 64
) -> QdqGraph:
    """Writes a file of a quantized conv, ReLU, pool and Linear; returns its nodes and constants.

    The input is [batch, 16, 8, 8].
    """
    graph = QdqGraph(largest=largest)
    image = graph.quantize("input", "input_q", INPUT_SCALE)
    hidden = graph.node("Relu", [graph.conv(image, "conv")], "relu")
    hidden = graph.quantize(hidden, "relu_q", OUTPUT_SCALE, zero=0)
    pooled = graph.quantize(graph.node("GlobalAveragePool", [hidden], "pool"), "pool_q", 0.03, zero=0)
    flat = graph.quantize(graph.node("Flatten", [pooled], "flat"), "flat_q", 0.03, zero=0)
    logits = graph.gemm(flat, "fc", 0.03, classes)
    if output_pair:
        logits = graph.quantize(logits, "logits_q", LOGITS_SCALE)
    graph.save(path, logits, [batch, 16, 8, 8], 2)
    return graph
