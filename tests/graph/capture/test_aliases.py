"""Tests of views and in-place changes: a tensor's values are followed through all of its aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import Of, noise_of, same
from torch.nn import functional as F

from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

Function = Callable[[Any], Any]
CASES: dict[str, Function] = {}


def case(function: Function) -> Function:
    """Registers a case under the function's name, and returns the function."""
    CASES[function.__name__] = function
    return function


@case
def slice_is_changed(x: Any) -> Any:
    part = x[:, 1:]
    part += 1
    return x * 2


@case
def augmented_slice(x: Any) -> Any:
    x[:, :2] *= 3.0
    x[..., -1] -= 1
    return x


@case
def chunk_is_changed(x: Any) -> Any:
    _, b = x.chunk(2, -1)
    b.mul_(2)
    return x + 1


@case
def split_is_changed(x: Any) -> Any:
    a, b = torch.split(x, [1, 2], dim=1)
    b.add_(a)
    return x * 1


@case
def unbind_is_changed(x: Any) -> Any:
    rows = x.unbind(2)
    rows[1].add_(rows[0])
    rows[-1].zero_()
    return x


@case
def iterated_rows(x: Any) -> Any:
    for i, row in enumerate(x.transpose(0, 1)):
        row.add_(i)
    return x


@case
def transpose_is_changed(x: Any) -> Any:
    y = x.transpose(1, 2)
    y[:, 0] = 5.0
    return x


@case
def permute_then_slice(x: Any) -> Any:
    x.permute(0, 3, 1, 2)[:, :2].mul_(0.5)
    return x


@case
def property_t(x: Any) -> Any:
    x.mT.add_(1)
    return x


@case
def reshape_is_changed(x: Any) -> Any:
    x.view(x.shape[0], -1)[:, 3:5].zero_()
    return x


@case
def flatten_is_changed(x: Any) -> Any:
    x.flatten(1).clamp_(-0.5, 0.5)
    return x


@case
def select_is_changed(x: Any) -> Any:
    x.select(1, -1).fill_(2)
    return x


@case
def narrow_is_changed(x: Any) -> Any:
    x.narrow(-1, 2, 3).exp_()
    return x


@case
def narrow_from_the_end(x: Any) -> Any:
    x.narrow(-1, -3, 2).exp_()
    return x


@case
def diagonal_is_changed(x: Any) -> Any:
    x.diagonal(0, 2, 3).fill_(1.0)
    return x


@case
def unfold_is_read(x: Any) -> Any:
    windows = x.unfold(-1, 2, 2)
    x.mul_(2)
    return x + windows.sum()


@case
def expanded_is_read(x: Any) -> Any:
    row = x[:, :1]
    wide = row.expand(-1, 3, -1, -1)
    row.add_(1)
    return x + wide


@case
def view_made_before(x: Any) -> Any:
    flat = x.view(x.shape[0], -1)
    x.add_(1)
    return x + flat.sum(1)[:, None, None, None]


@case
def two_views_of_one(x: Any) -> Any:
    a, b = x[:, :2], x[:, 1:]
    a.add_(1)
    b.mul_(2)
    a.sub_(3)
    return x + b.mean() + a.mean()


@case
def views_of_views(x: Any) -> Any:
    a = x.transpose(1, 3)
    b = a[:, 1:4]
    c = b.select(2, 0)
    c.mul_(b.mean())
    return x * a.sum()


@case
def squeeze_and_unsqueeze(x: Any) -> Any:
    y = x[:, :1].squeeze(1)
    y.mul_(2)
    z = x.unsqueeze(1)
    z.add_(1)
    return x


@case
def shape_in_place(x: Any) -> Any:
    y = x.clone()
    y.unsqueeze_(1)
    y.squeeze_(1)
    y.transpose_(1, 2)
    return y.transpose(1, 2)


@case
def detach_and_data(x: Any) -> Any:
    y = x.detach()
    y.add_(1)
    x.data.mul_(2)
    x.data[:, 0] = 0.5
    x.data = x.data * 3
    return x + y


@case
def own_copy_stays(x: Any) -> Any:
    y = x.clone()
    y[:, 0] = 1.0
    z = x.contiguous()
    z.add_(1)
    return x + y


@case
def contiguous_of_a_transpose(x: Any) -> Any:
    y = x.transpose(1, 2).contiguous()
    y.add_(1)
    return x + y.transpose(1, 2)


@case
def reshape_that_copies(x: Any) -> Any:
    y = x.transpose(1, 2).reshape(x.shape[0], -1)
    y.add_(1)
    return x + y.mean()


@case
def to_the_same_type(x: Any) -> Any:
    x.to(torch.float32).add_(1)
    x.float().mul_(2)
    x.type_as(x).sub_(1)
    return x


@case
def in_place_functions(x: Any) -> Any:
    F.relu_(x)
    F.leaky_relu(x, 0.1, inplace=True)
    F.hardtanh_(x, -1, 1)
    torch.sigmoid_(x)
    F.elu(x[:, 1:], inplace=True)
    return x


@case
def in_place_methods(x: Any) -> Any:
    x.clamp_(min=-1).addcmul_(x, x, value=0.1).lerp_(x * 2, 0.5).sqrt_().nan_to_num_(0.1)
    x.masked_fill_(x > 0.5, 0.25)
    x.index_add_(1, torch.tensor([0, 2]), torch.ones(x.shape[0], 2, 4, 6))
    x.index_fill_(2, torch.tensor([1]), 0.5)
    x.index_copy_(1, torch.tensor([1]), x[:, :1] * 2)
    return x.neg_().pow_(2).div_(2).floor_divide_(0.3).remainder_(2)


@case
def scatters(x: Any) -> Any:
    index = x[..., :2].argsort(-1)
    y = torch.zeros_like(x).scatter_(-1, index, 1.0)
    y.scatter_add_(-1, index, x[..., :2])
    return y


@case
def out_arguments(x: Any) -> Any:
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    z = x.new_empty(x.shape)
    torch.add(x, y, out=z)
    torch.exp(x[:, :1], out=z[:, 1:2])
    return y + z


@case
def copies_and_fills(x: Any) -> Any:
    y = torch.empty(x.shape)
    y.copy_(x)
    y[:, 0].copy_(x[:, 1])
    y[:, 2].fill_(3)
    y[:, 1, 0].zero_()
    y[..., :3].copy_(x[:, :1, :, 3:])
    return y


@case
def reflected_and_augmented(x: Any) -> Any:
    y = 2 - x
    y += 1
    y -= x
    y *= 2
    y /= 3
    y **= 2
    z = (y > 0.1) & (x > 0)
    z |= x < -1
    z ^= x > 1
    return 1 / (y + 1) + z + 2**x + (5 // (x.abs() + 1)) + 7 % (x.abs() + 1)


@case
def changed_after_use(x: Any) -> Any:
    y = x * 2
    z = x + 1
    x.mul_(0)
    return y + z + x


@case
def swapped_in_place(x: Any) -> Any:
    x[:, 0], x[:, 1] = x[:, 1].clone(), x[:, 0].clone()
    return x


@case
def swapped_without_copies(x: Any) -> Any:
    x[:, 0], x[:, 1] = x[:, 1], x[:, 0]
    return x


@case
def complex_parts(x: Any) -> Any:
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2).contiguous())
    return torch.view_as_real(z * z).flatten(-2) + z.abs().repeat(1, 1, 1, 2) + z.real.sum() + z.imag.sum()


@case
def roll_through_a_view(x: Any) -> Any:
    y = x.view(-1, 3, 2, 2, 6)
    out = torch.zeros_like(y)
    out[:, :1, :-1] = y[:, :1, 1:]
    out[:, 1:2, 1:] = y[:, 1:2, :-1]
    out[:, 2:] = y[:, 2:]
    return out.view_as(x)


@pytest.mark.parametrize("name", CASES)
def test_changes_are_followed(name: str) -> None:
    same(Of(CASES[name]), noise_of(2, 3, 4, 6))


def overlapping(x: Any) -> Any:
    x.as_strided((2, 2), (1, 1)).add_(1)
    return x


def resized(x: Any) -> Any:
    y = x.clone()
    y.resize_(1, 3)
    return x + y.sum()


def overlapping_windows(x: Any) -> Any:
    x.unfold(-1, 2, 1).mul_(2)
    return x


@pytest.mark.parametrize("function", [overlapping, resized, overlapping_windows])
def test_an_untraceable_in_place_change_is_refused_with_its_line(function: Function) -> None:
    with pytest.raises(ConfigError, match=r"test_aliases\.py:\d+ `.*in place"):
        trace(Of(function), noise_of(2, 3, 4, 6))
