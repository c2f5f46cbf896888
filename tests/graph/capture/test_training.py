"""Checks that random operations of training are active in the graph's training mode only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from captures import Calls, noise_of, same
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.capture.training import TrainingOnly
from qatkit.graph.fuse import fuse
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

DROPOUTS = [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout]


def differs(graph: Any, *x: Tensor) -> bool:
    """Returns whether two calls give different results."""
    return not torch.equal(graph(*x), graph(*x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", DROPOUTS)
def test_functional_dropout_follows_the_mode(function: Callable[..., Tensor], training: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return function(self.fc(x), self.rate, self.training)

    model = Calls(forward, fc=nn.Linear(6, 6), rate=0.25).train(training)
    x = noise_of(4, 64, 8, 8, 6) if function is F.dropout3d else noise_of(4, 64, 6)
    graph = same(model, x, sizes=(3,))
    torch.manual_seed(0)
    expected = model.train()(x)
    found = graph.train()(x)
    assert not torch.equal(found, graph.eval()(x))
    for one, other in ((found.std(), expected.std()), (found.mean(), expected.mean())):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
    graph.eval()
    assert not differs(graph, x)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "keywords": lambda self, x: F.dropout(x, p=0.5, training=self.training),
    "inner mode": lambda self, x: F.dropout(x, 0.5, self.fc.training),
    "in place": lambda self, x: F.dropout(x * 1, 0.5, self.training, True),
    "torch.dropout": lambda self, x: torch.dropout(x, 0.5, self.training),
    "if training": lambda self, x: F.dropout(x, 0.5) if self.training else x,
    "rate of zero in inference": lambda self, x: F.dropout(x, 0.5 if self.training else 0.0),
    "attention": lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training),
    "attention by position": lambda self, x: F.scaled_dot_product_attention(
        x, x, x, None, 0.5 if self.training else 0.0
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_writing_dropout(way: str, training: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return WAYS[way](self, self.fc(x))

    x = noise_of(2, 5, 6)
    graph = same(Calls(forward, fc=nn.Linear(6, 6)).train(training), x)
    graph.eval()
    assert not differs(graph, x)
    noted = graph.meta["notes"]
    if way == "if training":  # the graph has no dropout at all
        assert "which the graph leaves out" in noted[0][1]
        return
    assert not noted
    if way.startswith("attention"):  # dropout becomes a module when attention is decomposed
        graph = stub(fuse(graph, x).graph, x).graph
    assert differs(graph.train(), x)
    graph.eval()
    assert not differs(graph, x)


class DropPath(nn.Module):
    """Drops whole samples, only in training."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(len(x), *[1] * (x.ndim - 1)) >= self.rate
        return x * keep / (1 - self.rate)


class Noise(nn.Module):
    """Adds noise in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + torch.randn_like(x)
        return x


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [DropPath, Noise])
def test_own_modules_of_training_are_live(kind: type[nn.Module], training: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return x + self.drop(self.fc(x)) + self.drop(x)

    model = Calls(forward, fc=nn.Linear(6, 6), drop=kind()).train(training)
    x = noise_of(8, 6)
    graph = same(model, x)
    assert any(isinstance(module, TrainingOnly) for module in graph.modules())
    assert differs(graph.train(), x)
    graph.eval()
    assert not differs(graph, x)
    assert not graph.meta["notes"]


def test_noise_written_inline_is_noted() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.training:
            x = x + torch.randn_like(x)
        y: Tensor = self.fc(x)
        return y

    graph = same(Calls(forward, fc=nn.Linear(6, 6)), noise_of(2, 6))
    assert graph.meta["notes"][0][0] == "x = x + torch.randn_like(x)"


def draws(x: Any) -> Any:
    return x + torch.randn(6)


def draws_like(x: Any) -> Any:
    return x + torch.rand_like(x)


def draws_in_place(x: Any) -> Any:
    return x + torch.empty_like(x).normal_()


def draws_a_choice(x: Any) -> Any:
    return x[:, torch.randperm(6)]


def always_drops(x: Any) -> Any:
    return F.dropout(x, 0.5, True)


def bernoulli(x: Any) -> Any:
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def gumbel(x: Any) -> Any:
    return F.gumbel_softmax(x)


def leaky(x: Any) -> Any:
    return F.rrelu(x, training=True)


def drops_attention(x: Any) -> Any:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)


def new_weights(x: Any) -> Any:
    y: Tensor = nn.Linear(6, 6)(x)
    return y


RANDOM = [
    draws, draws_like, draws_in_place, draws_a_choice, always_drops, bernoulli, gumbel, leaky, drops_attention,
    new_weights,
]  # fmt: skip


@pytest.mark.parametrize("function", RANDOM)
def test_random_numbers_in_inference_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Any, x: Any) -> Any:
        return function(self.fc(x))

    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(ConfigError, match=rf"test_training\.py:{line} .*random numbers"):
        trace(Calls(forward, fc=nn.Linear(6, 6)), noise_of(2, 6))


def test_random_numbers_that_nobody_reads_do_not_matter() -> None:
    def forward(self: Any, x: Any) -> Any:
        torch.randn(3)
        y: Tensor = self.fc(x)
        return y

    same(Calls(forward, fc=nn.Linear(6, 6)), noise_of(2, 6))


def test_capture_draws_nothing_from_the_generator() -> None:
    def forward(self: Any, x: Any) -> Any:
        return F.dropout(self.fc(x), 0.5, self.training)

    model = Calls(forward, fc=nn.Linear(6, 6))
    state = torch.get_rng_state()
    trace(model, noise_of(2, 6))
    assert torch.equal(torch.get_rng_state(), state)


class DropsPatches(nn.Module):
    """Keeps half of the tokens in training, and all of them in inference."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2] if self.training else x


def test_a_module_that_reshapes_in_training_is_skipped_and_noted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), DropsPatches(), nn.Linear(4, 4)).eval()
    x = torch.randn(2, 6, 4)
    graph = trace(model, x)
    torch.testing.assert_close(graph.eval()(x), model(x))
    assert graph.train()(x).shape == (2, 6, 4)
    assert [path for path, _ in graph.meta["notes"]] == ["1"]


def test_a_buffer_that_training_changes_is_noted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.fc(x))
        if m.training:
            m.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return cast(Tensor, y - m.mean)

    model = Calls(forward, fc=nn.Linear(6, 6), norm=nn.BatchNorm1d(6))
    model.register_buffer("mean", torch.zeros(6))
    graph = trace(model, noise_of(4, 6))
    assert [name for name, _ in graph.meta["notes"]] == ["mean"]
    assert not model.get_buffer("mean").any()
