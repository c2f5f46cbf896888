"""Networks of one operator with tiny weights and a huge bias in one channel, and bounds on their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from chain import noise
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

TINY, CHANNEL = 1e-7, 2
# Biases that do not fit int32 at the scale of the tiny channel, and at that of the whole weight.
HUGE = {"per_channel": 80.0, "per_tensor": 1e6}

OPERATORS: dict[str, Callable[[], Any]] = {
    "conv": lambda: nn.Conv2d(8, 6, 3),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8),
    "transposed": lambda: nn.ConvTranspose2d(8, 6, 2, 2),
    "linear": lambda: nn.Linear(8, 6),
}


def planted(name: str, huge: float = HUGE["per_channel"]) -> tuple[nn.Module, Tensor]:
    """Returns the network, and images to calibrate it with."""
    torch.manual_seed(0)
    operator = OPERATORS[name]()
    axis = int(name == "transposed")
    with torch.no_grad():
        operator.weight.select(axis, CHANNEL).mul_(TINY)
        operator.bias[CHANNEL] = huge
    return nn.Sequential(operator).eval(), noise(64, 8) if name == "linear" else noise(16, 8, 7, 7)


def largest_errors(path: Path, channels: int) -> NDArray[np.float64]:
    """Returns the largest rounding error that a file may have in each output channel.

    Weight, input, bias and output are rounded by up to half a step each, by the scales of the file.
    """
    graph = onnx.load(str(path)).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    node = next(n for n in graph.node if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"))
    pairs: list[Any] = [makers.get(name) for name in node.input]
    s_x, s_w = (constants[pair.input[1]].astype(np.float64) for pair in pairs[:2])
    weight = constants[pairs[1].input[0]].astype(np.float64)
    outputs = 1 if node.op_type == "ConvTranspose" or (node.op_type == "Gemm" and not node.attribute) else 0
    rows = np.abs(np.moveaxis(weight, outputs, 0).reshape(weight.shape[outputs], -1))
    bias = np.abs(constants[pairs[2].input[0]] if pairs[2] is not None else constants[node.input[2]])
    s_b = constants[pairs[2].input[1]].astype(np.float64) if pairs[2] is not None else s_x * s_w
    found = rows.shape[1] * 255 * s_x * s_w / 2 + (rows.sum(1) + rows.shape[1] / 2) * s_w * s_x / 2 + s_b / 2
    reached = bias * (s_b if pairs[2] is not None else 1.0) + rows.sum(1) * s_w * 255 * s_x
    found = found + 2.0**-22 * reached  # rounding errors of float32 sums
    after = [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] in (*node.output,)]
    step = constants[after[0].input[1]] if after else 0.0
    largest: NDArray[np.float64] = (found + step / 2).reshape(channels, -1).max(1)
    return largest
