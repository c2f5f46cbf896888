"""Fake quantization whose backward pass yields the gradient of the scale as well.

With v = x / s, q = clamp(round(v), n, p), y = q·s and the gradient g of y (Esser et al., "Learned step size
quantization", 2020, equation 3):

    ∂L/∂x = g where n < v < p, else 0          =: g_x
    ∂L/∂s = Σ g·(q - v) where n < v < p, g·q else = (Σ g·y)/s - Σ g_x·v

The gradient of the scale thus takes two dot products, which need no further memory: v and y exist already,
and the next operator keeps y anyway.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from qatkit.quant.granularity import Granularity
from qatkit.quant.numerics import computed_once, flat, to_steps, within

_PIECE = 2**18  # weights per thread that all passes process before the next ones


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sum of the products of all values, in one pass where both have the same memory layout."""
    first, second = (flat(a), flat(b)) if a.stride() == b.stride() else (None, None)
    return (a * b).sum() if first is None or second is None else torch.dot(first, second)


def _within(gradient: Tensor, v: Tensor, ends: tuple[int, int]) -> Tensor:
    """Returns `gradient` where `v` lies between `ends`, else 0."""
    if torch.compiler.is_compiling():
        return within(gradient, v, torch.stack([v.new_full((), end) for end in ends]))
    return cast(Tensor, torch.ops.aten.hardtanh_backward(gradient, v, *ends))


def _at_zero(g: Tensor, to_x: Tensor, v: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Returns (Σ g·y)/s - Σ g_x·v.

    Under a compiler no flat views are used, since they would disturb its summation in memory order.
    """
    if torch.compiler.is_compiling():
        return (g * (y / scale) - to_x * v).sum()
    return _dot(g, y) / scale - _dot(to_x, v)


class _Scaled(torch.autograd.Function):
    """Fake quantization with a learned `step` and its aligned `scale`; `factor` scales the gradient of `step`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, scale: Tensor, low: int, high: int, factor: float
    ) -> Tensor:
        v = x.div(scale)
        y = torch.round(v).clamp_(low, high).mul_(scale)
        ctx.save_for_backward(v, y, scale)
        ctx.ends, ctx.factor = (low, high), factor
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, y, scale = ctx.saved_tensors
        to_x = _within(grads[0], v, ctx.ends)
        to_step = _at_zero(grads[0], to_x, v, y, scale) * ctx.factor
        return to_x, to_step, None, None, None, None


class _Shifted(torch.autograd.Function):
    """Fake quantization with a learned scale and offset β = (n - z)·s with zero point z (Bhalgat et al., "LSQ+", 2020).

    ∂L/∂β = Σ g over the values outside of the range. ∂L/∂s is taken for a fixed β, so that only the
    upper end of the range moves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        offset: Tensor,
        scale: Tensor,
        zero: Tensor,
        ends: tuple[int, int],
        factor: float,
    ) -> Tensor:
        v = x.div(scale)
        y = torch.round(v).add_(zero).clamp_(*ends).sub_(zero).mul_(scale)
        ctx.save_for_backward(v, y, scale, zero)
        ctx.ends, ctx.factor = ends, factor
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, y, scale, zero = ctx.saved_tensors
        to_x = _within(grads[0], v + zero, ctx.ends)
        outside = grads[0].sum() - to_x.sum()
        at_zero = _at_zero(grads[0], to_x, v, y, scale)
        to_step = (at_zero + (zero - ctx.ends[0]) * outside) * ctx.factor
        return to_x, to_step, outside * ctx.factor, None, None, None, None


class _ScaledWeight(torch.autograd.Function):
    """Fake quantization of a weight [out, ...] with a scale that broadcasts; v is recomputed, not stored."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, step: Tensor, scale: Tensor, low: int, high: int, factor: float
    ) -> Tensor:
        y = w.div(scale).round_().clamp_(low, high).mul_(scale)
        ctx.save_for_backward(w, y, scale)
        ctx.ends, ctx.factor, ctx.shape = (low, high), factor, step.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w, y, scale = ctx.saved_tensors
        rows = scale.ndim > 0 and scale.shape[0] == scale.numel() == len(w)
        if rows and w.device.type == "cpu" and not torch.compiler.is_compiling():
            to_w, to_step = _by_rows(grads[0], w, y, scale, ctx.ends)
        else:
            to_w = _within(grads[0], w.div(scale), ctx.ends)
            to_step = (grads[0] * y - to_w * w).sum_to_size(scale.shape) / scale
        return to_w, to_step.view(ctx.shape) * ctx.factor, None, None, None, None


def _by_rows(g: Tensor, w: Tensor, y: Tensor, scale: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns g_w and Σ (g·y - g_w·w)/s of each row.

    A few rows are processed at a time, so that intermediate values stay in a core's cache. A row's sum adds
    small differences, so it keeps more digits than the difference of two sums.
    """
    to_w, sums = torch.empty_like(w), scale.new_empty(len(w))
    at_once = max(1, _PIECE * torch.get_num_threads() * len(w) // w.numel())
    between = torch.empty_like(w[:at_once])
    pieces = (one.split(at_once) for one in (g, w, y, scale, to_w, sums))
    for up, part, rounded, steps, into, total in zip(*pieces, strict=True):
        v = torch.div(part, steps, out=between[: len(part)])
        torch.ops.aten.hardtanh_backward.grad_input(up, v, *ends, grad_input=into)
        difference = torch.mul(up, rounded, out=v).addcmul_(into, part, value=-1)
        torch.sum(difference.flatten(1), 1, out=total)
    return to_w, sums / scale.view(-1)


def learned(
    x: Tensor, step: Tensor, scale: Tensor, ends: tuple[int, int], factor: float, offset: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Applies fake quantization with a learned scale, and optionally a learned offset, to an activation.

    Args:
        x: the activation, of any shape.
        step, offset: the parameters that get the gradients, rank 0.
        scale, zero_point: the values to quantize with, rank 0. Without `offset`, `ends` are counted from the
            zero point.
        ends: the smallest and the largest integer.
        factor: factor of the gradients of `step` and `offset`.
    """
    if x.dtype != torch.float32:  # bfloat16 can represent neither the scale nor q·scale
        return learned(x.float(), step, scale, ends, factor, offset, zero_point).to(x.dtype)
    result: Tensor
    training = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if offset is None and x.device.type == "cpu" and not training:
        result = to_steps(x, float(scale), *ends)
    elif offset is None:
        apply: Any = _Scaled.apply
        result = apply(x, step, scale, *ends, factor)
    else:
        assert zero_point is not None
        apply = _Shifted.apply
        result = apply(x, step, offset, scale, zero_point.to(x.dtype), ends, factor)
    return result


def learned_weight(
    w: Tensor, step: Tensor, scale: Tensor, ends: tuple[int, int], granularity: Granularity, factor: float
) -> Tensor:
    """Applies symmetric fake quantization with a learned scale, in the granularity's shape, to a weight."""
    apply: Any = _ScaledWeight.apply
    result: Tensor = apply(w, step, granularity.spread(computed_once(scale), w.shape), *ends, factor)
    return result
