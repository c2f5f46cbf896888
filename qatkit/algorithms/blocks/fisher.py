"""The importance of a block's output values: the diagonal of the Fisher information, by a backward pass per batch.

    F = E_r (Σ_o r_o · ∂out_o / ∂y)²

To second order KL(float || changed) grows by ½ · Σ F · (y' - y)². For classes, r = softmax(out) - onehot(c);
the class c is drawn from softmax(out), so that no labels are needed. For other outputs (a single axis,
tokens, several outputs) r is a random sign per value, which makes F the diagonal of JᵀJ, as for the squared
error.
Source: Li et al., "BRECQ", 2021, section 3.3, which takes the label as the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

# Ranks of [N, classes] (classification) and [N, classes, H, W] (segmentation).
_CLASSES = (2, 4)


def fisher_diagonal(
    tail: fx.GraphModule, values: Sequence[Any], chosen: Sequence[int], generator: torch.Generator
) -> list[Tensor]:
    """Returns the squared gradients of Σ r·out with respect to some inputs of a float graph, in the inputs' shapes.

    Args:
        tail: the graph, with quantization off; it returns a tuple.
        values: its inputs.
        chosen: indices of the inputs to differentiate, all of them floating-point.
        generator: the generator of random classes and signs.
    """
    with torch.enable_grad():
        inputs = list(values)
        for i in chosen:
            inputs[i] = inputs[i].detach().clone().requires_grad_()
        outputs = [y for y in tail(*inputs) if isinstance(y, Tensor) and y.is_floating_point()]
        directions = [direction(y.detach(), generator, classes=len(outputs) == 1) for y in outputs]
        total = sum((y * r).sum() for y, r in zip(outputs, directions, strict=True))
        grads = torch.autograd.grad(total, [inputs[i] for i in chosen], allow_unused=True)  # type: ignore[arg-type]
    return [
        torch.zeros_like(inputs[i]) if grad is None else grad.square()
        for i, grad in zip(chosen, grads, strict=True)
    ]


def direction(y: Tensor, generator: torch.Generator, *, classes: bool) -> Tensor:
    """Returns r for an output, in its shape; `classes` says whether the output may be [N, classes, ...]."""
    if not classes or y.ndim not in _CLASSES:
        return (torch.rand(y.shape, generator=generator) < 0.5).to(y) * 2 - 1
    shares = y.softmax(1)
    rows = shares.movedim(1, -1).reshape(-1, shares.shape[1])
    drawn = torch.multinomial(rows.cpu(), 1, generator=generator).to(y.device)
    one_hot = torch.zeros_like(rows).scatter_(1, drawn, 1).view(shares.movedim(1, -1).shape).movedim(-1, 1)
    return shares - one_hot
