"""Tests of training through number formats: gradients at the rounded weights, 0 where they saturate."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from chain import calibrated, noise
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import quantized_operators
from qatkit.quant.backends import SIMULATED
from qatkit.quant.formats.table import FORMATS

# Smallest saturating values in units of the block's scale. Weights do not saturate in other formats.
BEYOND = {
    "mxfp4": 7.0,
    "mxfp6_e2m3": 7.75,
    "mxfp6_e3m2": 30.0,
    "mxfp8_e4m3": 464.0,
    "mxfp8_e5m2": 61440.0,
    "mxint8": 127.5 / 64,
    "bfp16": 127.5 / 64,
}


class Net(nn.Module):
    """A Conv and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 40, 3), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(F.gelu(self.conv(x)).mean((2, 3))))


def saturated(weight: Tensor, name: str) -> Tensor:
    """Returns which values, divided by their block's scale, round beyond the format's largest number.

    Formats that are not in `BEYOND` have scales with which none does.
    """
    if name not in BEYOND:
        return torch.zeros_like(weight, dtype=torch.bool)
    size, emax = FORMATS[name].block or 1, FORMATS[name].element.largest_exponent
    found = torch.zeros_like(weight, dtype=torch.bool)
    for start in range(0, weight.shape[1], size):
        part = weight[:, start : start + size].abs()
        scale = 2.0 ** (torch.floor(torch.log2(part.amax(1, keepdim=True))) - emax)
        found[:, start : start + size] = part / scale >= BEYOND[name]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_trains_through_every_format(name: str) -> None:
    torch.manual_seed(0)
    x, labels = noise(16, 3, 6, 6), torch.arange(16) % 5
    backend = replace(
        SIMULATED,
        weight=replace(SIMULATED.weight, dtype=name),
        activation=replace(SIMULATED.activation, dtype=name),
    )
    graph = calibrated(Net().eval(), x, backend)
    set_phase(graph, observe=False, quantize=True)
    operators = [operator for _, operator, _ in quantized_operators(graph)]

    read: list[Tensor] = []  # rounded inputs of the Linear
    operators[1].register_forward_pre_hook(lambda _, args: read.append(args[0].detach()))
    loss = F.cross_entropy(graph(x), labels)
    loss.backward()
    for operator in operators:
        assert operator.weight.grad is not None and operator.weight.grad.any()
        assert not operator.weight.grad[saturated(operator.weight.detach(), name)].any()
    # PyTorch's gradient of the rounded weight in a float Linear.
    head = operators[1]
    rounded = head.quantized(head.weight, None)[0].detach().requires_grad_()
    F.cross_entropy(F.linear(read[0], rounded, head.bias), labels).backward()
    inside = ~saturated(head.weight.detach(), name)
    assert head.weight.grad is not None and rounded.grad is not None and inside.any()
    torch.testing.assert_close(head.weight.grad[inside], rounded.grad[inside])

    torch.optim.SGD(graph.parameters(), lr=0.1).step()
    assert F.cross_entropy(graph(x), labels) < loss
