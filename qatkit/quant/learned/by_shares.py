"""The optimizer where quantizers learn: the weights' own, and Adam on the logarithms of what quantizers learn.

    θ = log p        ∂L/∂θ = p·∂L/∂p        p ← p·exp(-rate·m̂/√v̂)

A scale thus moves by a share of itself, about `rate` a step at most, and stays above zero: whether it is one of 8 or of
4 bits, of 9 weights or of a million, and whatever the weights' own rate and optimizer are (docs/design.md, D31).

Source: Jain et al., "Trained quantization thresholds for accurate and efficient fixed-point inference of deep neural
networks", 2020; Adam: Kingma and Ba, 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

BY_SHARES = "by_shares"
_BETAS = 0.9, 0.999
_EPSILON = 1e-16  # of gradients that may be tiny: a loss's by the logarithm of one of many scales


class _BesideTheWeights(torch.optim.Optimizer):
    """Moves the groups that say so (`BY_SHARES`) by shares of their values, the others as the next class does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Gradients of halves are unscaled before the step, which a fused kernel of the others would do by itself.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:  # it zeroes the gradients of all groups
            with torch.enable_grad():
                loss = closure()
        every = self.param_groups
        self.param_groups = [group for group in every if not group.get(BY_SHARES)]
        try:
            super().step()
        finally:
            self.param_groups = every
        for group in every:
            moved = [p for p in group["params"] if p.grad is not None]
            if group.get(BY_SHARES) and moved:
                self._move(moved, group["lr"], group["weight_decay"])
        return loss

    def _move(self, values: list[Tensor], rate: float, decay: float) -> None:
        """One step; `decay` is the weight of Σ p²/2 in the loss."""
        for value in values:
            if not self.state[value]:
                started = torch.zeros((), dtype=torch.float32, device=value.device)
                self.state[value] = {"step": started, "mean": torch.zeros_like(value)}
                self.state[value]["square"] = torch.zeros_like(value)
            # Of all that a resumed run reads, torch and Lightning leave what is called "step" on the CPU.
            self.state[value]["step"] = self.state[value]["step"].to(value.device)
        means, squares, steps = (
            [self.state[value][name] for value in values] for name in ("mean", "square", "step")
        )
        given = [value.grad for value in values if value.grad is not None]
        gradients = list(torch._foreach_add(given, values, alpha=decay))
        torch._foreach_mul_(gradients, values)
        shares = [torch.zeros_like(value) for value in values]
        adam(shares, gradients, means, squares, [], steps, fused=True, amsgrad=False, beta1=_BETAS[0],
             beta2=_BETAS[1], lr=rate, weight_decay=0.0, eps=_EPSILON, maximize=False)  # fmt: skip
        torch._foreach_exp_(shares)
        torch._foreach_mul_(values, shares)


class SGDAndScales(_BesideTheWeights, torch.optim.SGD):
    """Weights by SGD."""


class AdamWAndScales(_BesideTheWeights, torch.optim.AdamW):
    """Weights by AdamW."""
