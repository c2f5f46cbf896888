"""Optimizers that update learned scales, and on request weights, by relative steps.

Learned scales are updated by Adam on their logarithm:

    θ = log p        ∂L/∂θ = p·∂L/∂p        p ← p·exp(-rate·m̂/√v̂)

A scale thus changes by a relative amount of about `rate` per step at most, and stays above zero. This holds
for 8 or 4 bits, for 9 weights or a million, and for any rate and optimizer of the weights (decision 31).

Weights may be updated by Adam in units of their channel's root mean square r (`schedule.relative_lr`;
decision 50):

    θ = p / r        ∂L/∂θ = r·∂L/∂p        p ← (1 - rate·decay)·p - rate·r·m̂/√v̂

Sources: Jain et al., "Trained quantization thresholds for accurate and efficient fixed-point inference of deep neural
networks", 2020; Kingma and Ba, "Adam", 2015; relative steps: Shazeer and Stern, "Adafactor", 2018, section 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

BY_SHARES, RELATIVE = "by_shares", "relative"  # flags of parameter groups
_SMALLEST = 1e-3  # unit of a vector, which may start at zero (Adafactor's ε₂); a channel of zeros stays zero
_BETAS = 0.9, 0.999
_EPSILON = 1e-16  # small, since the gradient by the logarithm of one of many scales may be tiny


class _BesideTheWeights(torch.optim.Optimizer):
    """A mixin for an optimizer: flagged groups are updated by relative steps, other groups by the next base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Gradients under autocast are then unscaled before the step; a fused kernel would unscale only those
        # of its own groups.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:  # called here, since it zeroes the gradients of all groups
            with torch.enable_grad():
                loss = closure()
        every = self.param_groups
        self.param_groups = [group for group in every if not (group.get(BY_SHARES) or group.get(RELATIVE))]
        try:
            super().step()
        finally:
            self.param_groups = every
        for group in every:
            moved = [p for p in group["params"] if p.grad is not None]
            if group.get(BY_SHARES) and moved:
                # Weight decay adds decay · Σ p²/2 to the loss.
                given = [value.grad for value in moved if value.grad is not None]
                gradients = list(torch._foreach_add(given, moved, alpha=group["weight_decay"]))
                shares = self._shares(moved, gradients, moved, group["lr"])
                torch._foreach_exp_(shares)
                torch._foreach_mul_(moved, shares)
            if group.get(RELATIVE) and moved:
                units = [_unit(value) for value in moved]
                gradients = [value.grad.clone() for value in moved if value.grad is not None]
                shares = self._shares(moved, gradients, units, group["lr"])
                torch._foreach_mul_(shares, units)
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(moved, shares)
        return loss

    def _shares(
        self, values: list[Tensor], gradients: list[Tensor], units: list[Tensor], rate: float
    ) -> list[Tensor]:
        """Returns Adam's steps as multiples of `units`; it multiplies the gradients by `units` in place."""
        for value in values:
            if not self.state[value]:
                started = torch.zeros((), dtype=torch.float32, device=value.device)
                self.state[value] = {"step": started, "mean": torch.zeros_like(value)}
                self.state[value]["square"] = torch.zeros_like(value)
            # When a run is resumed, torch and Lightning leave the state called "step" on the CPU.
            self.state[value]["step"] = self.state[value]["step"].to(value.device)
        means, squares, steps = (
            [self.state[value][name] for value in values] for name in ("mean", "square", "step")
        )
        torch._foreach_mul_(gradients, units)
        shares = [torch.zeros_like(value) for value in values]
        adam(shares, gradients, means, squares, [], steps, fused=True, amsgrad=False, beta1=_BETAS[0],
             beta2=_BETAS[1], lr=rate, weight_decay=0.0, eps=_EPSILON, maximize=False)  # fmt: skip
        return shares


def _unit(value: Tensor) -> Tensor:
    """Returns the root mean square of each slice along the first axis; for a vector one value, at least `_SMALLEST`."""
    if value.ndim < 2:
        return value.square().mean().sqrt().clamp_min(_SMALLEST)
    return value.square().mean(tuple(range(1, value.ndim)), keepdim=True).sqrt()


class SGDAndScales(_BesideTheWeights, torch.optim.SGD):
    """SGD for weights, together with the update of learned scales."""


class AdamWAndScales(_BesideTheWeights, torch.optim.AdamW):
    """AdamW for weights, together with the update of learned scales."""
