"""Tests of random outputs that capture draws instead of calling a module: same shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import Calls, noise_of, same
from torch import Tensor, nn

from qatkit.graph.capture.sizes import drawn_output


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 5), (4, 6)),
        (nn.Linear(6, 5), (6,)),
        (nn.Linear(6, 5, bias=False), (2, 3, 4, 6)),
        (nn.Conv1d(6, 4, 3, stride=2), (2, 6, 20)),
        (nn.Conv2d(6, 4, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1)), (2, 6, 13, 17)),
        (nn.Conv2d(6, 12, 7, padding=3, groups=6), (1, 6, 9, 9)),
        (nn.Conv3d(3, 4, 2, stride=2), (2, 3, 7, 8, 9)),
    ],
)
def test_shape_and_type_are_those_of_the_module(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = noise_of(*shape)
    drawn, wanted = drawn_output(module, (x,), {}), module(x)
    assert drawn is not None
    assert (drawn.shape, drawn.dtype, drawn.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    assert drawn.std() > 0.1


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(6, 5), torch.ones(2, 7)),
        (nn.Linear(6, 5), torch.ones(2, 6, dtype=torch.float64)),
        (nn.Conv2d(6, 4, 3), torch.ones(2, 5, 9, 9)),
        (nn.Conv2d(6, 4, 3), torch.ones(6, 9, 9)),
        (nn.Conv2d(6, 4, 3), torch.ones(2, 6, 2, 9)),
        (nn.Conv2d(6, 4, 3, padding="same"), torch.ones(2, 6, 9, 9)),
        (nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), torch.ones(2, 6, 9, 9)),
        (nn.Conv2d(6, 4, 3), torch.ones(2, 6, 9, 9).to(memory_format=torch.channels_last)),
        (nn.ReLU(), torch.ones(2, 6)),
    ],
)
def test_what_else_there_is_is_run(module: nn.Module, x: Tensor) -> None:
    """For invalid calls, and for valid ones of forms that are not supported, no output is drawn."""
    assert drawn_output(module, (x,), {}) is None


def test_what_depends_on_parameters_alone_is_computed() -> None:
    """Values that depend on parameters alone may be read: here, a Linear computes the number of steps."""

    def forward(self: Any, x: Any) -> Any:
        for _ in range(int(self.steps(torch.ones(1)).item())):
            x = self.fc(x)
        return x

    steps = nn.Linear(1, 1)
    nn.init.constant_(steps.weight, 2.0)
    nn.init.constant_(steps.bias, 1.25)
    graph = same(Calls(forward, steps=steps, fc=nn.Linear(6, 6)), noise_of(2, 6))
    assert sum(node.target == "fc" for node in graph.graph.nodes) == 3
