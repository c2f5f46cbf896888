"""Tests of the recorder: which properties and values of tensors a model may read, and tensors it creates."""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from captures import Calls, Of, noise_of, same
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.proof import prove
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a case under the function's name, and returns the function."""
    CASES[function.__name__] = function
    return function


@case
def sizes_are_numbers(x: Any) -> Any:
    b, c, h, w = x.shape
    assert type(h) is int
    assert (h, w, x.ndim, x.dim(), len(x.shape)) == (4, 6, 4, 4, 4)
    assert x.size()[2:] == (4, 6)
    assert x.numel() == b * c * h * w
    if h > 3 and w % 2 == 0:
        x = x * 2
    for i in range(h):
        x = x + i
    pad = int(np.ceil(h / 3)) * 3 - h
    return F.pad(x, (0, 0, 0, pad))[:, :, : math.prod((h, 1))] * len(x)


@case
def kinds_are_asked(x: Any) -> Any:
    assert isinstance(x, Tensor)
    assert torch.is_tensor(x)
    assert type(x) is Tensor
    assert not isinstance(x, (list, tuple))
    assert x.is_floating_point()
    assert not x.is_cuda
    assert x.device.type == "cpu"
    assert x.dtype is torch.float32
    jit: Any = torch.jit
    assert not jit.is_tracing()
    assert not jit.is_scripting()
    assert not torch.onnx.is_in_onnx_export()
    assert f"{x.shape} {tuple(x.shape)}".endswith(", 3, 4, 6)")
    return x.is_contiguous() * x


@case
def starred_shapes(x: Any) -> Any:
    y = x.view(*x.shape[:-1], 2, 3).transpose(-1, -2)
    y = y.reshape(*y.shape[:-2], -1)
    return y.view(y.size(0), -1, y.size(-1)).view(x.shape).view(x.size()).view_as(x).reshape(list(x.shape))


@case
def types_and_devices(x: Any) -> Any:
    y = x.type_as(x).to(x).to(x.device).to(x.device, x.dtype).to("cpu", torch.float64).type(torch.float32)
    z = x.half().float() * 0 + x.double().to(x.dtype) + x.int() + x.long() + (x > 0).type_as(x)
    return y + z + x.type(torch.FloatTensor) + x.cpu()


@case
def made_of_nothing(x: Any) -> Any:
    rows = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(rows[:4], rows, indexing="ij"))
    mask = torch.tril(torch.ones(6, 6)).bool()
    linear = torch.linspace(0, 1, 6) + torch.eye(6)[0] + torch.full((6,), 2.0)
    return x @ mask.float() + grid.sum(0) * linear + torch.tensor(3.0) + torch.as_tensor([1.0] * 6)


@case
def made_of_others(x: Any) -> Any:
    y = x.new_tensor([1.0, 2.0, 3.0])[:, None, None] + x.new_zeros(6) + x.new_ones(1) + x.new_full((6,), 2)
    return y + torch.zeros_like(x) + torch.full_like(x, 2) + x.new([1.0, 2, 3, 4, 5, 6])


@case
def made_with_numpy(x: Any) -> Any:
    table = np.sin(np.arange(6, dtype=np.float32))
    index = np.argsort(table)
    mask = torch.from_numpy(table > 0)
    return x * torch.from_numpy(table) + x[..., index] + x * np.float32(2) + x.masked_fill(mask, 0)


@case
def constants_decide(x: Any) -> Any:
    scale = torch.tensor(6.0).sqrt()
    if scale > 2:
        x = x / scale.item()
    ids = torch.arange(6)
    for i in ids[ids > 3]:
        x = x + x[..., i : i + 1] * int(i)
    keep = torch.nonzero(ids % 2 == 0).flatten().tolist()
    return x + x[..., keep].sum(-1, keepdim=True) + len(keep)


@case
def methods_with_keywords(x: Any) -> Any:
    y = x.sum(dim=1, keepdim=True) + x.mean(dim=(2, 3), keepdims=True) + x.add(x, alpha=2) + x.clamp(min=0)
    y = y + torch.add(input=x, other=1.0) + x.sub(other=x * 2) + torch.div(x, 3, rounding_mode="floor")
    return (
        torch.einsum("bchw,bcvw->bchv", y, x) @ x
        + torch.baddbmm(torch.zeros(1), y.flatten(0, 1), x.flatten(0, 1).mT).sum()
    )


@case
def several_results(x: Any) -> Any:
    values, index = x.topk(2, dim=-1)
    best = x.max(dim=-1)
    low, where = torch.min(x, 2)
    spread, mean = torch.var_mean(x, dim=1)
    parts = [part.mean() for part in x.split(2, -1)]
    first, *others = torch.unbind(x, 1)
    y = values.sum() + index.float().mean() + best.values.mean() + best[1].float().mean() + low.mean()
    return x + y + where.float().mean() + spread.mean() * mean.sum() + sum(parts) + first.sum() + len(others)


@case
def sizes_as_tensors(x: Any) -> Any:
    half = x[:, :, : torch.tensor(x.shape[2]) // 2]
    return x * torch.tensor(x.shape[-2:]).prod() + torch.tensor(x.shape).float().mean() + half.mean()


@case
def nested_containers(x: Any) -> Any:
    found: dict[str, Any] = OrderedDict(a=[x, x * 2], b=(x + 1, {"c": x - 1}))
    found["a"].append(found.pop("b")[1]["c"])
    return torch.stack(found["a"]).sum(0) + torch.cat([*found["a"]], dim=1).mean()


@case
def python_functions(x: Any) -> Any:
    act = functools.partial(F.leaky_relu, negative_slope=0.2)
    half = lambda t: t * 0.5  # noqa: E731
    steps: list[Callable[[Tensor], Tensor]] = [act, half, torch.tanh, Tensor.sigmoid, Tensor.abs]
    for step in steps:
        x = step(x)
    return functools.reduce(torch.add, [x, x, x])


@case
def swallowed_errors(x: Any) -> Any:
    try:
        x = x.view(7, -1)
    except RuntimeError:
        x = x * 2
    return x


@case
def complex_numbers(x: Any) -> Any:
    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2))
    return torch.view_as_real(pairs * turn).flatten(3)


@case
def own_autocast_and_grad_modes(x: Any) -> Any:
    with torch.autocast("cpu", enabled=False), torch.no_grad(), torch.enable_grad():
        y = x.float() * 2
    with torch.inference_mode():
        z = y + 1
    with torch.device("cpu"):
        return z + torch.ones(6)


@pytest.mark.parametrize("name", CASES)
def test_code_that_runs_is_recorded(name: str) -> None:
    same(Of(CASES[name]), noise_of(2, 3, 4, 6), sizes=(4, 5))


@pytest.mark.parametrize("name", ["sizes_are_numbers", "constants_decide", "kinds_are_asked"])
def test_sizes_and_constants_leave_no_nodes(name: str) -> None:
    graph = trace(Of(CASES[name]), noise_of(2, 3, 4, 6))
    called = {str(getattr(n.target, "__name__", n.target)) for n in graph.graph.nodes}
    assert not called & {"getattr", "item", "dim", "numel", "nonzero", "arange", "tensor", "sqrt"}


@dataclass
class Config:
    """Settings that a model passes around besides tensors."""

    scale: float = 2.0
    act: Callable[[Tensor], Tensor] = torch.relu
    sizes: tuple[int, ...] = (4, 6)


def test_objects_lambdas_and_references_to_modules() -> None:
    """Configurations, lambdas and weak references do not disturb the recorder, which follows only tensors."""

    def forward(self: Any, x: Any) -> Any:
        config, owner = self.config, self.owner()
        x = config.act(owner.layer(x)) * config.scale
        return self.shift(x).view(-1, *config.sizes)

    layer = nn.Conv2d(3, 3, 1)
    holder = nn.ModuleDict({"layer": layer})
    holder.layer = layer
    model: Any = Calls(forward, config=Config(), holder=holder, shift=lambda x: x + 1)
    model.owner = weakref.ref(holder)
    graph = trace(model, noise_of(2, 3, 4, 6))
    with torch.no_grad():
        torch.testing.assert_close(graph(noise_of(3, 3, 4, 6)), model(noise_of(3, 3, 4, 6)))


def reads_in_an_if(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def reads_a_number(x: Any) -> Any:
    return x * x.mean().item()


def reads_an_integer(x: Any) -> Any:
    return x[..., : int(x.argmax())]


def reads_a_list(x: Any) -> Any:
    return x * x.flatten().tolist()[0]


def reads_as_numpy(x: Any) -> Any:
    return x + torch.from_numpy(np.sort(x.detach().numpy()))


def loops_over_values(x: Any) -> Any:
    while x.abs().max() > 1:
        x = x / 2
    return x


def counts_by_values(x: Any) -> Any:
    return torch.nonzero(x > 0).sum() + x


def selects_by_values(x: Any) -> Any:
    return x[x > 0].mean() + x


def selects_where(x: Any) -> Any:
    return x + torch.where(x > 0)[0].sum()


def classes_by_values(x: Any) -> Any:
    return x + F.one_hot(x.argmax(-1)).sum()


def cuts_by_values(x: Any) -> Any:
    return x[..., : x.argmax()]


def compares_all(x: Any) -> Any:
    return x if torch.allclose(x, x * 2) else x * 3


def repeats_by_values(x: Any) -> Any:
    counts = x.flatten()[:3].abs().long() + 1
    return x + torch.repeat_interleave(torch.arange(3), counts).sum()


def range_of_a_value(x: Any) -> Any:
    return x + torch.arange(x.abs().max().long() + 1).sum()


REFUSED = [
    reads_in_an_if,
    reads_a_number,
    reads_an_integer,
    reads_a_list,
    reads_as_numpy,
    loops_over_values,
    counts_by_values,
    selects_by_values,
    selects_where,
    classes_by_values,
    cuts_by_values,
    compares_all,
    repeats_by_values,
    range_of_a_value,
]


@pytest.mark.parametrize("function", REFUSED)
def test_values_that_decide_are_refused_with_module_and_line(function: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Identity(), Of(function))
    with pytest.raises(ConfigError) as caught:
        trace(model, noise_of(2, 3, 4, 6))
    line = str(caught.value)
    assert "\n" not in line
    assert "in module '1' " in line
    own = {number for *_, number in function.__code__.co_lines() if number}
    assert any(f"test_recorder.py:{number} " in line for number in own)
    assert "values" in line
    assert "torch.where" in line


def test_constants_of_the_model_are_buffers_of_the_graph() -> None:
    """Constants must be buffers, which move between devices with the graph, but must not be in its state_dict."""
    graph = trace(Of(CASES["made_of_nothing"]), noise_of(2, 3, 4, 6))
    assert isinstance(graph, fx.GraphModule)
    assert set(graph.state_dict()) == {f"{m}.{p}" for m in ("before", "after") for p in ("weight", "bias")}
    assert any(name.startswith("_constant") for name, _ in graph.named_buffers())


def test_transforms_of_functions_are_refused() -> None:
    double: Any = torch.vmap(torch.sin)
    with pytest.raises(ConfigError, match="vmap"):
        trace(Of(double), noise_of(2, 3, 4, 6))


def test_caches_of_positions_are_constants() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.table is None or self.table.shape[0] != x.shape[-1]:
            self.table = torch.arange(x.shape[-1]).float().sin()
        return x + self.table

    same(Calls(forward, table=None, fc=nn.Linear(1, 1)), noise_of(2, 6))
    model = Calls(forward, table=None)
    model(noise_of(2, 6))
    same(model, noise_of(2, 6))


def test_what_is_kept_of_another_call_is_refused_by_the_proof() -> None:
    """A value of the first call that a later call reads is not a constant."""

    def forward(self: Any, x: Any) -> Any:
        if self.first is None:
            self.first = x.mean()
        return x - self.first

    model, x = Calls(forward, first=None), noise_of(2, 6)
    with pytest.raises(ConfigError, match="the captured graph and the model give different outputs"):
        prove(model, trace(model, x), x)
    assert model.first is None
