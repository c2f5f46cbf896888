"""Networks for `backend=npu_cnn`, and a reader of the scales in a file, which uses only onnx."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import NodeProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

FUSED = ("Relu", "Clip", "LeakyRelu", "PRelu", "Gelu")
_MOVES = ("MaxPool", "Pad", "Slice", "Split", "Transpose", "Reshape", "Flatten", "Concat", "AveragePool",
          "GlobalAveragePool")  # fmt: skip


class EveryKind(nn.Module):
    """Every activation after a convolution or sum, and every operator that shares a scale with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.up, self.join = nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(16, 8, 1)
        self.leaky, self.slopes, self.gelu = nn.LeakyReLU(0.1), nn.PReLU(8), nn.GELU()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.leaky(self.stem(x)), 2)
        left, right = self.slopes(self.left(x)), F.relu6(self.right(x))
        x = torch.cat([left, right], 1)
        x = F.relu(self.join(x) + F.avg_pool2d(left, 3, 1, 1))
        x = self.gelu(self.up(F.pad(x, (1, 1, 1, 1))))[:, :, 1:, :].transpose(2, 3)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.last(F.relu(self.first(x)))  # type: ignore[no-any-return]


class OutOfBounds(nn.Module):
    """A network that needs shifts beyond those of the hardware.

    One weight needs a far smaller scale than its output and one a far larger scale; the inputs of a sum differ widely
    in scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.small = (nn.Conv2d(3, 3, 1) for _ in range(3))
        with torch.no_grad():
            for conv in (self.fine, self.coarse, self.small):
                conv.bias = nn.Parameter(torch.zeros(3))
                conv.weight.zero_()
            self.fine.weight[:, 0] = 1e-4
            self.fine.bias = nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))  # determines the output's range
            # Two nearly equal channels are subtracted.
            self.coarse.weight[:, 0], self.coarse.weight[:, 1] = 64.0, -64.0
            self.small.weight[:, 2] = 2.0**-9

    def forward(self, x: Tensor) -> Tensor:
        return self.fine(x) + F.relu(self.small(x)) + F.relu(self.coarse(x))  # type: ignore[no-any-return]

    @staticmethod
    def images(count: int) -> Tensor:
        """Returns images [count, 3, 8, 8] whose first two channels differ by one part in 2000."""
        drawn = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(3))
        drawn[:, 1] = drawn[:, 0] * (1 - 1 / 2000)
        return drawn


@dataclass
class Pairs:
    """A quantized file, with look-ups by tensor name."""

    path: Path

    def __post_init__(self) -> None:
        self.graph = onnx.load(str(self.path)).graph
        self.constants = {one.name: numpy_helper.to_array(one) for one in self.graph.initializer}
        self.made = {name: node for node in self.graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def of(self, *kinds: str) -> list[NodeProto]:
        """Returns the nodes of these operator types."""
        return [node for node in self.graph.node if node.op_type in kinds]

    def position(self, pair: NodeProto) -> int:
        """Returns p of the single scale 2^-p of a QuantizeLinear or DequantizeLinear."""
        scale = self.constants[pair.input[1]]
        assert scale.size == 1 and np.frexp(scale.item())[0] == 0.5
        return -round(math.log2(scale.item()))

    def before(self, node: NodeProto, at: int = 0) -> NodeProto | None:
        """Returns the DequantizeLinear of an input, or None; a convolution may have a Pad between the two."""
        found = self.made.get(node.input[at])
        if found is not None and found.op_type == "Pad" and node.op_type.startswith("Conv"):
            return self.before(found)
        return found if found is not None and found.op_type == "DequantizeLinear" else None

    def after(self, node: NodeProto) -> NodeProto | None:
        """Returns the QuantizeLinear of the output, after a fused activation if there is one."""
        readers = self.readers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type in FUSED:
            return self.after(readers[0])
        return next((one for one in readers if one.op_type == "QuantizeLinear"), None)

    def unequal(self) -> list[str]:
        """Returns the names of the operators whose inputs and output should share a scale but do not."""
        found = []
        for node in self.of(*_MOVES):
            around = [self.before(node, at) for at in range(len(node.input))] + [self.after(node)]
            if len({self.position(one) for one in around if one is not None}) > 1:
                found.append(node.name)
        return found

    def cuts(self) -> dict[str, int]:
        """Returns, for each Conv, ConvTranspose and Gemm by name, the shift from the sum of products to the output."""
        found = {}
        for node in self.of("Conv", "ConvTranspose", "Gemm"):
            source, weight, after = self.before(node), self.before(node, 1), self.after(node)
            assert source is not None and weight is not None and after is not None, node.name
            found[node.name] = self.position(weight) + self.position(source) - self.position(after)
        return found

    def bias_shifts(self) -> list[int]:
        """Returns the shift from each bias to the sum of products."""
        found = []
        for node in self.of("Conv", "ConvTranspose", "Gemm"):
            pairs = [self.before(node, at) for at in range(3)]
            source, weight, bias = (self.position(one) for one in pairs if one is not None)
            found.append(weight + source - bias)
        return found

    def reads(self) -> list[int]:
        """Returns, for each Add, the difference between the positions of its inputs."""
        found = []
        for node in self.of("Add"):
            pairs = [self.before(node, at) for at in range(2)]
            positions = [self.position(one) for one in pairs if one is not None]
            found.append(max(positions) - min(positions))
        return found
