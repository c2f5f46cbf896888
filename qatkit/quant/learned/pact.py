"""PACT: clipping values of activations that are trained with the weights; for comparison with LSQ.

Source: Choi et al., "PACT: parameterized clipping activation for quantized neural networks", 2018. The
gradient of the clipping value is the sum of the gradients of the clipped values; rounding contributes nothing.
Weight decay reduces the clipping value as it does the weights. Only a range of an asymmetric type that begins at
zero because of an absorbed activation (ReLU) has a clipping value; other ranges come from their observers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qatkit.quant.learned.lsq import LearnedFakeQuantize


class _Clipped(torch.autograd.Function):
    """Fake quantization that passes the gradient of values above `clip` to `clip`."""

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
    """A quantizer of activations that learns the upper end (scale times largest integer) of ranges from zero.

    It learns only ranges of asymmetric types that begin at zero because of an absorbed ReLU.
    """

    decayed = True
    limits = (
        "PACT learns only ranges that start at zero, in asymmetric types; quantizer=lsq learns all ranges"
    )

    @property
    def unit(self) -> float:
        return float(self._high)

    @property
    def _high(self) -> int:
        """The type's largest integer minus its smallest; the smallest represents zero."""
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
