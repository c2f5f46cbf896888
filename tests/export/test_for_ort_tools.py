"""Tests of every mode on legal files that ONNX Runtime's tools misread or reject, against the float file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import pytest
from onnx import NodeProto, helper

from qatkit.export import ort_modes
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend

# Only mode=static uses the backend's specs.
WAYS = [
    ("dynamic", FBGEMM),
    ("static", FBGEMM),
    ("static", QNNPACK),
    ("float16", FBGEMM),
    ("weight_only", FBGEMM),
]


def node(kind: str, inputs: str, output: str, **settings: Any) -> NodeProto:
    """Returns a node; "-" in `inputs` is an input that is left out."""
    names = [name.replace("-", "") for name in inputs.split()]
    return helper.make_node(kind, names, [output], f"{kind}_{output}", **settings)


@dataclass(frozen=True)
class Case:
    """A network on [N, 3, 8, 8]: `body` computes "f" [N, K] from "input"; a Gemm turns "f" into 10 logits.

    Attributes:
        body: nodes up to "f".
        shapes: shapes of the weights.
        uneven: weights whose channels differ in range, with the axis of these channels.
        head: nodes that replace the last Gemm.
    """

    body: list[NodeProto]
    shapes: dict[str, tuple[int, ...]]
    uneven: dict[str, int] = field(default_factory=dict)
    head: list[NodeProto] = field(default_factory=list)

    def write(self, path: Path) -> Path:
        draw = np.random.default_rng(0)
        weights = {name: draw.normal(size=shape) / 3 for name, shape in self.shapes.items()}
        for name, axis in self.uneven.items():
            shape = [-1 if d == axis else 1 for d in range(len(self.shapes[name]))]
            weights[name] *= np.geomspace(0.05, 5, self.shapes[name][axis]).reshape(shape)
        head = self.head or [node("Gemm", "f fc", "output", transB=1)]
        return float_files.by_hand(path, nodes=[*self.body, *head], weights=weights)


CONV = node("Conv", "input w b", "c", pads=[1, 1, 1, 1])
POOL = [
    node("Relu", "c", "r"),
    node("GlobalAveragePool", "r", "p"),
    node("Flatten", "p", "f"),
]
SHAPES = {"w": (16, 3, 3, 3), "b": (16,), "fc": (10, 16)}
CASES = {
    "one weight, twice by rows": Case(
        [CONV, *POOL[:2], node("Flatten", "p", "a"), node("Gemm", "a s", "d", transB=1), node("Relu", "d", "e"),
         node("Gemm", "e s", "f", transB=1)],
        SHAPES | {"s": (16, 16)}, {"s": 0},
    ),
    "one weight, by rows and by columns": Case(
        [CONV, *POOL[:2], node("Flatten", "p", "a"), node("Gemm", "a s", "d", transB=1), node("Relu", "d", "e"),
         node("MatMul", "e s", "f")],
        SHAPES | {"s": (16, 16)}, {"s": 0},
    ),
    "one weight, by columns and by rows": Case(
        [CONV, *POOL[:2], node("Flatten", "p", "a"), node("Gemm", "a s", "d"), node("Relu", "d", "e"),
         node("Gemm", "e s", "f", transB=1)],
        SHAPES | {"s": (16, 16)}, {"s": 1},
    ),
    "one weight of two convolutions": Case(
        [CONV, node("Relu", "c", "r0"), node("Conv", "r0 s -", "c0", pads=[1, 1, 1, 1]), node("Relu", "c0", "r1"),
         node("Conv", "r1 s", "c1", pads=[1, 1, 1, 1]), node("Relu", "c1", "r"), *POOL[1:]],
        SHAPES | {"s": (16, 16, 3, 3)}, {"s": 0},
    ),
    "beta": Case(
        [CONV, *POOL], SHAPES | {"k": (10,)}, head=[node("Gemm", "f fc k", "output", transB=1, beta=4.0)],
    ),
    "alpha, beta and a bias that is a row": Case(
        [CONV, *POOL], SHAPES | {"k": (1, 10)},
        head=[node("Gemm", "f fc k", "output", transB=1, alpha=0.5, beta=-2.0)],
    ),
    "a bias for all": Case([CONV, *POOL], SHAPES | {"k": ()}, head=[node("Gemm", "f fc k", "output", transB=1)]),
    "a stack of matrices": Case(
        [CONV, node("Relu", "c", "r0"), node("MatMul", "r0 s", "r"), *POOL[1:]], SHAPES | {"s": (16, 8, 12)},
    ),
    "the weight first": Case(
        [CONV, node("Relu", "c", "r0"), node("MatMul", "s r0", "r"), *POOL[1:]], SHAPES | {"s": (12, 8)},
    ),
    "a vector": Case(
        [CONV, node("Relu", "c", "r0"), node("MatMul", "r0 v", "m"),
         node("ReduceMean", "m", "f", axes=[2], keepdims=0)],
        SHAPES | {"v": (8,)},
    ),
    "names that the tools use": Case(
        [node("Conv", "input w w_scale", "input_scale", pads=[1, 1, 1, 1]), node("Relu", "input_scale", "input_scale_"),
         node("Relu", "input_scale_", "r"), *POOL[1:]],
        {"w": (16, 3, 3, 3), "w_scale": (16,), "fc": (10, 16)},
    ),
    "a name as an unnamed node would get": Case(
        [helper.make_node("Conv", ["input", "w", "b"], ["c"], "Relu_1", pads=[1, 1, 1, 1]),
         helper.make_node("Relu", ["c"], ["r"]), *POOL[1:]], SHAPES,
    ),
    **{
        f"transposed convolution, {groups} groups": Case(
            [CONV, node("ConvTranspose", "c up ub", "u", group=groups, strides=[2, 2]), node("Relu", "u", "r"),
             *POOL[1:]],
            SHAPES | {"up": (16, 16 // groups, 2, 2), "ub": (16,)},
        )
        for groups in (1, 2, 16)
    },
}  # fmt: skip


@pytest.mark.parametrize(("mode", "backend"), WAYS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("name", CASES)
def test_the_file_computes_what_the_float_file_does(
    name: str, mode: str, backend: Backend, tmp_path: Path
) -> None:
    """Logits agree to 2 % of their range (float16: 0.1 %), with and without optimizations."""
    source, target = CASES[name].write(tmp_path / "float.onnx"), tmp_path / "made.onnx"
    images = float_files.digits()[0]
    if mode == "static":
        ort_modes.static(source, target, np.split(images[:256], 4), backend)
    else:
        getattr(ort_modes, mode)(source, target)
    exact = float_files.logits(source, images[:200])
    entries = backend.session_options if mode == "static" else {}
    for optimize in (True, False):
        found = float_files.logits(target, images[:200], optimize=optimize, entries=dict(entries))
        allowed = 0.001 if mode == "float16" else 0.02
        assert np.abs(found - exact).max() < allowed * np.ptp(exact), optimize


def test_channels_of_a_shared_weight_have_scales_of_their_own(tmp_path: Path) -> None:
    path = CASES["one weight of two convolutions"].write(tmp_path / "float.onnx")
    ort_modes.dynamic(path, tmp_path / "made.onnx")
    graph = onnx.load(str(tmp_path / "made.onnx")).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    assert shapes["s_scale"] == (1, 16, 1, 1) and shapes["s_quantized"] == (16, 16, 3, 3)
