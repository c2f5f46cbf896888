"""Small ONNX files whose nodes and tensors have odd names.

The names contain colons, slashes, brackets, spaces, JSON or qatkit's selector prefixes. Each file is
quantized as by `export.py`. `Read` then finds the operators that stay float and the type, scale and
zero_point of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx_models import FLOAT, save
from torch import Tensor
from written import Written, write

from qatkit.config.schema import BackendConfig, OverrideConfig
from qatkit.config.selectors import every_override

# Nodes of each file: operator, name, inputs, output. The weight of a node with output NAME is called NAME.w.
FILES: dict[str, list[tuple[str, str, list[str], str]]] = {
    "colons": [
        ("Conv", "net/conv:0", ["x:0"], "a:0"),
        ("Relu", "net/relu:0", ["a:0"], "r:0"),
        ("Conv", "net/left:0", ["r:0"], "b:0"),
        ("Conv", "net/right:0", ["r:0"], "c:0"),
        ("Add", "net/add:0", ["b:0", "c:0"], "s:0"),
        ("GlobalAveragePool", "pool", ["s:0"], "p:0"),
        ("Flatten", "flat", ["p:0"], "f:0"),
        ("Gemm", "head/fc:0", ["f:0"], "y"),
    ],
    "json": [
        ("Conv", '{"a":1}', ["x:0"], "{1}"),
        ("Conv", '{"a":2}', ["{1}"], "{2}"),
        ("Conv", "block[0]", ["{2}"], "[0]"),
        ("Conv", "block[1]", ["[0]"], "[1]"),
        ("Conv", "block0", ["[1]"], "y"),
    ],
    "dots": [
        ("Conv", "layer.0.conv", ["x:0"], "h.0"),
        ("Relu", "layer.0.relu", ["h.0"], "h.0.r"),
        ("Conv", "layer.1.conv", ["h.0.r"], "h.1"),
        ("Conv", "layer.10.conv", ["h.1"], "h.10"),
        ("Conv", "größe der 面", ["h.10"], "y"),
    ],
    "prefixes": [
        ("Conv", "op/conv", ["x:0"], "t1"),
        ("Conv", "re/a.*", ["t1"], "t2"),
        ("ConvTranspose", "a*", ["t2"], "t3"),
        ("Conv", "ab", ["t3"], "t4"),
        ("Conv", "tensor/t1", ["t4"], "y"),
    ],
}
_CHANNELS = 4


def build(folder: Path, name: str) -> Path:
    """Writes the file `name` of FILES."""
    draw = np.random.default_rng(0)
    nodes, constants = [], {}
    for kind, label, inputs, output in FILES[name]:
        given, more = list(inputs), dict[str, Any]()
        if kind in ("Conv", "ConvTranspose", "Gemm"):
            channels = 3 if inputs == ["x:0"] else _CHANNELS
            shape = (_CHANNELS, 5) if kind == "Gemm" else (_CHANNELS, channels, 3, 3)
            constants[f"{output}.w"] = draw.normal(0, 0.3, shape).astype(np.float32)
            given.append(f"{output}.w")
            more = {} if kind == "Gemm" else {"pads": [1] * 4}
        nodes.append(helper.make_node(kind, given, [output], label, **more))
    return save(folder / f"{name}.onnx", nodes, {"x:0": (FLOAT, ["n", 3, 6, 6])}, ["y"], constants)


def feeds() -> dict[str, Tensor]:
    """Returns an input that fits each of the files."""
    return {"x:0": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))}


def quantized(folder: Path, name: str, backend: Mapping[str, Any]) -> Written:
    """Quantizes a file with the overrides, exclude, only and subgraphs of `backend`."""
    overrides = {one: OverrideConfig(**given) for one, given in backend.get("overrides", {}).items()}
    asked = BackendConfig(**{**backend, "overrides": overrides})
    return write(build(folder, name), feeds(), batches=1, overrides=every_override(asked))


def matched(written: Written) -> list[list[str]]:
    """Returns the names that each selector matched, as in the report."""
    return [one["names"] for one in written.module.graph.meta["matched"]]


class Read:
    """A written file, read with onnx."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path).graph
        self.nodes = list(graph.node)
        self.made = {output: node for node in graph.node for output in node.output}
        self.constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}

    def in_float(self) -> set[str]:
        """Returns the names of weighted operators and Adds that stay float.

        They have an input that is not dequantized or, for Adds, an output that is not quantized.
        """
        kinds = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
        rounded = {name for n in self.nodes if n.op_type == "QuantizeLinear" for name in n.input[:1]}
        return {
            n.name
            for n in self.nodes
            if n.op_type in kinds
            and not (
                all(map(self._dequantized, n.input[:2])) and (n.op_type != "Add" or n.output[0] in rounded)
            )
        }

    def _dequantized(self, name: str) -> bool:
        return name in self.made and self.made[name].op_type == "DequantizeLinear"

    def activation(self, tensor: str) -> tuple[str, float, int]:
        """Returns the type, scale and zero_point with which a tensor is quantized."""
        node = next(n for n in self.nodes if n.op_type == "QuantizeLinear" and n.input[0] == tensor)
        scale, zero = (self.constants[name] for name in node.input[1:3])
        return str(zero.dtype), float(scale), int(zero)

    def weight(self, name: str) -> tuple[str, list[float]]:
        """Returns the type and the scales of an operator's weight."""
        node = next(n for n in self.nodes if n.name in (name, f"{name}_Conv"))  # of a ConvTranspose
        pair = self.made[node.input[1]]
        while pair.op_type != "DequantizeLinear":
            pair = self.made[pair.input[0]]
        return str(self.constants[pair.input[0]].dtype), self.constants[pair.input[1]].ravel().tolist()
