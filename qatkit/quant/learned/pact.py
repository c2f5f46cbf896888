"""PACT: the value at which an activation is clipped, trained with the weights; for comparison with LSQ.

Source: Choi et al., "PACT: parameterized clipping activation for quantized neural networks", 2018. The gradient of the
clipping value is that of what it clips, rounding has none; weight decay pulls it down as it does the weights. A
tensor that goes below zero has no such value: its range is its observer's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qatkit.quant.learned.lsq import LearnedFakeQuantize


class _Clipped(torch.autograd.Function):
    """`clip` gets the gradient of what is above it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip: Tensor, scale: Tensor, high: int) -> Tensor:
        v = x.div(scale)
        ctx.save_for_backward(v)
        ctx.high = high
        return torch.round(v).clamp_(0, high).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = ctx.saved_tensors
        to_x = torch.ops.aten.hardtanh_backward(grads[0], v, 0, ctx.high)
        return to_x, torch.where(v >= ctx.high, grads[0], 0.0).sum(), None, None


class PACTFakeQuantize(LearnedFakeQuantize):
    """A learned end of the range of an activation that begins at zero: the largest integer times the scale."""

    decayed = True
    limits = "PACT learns those that begin at zero, in asymmetric types, and quantizer=lsq others too"

    @property
    def unit(self) -> float:
        return float(self._high)

    @property
    def _high(self) -> int:
        """The largest integer, counted from the one that stands for zero: the type's least."""
        low, high = self.spec.type_range
        return high - low

    @property
    def learnable(self) -> bool:
        return not self.spec.symmetric and self.bounds[0] == 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not (self.enabled and self.learns):
            return super().forward(x)
        if x.dtype != torch.float32:
            return self.forward(x.float()).to(x.dtype)
        apply: Any = _Clipped.apply
        result: Tensor = apply(x, self.step, self.scale, self._high)
        return result
