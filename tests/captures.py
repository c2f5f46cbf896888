"""Helpers for tests of the capture: models made from a function, and the comparison of graph and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.signature import (
    Example,
    batch_axes,
    call,
    flatten,
    other_values,
    output_leaves,
    resized,
    unflatten,
)
from qatkit.graph.trace import copy_of, trace


class Of(nn.Module):
    """A model that calls a function between two Linears of 6 features; keywords become attributes.

    The second Linear is skipped if the function does not return a float tensor of 6 features.
    """

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        y = self.function(self.before(x), *more)
        return (
            self.after(y) if isinstance(y, Tensor) and y.shape[-1:] == (6,) and y.is_floating_point() else y
        )


class Calls(nn.Module):
    """A model whose forward calls `function(self, *inputs)`; keywords become modules and attributes."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def noise_of(*shape: int, seed: int = 0) -> Tensor:
    """Returns standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(model: Callable[..., Any], example: Example) -> tuple[Tensor, ...]:
    """Returns the output tensors of a model as a flat tuple."""
    with torch.no_grad():
        return output_leaves(call(model, example))[1]


def same(
    model: nn.Module, example: Example, sizes: Sequence[int] = (1, 5), tolerance: float = 1e-6
) -> fx.GraphModule:
    """Returns the graph of `model` after checking that both agree.

    They are compared in evaluation mode, on the example and, if it has a batch axis, on other values at other
    batch sizes.
    """
    training = model.training
    graph = trace(model, example)
    assert graph.training is training
    model.eval()
    graph.eval()
    tensors = flatten(example)
    taken = [tensors]
    if any(axis is not None for axis in graph.meta["batch_axes"]):
        axes = batch_axes(tensors)
        taken += [other_values(resized(tensors, size, axes), seed=size) for size in sizes]
    for given in taken:
        expected = results(copy_of(model), unflatten(example, [t.clone() for t in given]))
        with torch.no_grad():
            found = graph(*[t.clone() for t in given])
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return graph.train(training)
