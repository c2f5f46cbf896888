"""Tests of module calls: which modules become nodes, which are traced into, and their hooks and state."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import pytest
import torch
from captures import Calls, noise_of, same
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from qatkit.graph.trace import trace


def called(graph: fx.GraphModule) -> list[str]:
    """Returns the paths of the modules that the graph calls."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


BOOL = torch.ones(5, 5, dtype=torch.bool).triu(1)
FLOAT = torch.zeros(5, 5).masked_fill(BOOL, float("-inf"))
PAD = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
ATTENTION: dict[str, tuple[dict[str, Any], Any, tuple[Tensor, ...]]] = {
    "self": ({"batch_first": True}, lambda m, x: m(x, x, x)[0], ()),
    "no weights": ({"batch_first": True}, lambda m, x: m(x, x, x, need_weights=False)[0], ()),
    "weights read": ({"batch_first": True}, lambda m, x: m(x, x, x), ()),
    "weights of heads": ({"batch_first": True}, lambda m, x: m(x, x, x, average_attn_weights=False), ()),
    "sequence first": (
        {},
        lambda m, x: m(x.mT.transpose(1, 2).transpose(0, 1), *[x.transpose(0, 1)] * 2)[0],
        (),
    ),
    "keywords": ({"batch_first": True}, lambda m, x: m(query=x, key=x, value=x)[0], ()),
    "mask of booleans": ({"batch_first": True}, lambda m, x: m(x, x, x, attn_mask=BOOL)[0], ()),
    "mask of floats": (
        {"batch_first": True},
        lambda m, x: m(x, x, x, attn_mask=FLOAT, is_causal=True)[0],
        (),
    ),
    "padding": ({"batch_first": True}, lambda m, x, p: m(x, x, x, key_padding_mask=p)[0], (PAD,)),
    "cross": ({"batch_first": True}, lambda m, x, y: m(x, y, y)[0], (noise_of(2, 7, 8, seed=1),)),
    "other keys": (
        {"batch_first": True, "kdim": 6, "vdim": 4},
        lambda m, x, k, v: m(x, k, v)[0],
        (noise_of(2, 7, 6, seed=1), noise_of(2, 7, 4, seed=2)),
    ),
    "bias of keys": ({"batch_first": True, "add_bias_kv": True}, lambda m, x: m(x, x, x)[0], ()),
    "zero attention": ({"batch_first": True, "add_zero_attn": True}, lambda m, x: m(x, x, x)[0], ()),
    "no bias": ({"batch_first": True, "bias": False}, lambda m, x: m(x, x + 1, x)[0], ()),
    "unbatched": ({}, lambda m, x: torch.stack([m(x[:, i], x[:, i], x[:, i])[0] for i in range(5)], 1), ()),
}


@pytest.mark.parametrize("way", ATTENTION)
def test_attention_in_all_forms(way: str) -> None:
    options, function, more = ATTENTION[way]

    def forward(self: Any, x: Tensor, *rest: Tensor) -> Any:
        return function(self.attention, x, *rest)

    x = noise_of(2, 5, 8)
    same(Calls(forward, attention=attention(**options)), (x, *more) if more else x, tolerance=1e-5)


@torch.jit.script
def scripted(x: Tensor, scale: float) -> Tensor:
    """A scripted function."""
    return x * torch.sigmoid(x) * scale


class Swish(torch.autograd.Function):
    """A Swish with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(torch.autograd.Function):
    """An identity with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def apply(function: Any, x: Tensor) -> Any:
    """Returns the result of a function with its own backward pass."""
    return function.apply(x)


def wrapped(x: Tensor, shifts: list[int]) -> Tensor:
    """A function that is a leaf for torch.fx."""
    if shifts[0]:
        x = x + shifts[0]
    return x * 2


fx.wrap("wrapped")
FUNCTIONS: dict[str, Any] = {
    "scripted": lambda self, x: scripted(x, 0.5),
    "autograd": lambda self, x: apply(Swish, x),
    "straight through": lambda self, x: apply(StraightThrough, x) + x,
    "checkpoint": lambda self, x: checkpoint(self.fc, x, use_reentrant=False),
    "checkpoint again": lambda self, x: checkpoint(lambda y: self.fc(y) + y, x, use_reentrant=True),
    "wrapped": lambda self, x: wrapped(x, [1, 0]),
    "numpy function": lambda self, x: x * float(np.prod(x.shape[1:])) / np.sqrt(x.shape[-1]),
    "forward": lambda self, x: self.fc.forward(x),
    "unbound": lambda self, x: nn.Linear.forward(self.fc, x) + nn.Module.__call__(self.fc, x),
    "parameter": lambda self, x: x @ self.fc.weight.T + self.fc.bias,
    "in forward": lambda self, x: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6).eval(), nn.Softmax(-1))(x),
    "as a value": lambda self, x: functools.reduce(lambda y, m: m(y), [self.fc, self.fc], x),
    "data": lambda self, x: F.linear(x, self.fc.weight.data, self.fc.bias.detach()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_all_kinds(name: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        y: Tensor = FUNCTIONS[name](self, self.fc(x))
        return y

    torch.manual_seed(0)
    same(Calls(forward, fc=nn.Linear(6, 6)), noise_of(2, 6))


def test_modules_keep_their_paths_and_a_shared_one_its_own() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU(inplace=True)), shared, nn.Sequential())
    graph = same(model, noise_of(2, 6))
    assert called(graph) == ["0.0", "0.1", "0.0", "2"]


def test_calls_by_keyword_and_with_flags() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor, *, twice: bool = False, extra: Any = None) -> dict[str, Any]:
            y = self.conv(input=images)
            return {"y": y * 2 if twice else y, "extra": extra}

    def forward(self: Any, x: Any) -> Any:
        y: Tensor = self.inner(images=x, twice=True, extra=object())["y"]
        return self.pool(input=y) if y.ndim == 4 else y

    graph = same(Calls(forward, inner=Inner(), pool=nn.MaxPool2d(2)), noise_of(2, 3, 8, 8))
    assert called(graph) == ["inner.conv", "pool"]


class Same(nn.Conv2d):
    """A convolution with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        pad = self.kernel_size[0] - 1
        return F.conv2d(F.pad(x, (pad // 2, pad - pad // 2) * 2), self.weight, self.bias)


class Named(nn.Linear):
    """A Linear that differs only in its constructor."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


def test_derived_modules() -> None:
    graph = same(nn.Sequential(Same(3, 4, 3), Named(8)), noise_of(2, 3, 8, 8))
    assert called(graph) == ["1"]


def test_hooks_are_part_of_the_function() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.ReLU())
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, y: y + args[0])
    model[2].register_forward_hook(lambda m, args, y: seen.append(tuple(y.shape)))
    same(model, noise_of(2, 6))
    assert all(len(shape) == 2 for shape in seen)


class Half(nn.Module):
    """A parametrization that halves a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        parametrizations.spectral_norm,
        lambda m: parametrize.register_parametrization(m, "weight", Half()),
        nn.utils.weight_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        lambda m: prune.random_structured(m, "weight", 1, dim=0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_computed_weights(change: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    change(model[0])
    same(model.eval(), noise_of(2, 6), tolerance=1e-5)


def cells(self: Any, x: Any) -> Any:
    h = c = x.new_zeros(x.shape[0], 4)
    for t in range(x.shape[1]):
        h, c = self.cell(x[:, t], (h, c))
    return h


def gru_cells(self: Any, x: Any) -> Any:
    h, found = None, []
    for step in x.unbind(1):
        h = self.gru(step, h)
        found.append(h)
    return torch.stack(found, dim=1)


def ode(self: Any, x: Any) -> Any:
    y = x[:, 0]
    for t in np.linspace(0, 1, 4):
        k = torch.tanh(self.fc(y))
        y = y + 0.25 * (k + float(t) * self.fc(k))
    return y


def lstm(self: Any, x: Any) -> Any:
    y, (h, c) = self.lstm(x)
    return y[:, -1], h.transpose(0, 1), c.squeeze(0)


def lstm_with_state(self: Any, x: Any) -> Any:
    state = (torch.zeros(1, x.size(0), 4), torch.zeros(1, x.size(0), 4, device=x.device))
    return self.lstm(x, state)[0].mean(1)


def counted(self: Any, x: Any) -> Any:
    """Updates buffers that do not affect the output."""
    self.steps += 1
    self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    y: Tensor = self.fc(x)
    return y


@pytest.mark.parametrize("function", [cells, gru_cells, ode, lstm, lstm_with_state, counted])
def test_loops_over_time_and_state(function: Any) -> None:
    torch.manual_seed(0)
    model = Calls(
        function,
        cell=nn.LSTMCell(6, 4),
        gru=nn.GRUCell(6, 4),
        fc=nn.Linear(6, 6),
        lstm=nn.LSTM(6, 4, batch_first=True),
    )
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mean", torch.zeros(6))
    same(model, noise_of(2, 5, 6), tolerance=1e-5)


def test_state_that_reaches_the_output_is_noted() -> None:
    """The graph computes what the first call does, every time, so a note names the buffer."""

    def forward(self: Any, x: Any) -> Any:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y: Tensor = self.fc(x - self.mean)
        return y

    model = Calls(forward, fc=nn.Linear(6, 6))
    model.register_buffer("mean", torch.zeros(6))
    graph = same(model, noise_of(2, 6))
    assert any(where == "mean" and "call" in reason for where, reason in graph.meta["notes"])


def test_a_cache_that_is_overwritten_is_no_state() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.cache[:] = self.fc(x).mean(0)
        return x + self.cache

    model = Calls(forward, fc=nn.Linear(6, 6))
    model.register_buffer("cache", torch.zeros(6))
    graph = same(model, noise_of(2, 6))
    assert not graph.meta["notes"]


def test_tensors_that_are_plain_attributes() -> None:
    def forward(self: Any, x: Any) -> Any:
        y: Tensor = self.fc(x) * self.scale + sum(self.tables) + self.named["shift"]
        return y

    state = {"scale": torch.tensor(2.0), "tables": [noise_of(6), noise_of(6, seed=1)]}
    same(Calls(forward, fc=nn.Linear(6, 6), named={"shift": noise_of(6, seed=2)}, **state), noise_of(2, 6))


def test_a_compiled_model_is_run_as_it_was_written() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("compiled")

    model = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), backend=never)
    x = noise_of(2, 6)
    graph = trace(cast(nn.Module, model), x)
    torch.testing.assert_close(graph(x), cast(Any, model)._orig_mod(x))
