"""AIMET encodings and the float network that they belong to (`tests/records/aimet/README.md`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SAMPLES = Path(__file__).parent / "records" / "aimet"


def drawn(name: str, *shape: int, scale: float = 0.3, step: float = 1.7) -> onnx.TensorProto:
    """Returns a constant sampled from a sine wave, so that it does not depend on a random generator."""
    values = np.sin(np.arange(np.prod(shape)) * step) * scale
    return numpy_helper.from_array(values.astype(np.float32).reshape(shape), name)


def network(path: Path) -> Path:
    """Writes a model of two Convs and a Gemm whose tensor names contain dots, slashes and colons."""
    node = helper.make_node
    same = [1, 1, 1, 1]
    nodes = [
        node("Conv", ["input", "first.weight", "first.bias"], ["features/first:0"], "first", pads=same),
        node("Relu", ["features/first:0"], ["features/relu:0"], "relu"),
        node(
            "Conv",
            ["features/relu:0", "second.weight"],
            ["features/second.out"],
            "features/second",
            pads=same,
        ),
        node("GlobalAveragePool", ["features/second.out"], ["pooled"], "pool"),
        node("Flatten", ["pooled"], ["flat"], "flatten"),
        node("Gemm", ["flat", "fc.weight", "fc.bias"], ["output"], "fc", transB=1),
    ]
    given = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 8, 8])
    result = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 10])
    constants = [
        drawn("first.weight", 8, 3, 3, 3),
        drawn("first.bias", 8),
        drawn("second.weight", 32, 8, 3, 3, scale=0.1, step=0.9),
        drawn("fc.weight", 10, 32, step=2.3),
        drawn("fc.bias", 10),
    ]
    graph = helper.make_graph(nodes, "net", [given], [result], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path
