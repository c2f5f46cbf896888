"""Checks that ONNX Runtime runs no unnecessary Reshape and few Transposes between two Linears."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import noise, run_ort, run_torch, ship, shipped
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.rows import rows_of
from qatkit.graph.trace import propagate
from qatkit_verify.session import open_session


def optimized(path: Path, folder: Path) -> onnx.GraphProto:
    """Returns a file's graph after the optimizations of ONNX Runtime."""
    open_session(path, threads=1, optimized_path=folder / "optimized.onnx")
    return onnx.load(folder / "optimized.onnx").graph


def makers(graph: onnx.GraphProto, last: str) -> list[str]:
    """Returns the operators from the input to the node `last`, along first operands."""
    made = {output: node for node in graph.node for output in node.output}
    node: Any = next(n for n in graph.node if n.name == last)
    found: list[str] = []
    while node is not None:
        found.insert(0, node.op_type)
        node = made.get(node.input[0])
    return found


def test_nothing_but_the_activation_stands_between_two_linears(tmp_path: Path) -> None:
    """On [N, 3, 4, 12], one Reshape remains before the first Linear and one after the last."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.one(x)).reshape(-1, 12, 24)
            return cast(Tensor, self.three(F.gelu(self.two(x)).reshape(-1, 3, 4, 12)))

    torch.manual_seed(0)
    x = noise(8, 3, 4, 12)
    case = ship(Deep().eval(), x, "deep")
    np.testing.assert_array_equal(run_torch(case.converted, x), run_ort(case.path, x))
    last = next(n for n in onnx.load(case.path).graph.node if n.name == "three/Gemm")
    found = Counter(makers(optimized(case.path, tmp_path), last.name))
    assert found == {"Reshape": 1, "QuantizeLinear": 3, "QGemm": 3, "Gelu": 2}


def test_an_activation_that_others_read_keeps_its_shape() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(x.reshape(2, 2, 6))
            return y.flatten(0, 1), y

    graph = fx.symbolic_trace(Two())
    propagate(graph, noise(4, 6))
    flat = next(n for n in graph.graph.nodes if n.target == "flatten")
    relu = cast(fx.Node, flat.args[0])
    assert rows_of(relu) is relu and relu.all_input_nodes[0].target == "reshape"


@pytest.mark.parametrize("size", [3, 6])
def test_another_last_axis_makes_other_rows(size: int) -> None:
    """A reshape of [4, 6] to [2, 2, 6] keeps the rows; one to [4, 2, 3] does not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["value"] = noise(4, 6)
    shaped = graph.call_method("reshape", (x, -1, 2, size))
    shaped.meta["value"] = noise(24 // 2 // size, 2, size)
    assert rows_of(shaped) is (x if size == 6 else shaped)


def test_attention_turns_its_axes_twice(tmp_path: Path) -> None:
    """One Transpose serves queries, keys and values, one the result. The product absorbs kᵀ and the scale."""
    graph = optimized(shipped("block").path, tmp_path)
    found = Counter(node.op_type for node in graph.node)
    assert (found["Transpose"], found["Split"], found["Mul"], found["FusedMatMul"]) == (2, 1, 0, 1)
    product = next(node for node in graph.node if node.op_type == "FusedMatMul")
    settings = {a.name: onnx.helper.get_attribute_value(a) for a in product.attribute}
    assert settings["transB"] == 1 and settings["alpha"] == 0.5  # 1 / sqrt(16 / 4)


def test_a_norm_behind_bytes_is_fused_and_copies_nothing(tmp_path: Path) -> None:
    class Normed(nn.Module):
        """A LayerNorm over the channels of an int8 convolution, as in ConvNeXt."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 16, 3), nn.LayerNorm(16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(self.norm(self.conv(x).permute(0, 2, 3, 1))))

    torch.manual_seed(0)
    x = noise(4, 3, 8, 8)
    case = ship(Normed().eval(), x, "normed")
    np.testing.assert_allclose(run_torch(case.converted, x), run_ort(case.path, x), atol=1e-5)
    found = Counter(node.op_type for node in optimized(case.path, tmp_path).node)
    assert (found["LayerNormalization"], found["Flatten"], found["Sum"]) == (1, 1, 0)
