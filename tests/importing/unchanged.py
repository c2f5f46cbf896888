"""Compares a quantized file with its source node by node, as if Q/DQ pairs were not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnx_models import Array

_LINKS = ("QuantizeLinear", "DequantizeLinear", "Sum", "Clip")  # operators that may be added on an edge
_PASSING = ("Identity", "Dropout")
_ROUNDING = 1e-6  # rounding of float32, in which biases are divided by their scales


@dataclass
class Graph:
    """A file that is read for a comparison.

    Attributes:
        nodes: nodes by name or first output.
        makers: the node that computes each value.
        constants: values that depend on no input, computed by ONNX Runtime.
    """

    path: Path
    proto: onnx.ModelProto
    nodes: dict[str, onnx.NodeProto]
    makers: dict[str, onnx.NodeProto]
    constants: dict[str, Array]

    @classmethod
    def of(cls, path: Path, known: Collection[str] = ()) -> Graph:
        """Reads a file.

        Args:
            path: the file.
            known: first outputs of the source file's unnamed nodes, which have names in this file.
        """
        proto = onnx.load(str(path))
        nodes = {key(node, known): node for node in proto.graph.node}
        makers = {name: node for node in proto.graph.node for name in node.output}
        return cls(path, proto, nodes, makers, _constants(path, proto))


@dataclass
class Changes:
    """Changes of a file, without Q/DQ pairs and without integer constants within half a step of their floats.

    Attributes:
        gone, new: number of removed and of added nodes, by operator.
        operators: number of nodes with another operator, by (before, after).
        attributes: number of nodes with other attributes, by operator.
        folded: number of convolutions into whose weight and bias the next BatchNormalization is folded.
        weights: names of nodes with a constant, such as a weight, that differs from the source's.
        inputs: names of nodes that read another computed value.
    """

    gone: Counter[str] = field(default_factory=Counter)
    new: Counter[str] = field(default_factory=Counter)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    attributes: Counter[str] = field(default_factory=Counter)
    folded: int = 0
    weights: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)


def key(node: onnx.NodeProto, known: Collection[str] = ()) -> str:
    """Returns a node's name, or its first output if it has no name or the output is in `known`."""
    output = str(node.output[0])
    return output if output in known else str(node.name) or output


def changes(source: Path, target: Path) -> Changes:
    """Compares a quantized file with its source, which must have the same opset."""
    before = Graph.of(source)
    after = Graph.of(target, {name for name, node in before.nodes.items() if not node.name})
    found = Changes()
    for name, node in before.nodes.items():
        if name not in after.nodes and not _is_constant(node, before):
            found.gone[node.op_type] += 1
    for name, node in after.nodes.items():
        if name not in before.nodes and node.op_type not in _LINKS[:2] and not _is_constant(node, after):
            found.new[node.op_type] += 1
    for name in (name for name in before.nodes if name in after.nodes):
        _compare(before, after, name, found)
    return found


def _compare(before: Graph, after: Graph, name: str, found: Changes) -> None:
    a, b = before.nodes[name], after.nodes[name]
    norm = _norm_behind(before, a)
    if norm is not None and key(norm) not in after.nodes:
        found.folded += 1
        wanted = _with_norm(before, a, norm)
        if not all(_same_constant(one, after, b.input[i]) for i, one in enumerate(wanted, 1)):
            found.weights.append(name)
        return
    if a.op_type != b.op_type or a.domain != b.domain:
        found.operators[a.op_type, b.op_type] += 1
    elif sorted(map(str, a.attribute)) != sorted(map(str, b.attribute)):
        found.attributes[a.op_type] += 1
    for place, value in enumerate(a.input):
        other = b.input[place] if place < len(b.input) else ""
        if value in before.constants:
            if not _same_constant(before.constants[value], after, other):
                found.weights.append(name)
        elif _origin(value, before) != _origin(other, after, set(before.makers) | _inputs(before)):
            found.inputs.append(name)


def _inputs(graph: Graph) -> set[str]:
    return {one.name for one in graph.proto.graph.input}


def _origin(value: str, graph: Graph, known: set[str] | None = None) -> str:
    """Follows a value back through Identity and Dropout.

    If `known` is given, also through Q/DQ pairs and each Sum or Clip whose output is not in `known`.
    """
    while value in graph.makers:
        node = graph.makers[value]
        link = (
            node.op_type in _LINKS
            and known is not None
            and (value not in known or node.op_type in _LINKS[:2])
        )
        if not link and node.op_type not in _PASSING:
            return value.removesuffix("_float")
        value = node.input[0]
    return value


def _same_constant(a: Array, after: Graph, other: str) -> bool:
    """Tells whether a constant is the same or, where it is stored as integers, within half a step."""
    if other not in after.constants:
        return False
    b = after.constants[other]
    if a.shape != b.shape:
        return False
    node = after.makers.get(other)
    if node is None or node.op_type != "DequantizeLinear":
        return bool(np.array_equal(a, b))
    scale = after.constants[node.input[1]]
    axis = next((one.i for one in node.attribute if one.name == "axis"), 1)
    view = [-1 if i == axis and scale.ndim else 1 for i in range(a.ndim)]
    return bool((np.abs(a - b) <= scale.reshape(view) * 0.5001 + np.abs(a) * _ROUNDING).all())


def _norm_behind(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Returns the BatchNormalization that is a convolution's only reader, if there is one."""
    readers = [one for one in graph.proto.graph.node if node.output[0] in one.input]
    alone = node.op_type == "Conv" and len(readers) == 1 and readers[0].op_type == "BatchNormalization"
    return readers[0] if alone else None


def _with_norm(graph: Graph, node: onnx.NodeProto, norm: onnx.NodeProto) -> tuple[Array, Array]:
    """Folds a norm into a convolution's weight and bias: (w x + b - mean) gamma / sqrt(var + eps) + beta."""
    weight = graph.constants[node.input[1]].astype(np.float64)
    gamma, beta, mean, variance = (graph.constants[name].astype(np.float64) for name in norm.input[1:5])
    bias = graph.constants[node.input[2]] if len(node.input) > 2 else 0.0
    epsilon = next((one.f for one in norm.attribute if one.name == "epsilon"), 1e-5)
    factor = gamma / np.sqrt(variance + epsilon)
    return weight * factor.reshape(-1, 1, 1, 1), (bias - mean) * factor + beta


def _is_constant(node: onnx.NodeProto, graph: Graph) -> bool:
    return all(name in graph.constants for name in node.output if name)


def _constants(path: Path, proto: onnx.ModelProto) -> dict[str, Array]:
    """Returns the initializers and the values that nodes compute from them alone."""
    found = {one.name: numpy_helper.to_array(one) for one in proto.graph.initializer}
    made: list[str] = []
    known = {*found, ""}
    for node in proto.graph.node:
        bodies = any(one.HasField("g") for one in node.attribute)
        if not bodies and all(name in known for name in node.input):
            known |= set(node.output)
            made += [name for name in node.output if name]
    if made:
        whole = onnx.ModelProto.FromString(proto.SerializeToString())
        del whole.graph.output[:]
        whole.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in made)
        kept = [node for node in whole.graph.node if all(name in known for name in node.output)]
        del whole.graph.node[:], whole.graph.input[:], whole.graph.value_info[:]
        whole.graph.node.extend(kept)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(whole.SerializeToString(), options)
        found |= dict(zip(made, session.run(None, {}), strict=True))
    return found
