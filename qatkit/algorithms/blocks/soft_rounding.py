"""A rounding that can be learned: each weight is rounded down, plus a value from 0 to 1 that ends at 0 or at 1.

    W'(V) = s · clip(floor(W / s) + h(V), low, high)
    h(V)  = clip(sigmoid(V) · (ζ - γ) + γ, 0, 1)        ζ = 1.1, γ = -0.1: reaches 0 and 1, with a gradient up to there
    f(V)  = Σ 1 - |2·h(V) - 1|^β                        pulls h to 0 or 1; a large β lets it move first

During the first share `warm` of the steps f is not used; then β falls from 20 to 2.
Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020, equations 22 to
24.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qatkit.quant.numerics import clamped
from qatkit.quant.pairs import fitted
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

ZETA, GAMMA = 1.1, -0.1
_FIRST_BETA, _LAST_BETA = 20.0, 2.0


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Returns h(V), in the shape of V, from 0 to 1."""
    return torch.clamp(torch.sigmoid(v) * (ZETA - GAMMA) + GAMMA, 0, 1)


def inverse(h: Tensor) -> Tensor:
    """Returns V from h(V), which is from 0 to 1."""
    return -torch.log((ZETA - GAMMA) / (h - GAMMA) - 1)


def regularizer(h: Tensor, beta: float) -> Tensor:
    """Returns f, rank 0: the distance of all values of `h` from 0 and 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


def beta_at(step: int, steps: int, warm: float) -> float | None:
    """Returns β for `step`, which is from 0 to `steps` - 1; None while the regularizer is not used."""
    start = warm * steps
    if step < start:
        return None
    return _LAST_BETA + (_FIRST_BETA - _LAST_BETA) * (1 - (step - start) / (steps - start))


class SoftRounding(nn.Module):
    """Replaces an operator's `weight_fake_quant` while the rounding is learned.

    Args:
        fake: the quantizer, whose current scale is used.
        weight, bias: weight and bias of the operator, with a BatchNorm folded in.
        biases: whether to learn a change of the bias.

    Attributes:
        scale: the scales of the weight.
        nearest: whether rounding to the nearest rounds up, bool, in the weight's shape.
        v: the parameter V; at the start it reproduces the weight, h(V) = W/s - floor(W/s).
        shift: the learned change of the bias, [out]; None if the bias is not learned.
    """

    def __init__(
        self, fake: WeightFakeQuantize, weight: Tensor, bias: Tensor | None, *, biases: bool
    ) -> None:
        super().__init__()
        self.fake = (fake,)  # in a tuple, so that it is not a submodule
        self.scale, self.ends = fake.scale(weight).detach().clone(), fake.ends(weight)
        self.steps = weight.detach() / fake.spec.granularity.spread(self.scale, weight.shape)
        self.floor = torch.floor(self.steps)
        self.v = nn.Parameter(inverse(self.steps - self.floor))
        self.nearest = torch.round(self.steps) > self.floor
        learns = biases and bias is not None
        self.shift = nn.Parameter(torch.zeros_like(bias)) if learns and bias is not None else None

    def h(self) -> Tensor:
        """Returns the rectified sigmoid h of V, in the weight's shape."""
        return rectified_sigmoid(self.v)

    def rounds_up(self) -> Tensor:
        """Returns whether h is above 1/2: bool, in the weight's shape."""
        return self.v.detach() > 0

    def hard(self, rounds_up: Tensor) -> Tensor:
        """Returns the weight with a final rounding, as it will be exported."""
        fake, weight = self.fake[0], self.floor + rounds_up
        if fake.spec.guards_pairs:
            weight = fitted(clamped(weight, self.ends), self.steps)
        return self._in_range(weight)

    def _in_range(self, steps: Tensor) -> Tensor:
        return clamped(steps, self.ends) * self.fake[0].spec.granularity.spread(self.scale, steps.shape)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the soft weight, and the bias with its shift, as `QATOperator.quantized` needs them."""
        del weight
        return self._in_range(self.floor + self.h()), self.shifted(bias)

    def shifted(self, bias: Tensor | None) -> Tensor | None:
        """Returns the bias plus its shift, and None without a bias.

        The sum is not rounded, since the steps of int32 biases are finer than any of these errors.
        """
        if bias is None:
            return None
        return bias.detach() if self.shift is None else bias.detach() + self.shift
