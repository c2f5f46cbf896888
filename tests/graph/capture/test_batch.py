"""Tests of values that depend on the batch size: one graph fits any size, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import Calls, Of, noise_of, same
from torch import Tensor, nn

from qatkit.graph.proof import prove
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError


def windows(x: Any) -> Any:
    b = x.shape[0]
    y = x.view(b * 3, 4, 6).view(b // 1, 3, -1, 6)
    return y.reshape(b, -1).reshape(-1, 3, 4, 6)


def expanded(x: Any) -> Any:
    b, c = x.shape[:2]
    token = torch.ones(1, 1, 6).expand(b, -1, -1)
    return torch.cat([token.expand(b, 4, 6)[:, None], x], 1)[:, :c] + torch.ones(6).repeat(b, 3, 4, 1)


def made(x: Any) -> Any:
    b = x.size(0)
    y = torch.zeros(b, 3, 4, 6) + torch.ones((b, 1, 1, 1)) + x.new_full((b, 1, 1, 6), 2.0)
    state = torch.zeros(b, 6)
    for i in range(4):
        state = torch.tanh(state + x[:, 0, i])
    return y + x * state[:, None, None] + torch.arange(b)[:, None, None, None] + torch.eye(b).sum() * 0


def by_index(x: Any) -> Any:
    rows = torch.arange(x.shape[0])
    return x + x[rows, 1][:, None] + x[torch.arange(x.shape[0]), x[:, 0, 0].argmax(-1) % 3].unsqueeze(1)


def split_by_batch(x: Any) -> Any:
    both = torch.cat([x, x * 2])
    a, b = both.split(x.shape[0])
    c, d = both.chunk(2)
    return a + b + c * d + both[: x.shape[0]] + both[x.shape[0] :]


def two_that_differ(x: Any) -> Any:
    b = x.shape[0]
    y = torch.einsum("bchw,achw->bachw", x, x)
    return x + y.view(b, b, -1).mean(1)[:, :6].view(-1, 1, 1, 6)


def repeated(x: Any) -> Any:
    b = x.shape[0]
    y = x.repeat(2, 1, 1, 1).reshape(2, b, 3, 4, 6).mean(0)
    y = y + torch.repeat_interleave(x, repeats=2, dim=1)[:, ::2]
    return y + x.repeat_interleave(2, 0)[::2] + x.tile(3, 1, 1, 1)[b : 2 * b] + x.flip(0).roll(1, 0)


def offsets(x: Any) -> Any:
    """Indexes the flattened batch, as PointNet and DGCNN do."""
    b, n = x.shape[0], 4
    index = x.sum((1, 3)).argsort(-1) + torch.arange(b)[:, None] * n
    return x + x.transpose(1, 2).reshape(b * n, -1)[index.view(-1)].view(b, n, 3, 6).transpose(1, 2)


def written(x: Any) -> Any:
    y = torch.zeros(x.shape[0], 3, 8, 6)
    y[:, :, 2 : 2 + x.shape[2]] = x
    for i in range(3):
        y[:, i] += i
    return y[..., 1:7, :].mean(2, keepdim=True) + x


def unfolded_and_folded(x: Any) -> Any:
    b, c, h, w = x.shape
    y = torch.nn.functional.unfold(x, 2, stride=2).transpose(1, 2).reshape(b * 6, c, 4)
    return torch.nn.functional.fold(y.reshape(b, 6, -1).transpose(1, 2), (h, w), 2, stride=2)


FOLLOWED = [
    windows, expanded, made, by_index, split_by_batch, two_that_differ, repeated, offsets, written,
    unfolded_and_folded,
]  # fmt: skip


@pytest.mark.parametrize("function", FOLLOWED)
def test_functions_of_the_batch(function: Callable[..., Any]) -> None:
    same(Of(function), noise_of(2, 3, 4, 6), sizes=(1, 4, 7))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_size_of_the_example_does_not_matter(size: int) -> None:
    same(Of(windows), noise_of(size, 3, 4, 6), sizes=(1, 2, 3, 8))


def loops(x: Any) -> Any:
    return torch.stack([one * 2 for one in x])


def branches(x: Any) -> Any:
    return x * 2 if x.shape[0] == 2 else x.abs()


def powers(x: Any) -> Any:
    return x * 2.0 ** x.shape[0]


def divides(x: Any) -> Any:
    return x / x.shape[0]


@pytest.mark.parametrize("function", [loops, branches, powers])
def test_what_the_batch_decides_is_refused(function: Callable[..., Any]) -> None:
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"test_batch\.py:{line} .*the size of the batch"):
        trace(Of(function), noise_of(2, 3, 4, 6))


def chosen(x: Any) -> Any:
    a, b = x.sum(-1), x.mean(-1)
    return a if x.shape[0] % 3 else b


def test_an_output_chosen_by_the_batch_has_no_line() -> None:
    with pytest.raises(ConfigError, match=r"the model cannot be captured: the size of the batch decides"):
        trace(Of(chosen), noise_of(2, 3, 4, 6))


def half(x: Any) -> Any:
    return torch.cat([x[: x.shape[0] // 2] * 2, x[x.shape[0] // 2 :]])


def alone(x: Any) -> Any:
    return x * 2 if x.shape[0] == 1 else x


@pytest.mark.parametrize(("function", "images"), [(half, 3), (alone, 2)])
def test_what_two_sizes_cannot_tell_is_found_by_the_proof(function: Callable[..., Any], images: int) -> None:
    model, x = Of(function), noise_of(images, 3, 4, 6)
    with pytest.raises(ConfigError):
        prove(model, trace(model, x), x)


def test_division_by_the_batch_is_a_node() -> None:
    same(Of(divides), noise_of(2, 3, 4, 6))


def test_a_model_of_one_batch_size() -> None:
    def forward(self: Any, x: Any) -> Any:
        y: Tensor = self.fc(x.reshape(12))
        return y

    graph = same(Calls(forward, fc=nn.Linear(12, 2)), noise_of(1, 12))
    assert graph.meta["batch_axes"] == (None,)
    assert any("batch size" in reason for _, reason in graph.meta["notes"])


def test_inputs_with_and_without_the_batch() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.fc(x).masked_fill(mask, 0) * scale
        return y.view(x.shape[0] * 3, 2)

    example = (noise_of(4, 6), torch.tensor([True, False, False, True, False, False]), torch.tensor(2.0))
    graph = same(Calls(forward, fc=nn.Linear(6, 6)), example)
    assert graph.meta["batch_axes"] == (0, None, None)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_mask_as_long_as_the_batch_has_no_batch_axis(size: int) -> None:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        result: Tensor = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return result

    torch.manual_seed(0)
    model, mask = Calls(forward, qkv=nn.Linear(6, 18)), torch.ones(4, 4).tril().bool()
    graph = trace(model, (noise_of(size, 4, 6), mask))
    assert graph.meta["batch_axes"] == (0, None)
    for count in (1, 3, 4):
        x = noise_of(count, 4, 6, seed=count)
        torch.testing.assert_close(graph(x, mask), model(x, mask))


def test_of_two_inputs_with_one_length_each_keeps_its_axis() -> None:
    model = Calls(lambda m, x, y: m.fc(x) + y, fc=nn.Linear(6, 6))
    assert trace(model, (noise_of(4, 4, 6), noise_of(4, 1, 6))).meta["batch_axes"] == (0, 0)
