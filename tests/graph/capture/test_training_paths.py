"""Tests of parameters that only training uses: the graph includes them, or a note names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branched_nets import BLOCKS, branched
from captures import Calls, noise_of, same
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.capture.training_paths import PATHS

ONE_PATH = ("all branches", "computed kernel", "flag of its own")
X = noise_of(2, 3, 32, 32)


def trainable(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("name", BLOCKS)
def test_branches_are_in_the_graph(name: str) -> None:
    model = branched(name)
    graph = same(model, X)
    assert trainable(model) == trainable(graph)
    assert not any(name.split(".")[1] == "deployed" for name, _ in graph.named_parameters())
    assert graph.meta[PATHS] == (() if name in ONE_PATH else ("one", "three", "two"))
    assert not graph.meta["notes"]


def auxiliary(**heads: nn.Module) -> nn.Module:
    """Returns a convolution with heads that are only called in training."""

    def forward(self: Any, x: Tensor) -> Any:
        y = self.conv(x)
        return (y, *(getattr(self, name)(y) for name in heads)) if self.training else y

    return Calls(forward, conv=nn.Conv2d(3, 4, 3), **heads)


def test_heads_of_training_are_named() -> None:
    head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    graph = same(auxiliary(head=head), X)
    ((name, reason),) = graph.meta["notes"]
    assert name == "head" and "only in the model's training mode" in reason and "\n" not in reason
    assert trainable(graph) == {"conv.weight", "conv.bias"}


def test_many_heads_are_one_line() -> None:
    graph = same(auxiliary(**{f"head{i}": nn.Conv2d(4, 2, 1) for i in range(7)}), X)
    ((name, _),) = graph.meta["notes"]
    assert name == "head0, head1, head2, head3 and 3 more"


class Scaled(nn.Module):
    """A convolution with a scale that only its parent uses, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, 3, 1, 1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


def test_a_parameter_that_another_module_uses_is_named() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.conv(x)
        return (y, y * self.conv.scale) if self.training else y

    ((name, _),) = same(Calls(forward, conv=Scaled()), X).meta["notes"]
    assert name == "conv.scale"


def test_frozen_and_unused_parameters_are_not_named() -> None:
    model = auxiliary(head=nn.Conv2d(4, 2, 1).requires_grad_(False))
    model.spare = nn.Linear(3, 3)
    assert not same(model, X).meta["notes"]


def test_a_model_that_wants_targets_gets_no_note() -> None:
    def forward(self: Any, x: Tensor, targets: Any = None) -> Any:
        y = self.conv(x)
        if not self.training:
            return y
        return F.mse_loss(self.head(y), targets)

    model = Calls(forward, conv=nn.Conv2d(3, 4, 3), head=nn.Conv2d(4, 2, 1))
    assert not same(model, X).meta["notes"]


class Stale(nn.Module):
    """A block that runs an outdated merged copy of its branches in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.deployed = nn.Conv2d(3, 4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x) + self.two(x) if self.training else self.deployed(x)
        return y


def test_a_copy_that_differs_stays_and_is_named() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.last(self.block(x))

    graph = same(Calls(forward, block=Stale(), last=nn.Conv2d(4, 4, 1)), X)
    ((name, reason),) = graph.meta["notes"]
    assert name == "block" and "differs by" in reason
    assert graph.meta[PATHS] == () and "block.deployed.weight" in dict(graph.named_parameters())


def test_the_model_itself_may_be_the_block() -> None:
    block = BLOCKS["chain"](3, 4)
    graph = same(block, X, tolerance=2e-6)  # oneDNN sums in another order with AVX-512 than with AVX2
    assert graph.meta[PATHS] == ("",) and trainable(graph) == trainable(block)


def test_heads_beside_blocks_are_told_apart() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.block(x)
        return (y, self.head(y)) if self.training else y

    graph = same(Calls(forward, block=BLOCKS["chain"](3, 4), head=nn.Conv2d(4, 2, 1)), X)
    assert graph.meta[PATHS] == ("block",)
    assert [name for name, _ in graph.meta["notes"]] == ["head"]


class Follows(nn.Module):
    """A norm that updates its statistics in training without raising the version counters of the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.batch_norm(x, self.mean, self.var, training=self.training)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(3), Follows], ids=["torch's", "its own"])
def test_statistics_behind_detached_features_stay(norm: Any) -> None:
    """Since only the second head trains the features, capture runs the norm in training mode as well.

    The statistics must be as before.
    """

    def forward(self: Any, x: Tensor) -> Any:
        y = self.norm(x)
        one = self.one(y.detach())
        return (one, self.many(y)) if self.training else one

    model = Calls(forward, norm=norm(), one=nn.Conv2d(3, 4, 1), many=nn.Conv2d(3, 4, 1)).eval()
    kept = {name: value.clone() for name, value in model.named_buffers()}
    graph = same(model, X + 3)
    for name, value in graph.named_buffers():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=0)
