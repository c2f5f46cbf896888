"""The arithmetic of GPTQ on tensors only; groups of a convolution are the first axis of all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qatkit.quant.formats import elements
from qatkit.quant.formats.table import Element
from qatkit.quant.numerics import Ends, clamped

# Columns that are rounded before their errors are applied to the others, and how often the damping grows
# tenfold.
_BLOCK, _TRIES = 128, 6


def damped(form: Tensor, share: float) -> Tensor:
    """Returns a form with a share of its diagonal's mean added to its diagonal.

    Args:
        form: [groups, inputs, inputs].
    """
    found = form.clone()
    diagonal = found.diagonal(dim1=1, dim2=2)
    diagonal += share * diagonal.mean(1, keepdim=True)
    return found


def damped_factor(form: Tensor, damping: float) -> Tensor:
    """Returns the lower Cholesky factor of a form with something added to its diagonal; float64.

    Args:
        form: [groups, inputs, inputs], symmetric, not negative. An input that is always 0 counts as 1: its weights are
            rounded to nearest, and change nothing.
        damping: share of the diagonal's mean that is added, ten times as much while the form is still singular.

    Raises:
        ValueError: the form is not finite.
    """
    if not bool(form.isfinite().all()):
        raise ValueError("the second moments are not finite, because the inputs of this operator overflow")
    form = form.to(torch.float64, copy=True)
    diagonal = form.diagonal(dim1=1, dim2=2)
    diagonal[diagonal == 0] = 1
    before, share = diagonal.clone(), damping
    for _ in range(_TRIES):
        diagonal.copy_(before + share * before.mean(1, keepdim=True))
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(form)
        if not bool(failed.any()):
            return factor
        share = max(10 * share, 1e-6)
    raise ValueError("the second moments are not positive, because the inputs of this operator overflow")


class Columns:
    """The order in which the columns of a weight are rounded, and the effect of each one's error on the others.

    Args:
        form: [groups, inputs, inputs], second moments or covariance of the inputs.
        order: whether the columns come in the order of a falling diagonal.
        damping: as in `damped_factor`.

    Attributes:
        importance: [groups, inputs], the cost of one column's squared error once the others compensate for it.
    """

    def __init__(self, form: Tensor, *, order: bool, damping: float) -> None:
        self._places = places = _places(form, order)
        form = form.gather(1, places[:, :, None].expand_as(form)).gather(2, places[:, None].expand_as(form))
        inverse = torch.cholesky_inverse(damped_factor(form, damping))
        cost = inverse.diagonal(dim1=1, dim2=2).reciprocal().float()
        self.importance = torch.empty_like(cost).scatter_(1, places, cost)
        self._factor = torch.linalg.cholesky(inverse, upper=True).float()

    def rounded(self, weight: Tensor, scale: Tensor, ends: Ends) -> Tensor:
        """Returns the integers of a weight, in float32, by the rule in `qatkit.algorithms.gptq`.

        Rows are independent.

        Args:
            weight: [groups, rows, inputs].
            scale: the scale of each weight.
            ends: the least and the largest integer, broadcastable to the weight.
        """
        least, most = (
            self._in_order(torch.as_tensor(end, device=weight.device).expand_as(weight)) for end in ends
        )
        return self._by_steps(
            weight, scale, lambda steps, at: clamped(torch.round(steps), (least[:, at], most[:, at]))
        )

    def rounded_to(self, weight: Tensor, scale: Tensor, element: Element) -> Tensor:
        """Returns the same as `rounded` where each weight over its scale is a number of `element` instead of an
        integer.
        """
        return self._by_steps(weight, scale, lambda steps, _: elements.rounded(steps, element))

    def _in_order(self, of_weight: Tensor) -> Tensor:
        """Turns columns into rows, which are contiguous in memory: the loop below reads and writes one at a time."""
        return of_weight.gather(2, self._places[:, None].expand_as(of_weight)).mT.contiguous()

    def _by_steps(self, weight: Tensor, scale: Tensor, nearest: Callable[[Tensor, int], Tensor]) -> Tensor:
        steps = _rounded(self._in_order(weight), self._in_order(scale), nearest, self._factor).mT
        return torch.empty_like(weight).scatter_(2, self._places[:, None].expand_as(weight), steps)


def _rounded(
    weight: Tensor, scale: Tensor, nearest: Callable[[Tensor, int], Tensor], factor: Tensor
) -> Tensor:
    """Returns rounded steps [groups, inputs, rows] of a weight that is updated on the way, columns in their order.

    Args:
        weight, scale: [groups, inputs, rows].
        nearest: rounds steps [groups, rows] of one column.
        factor: the upper Cholesky factor of the inverse of the form, [groups, inputs, inputs].
    """
    found = torch.empty_like(weight)
    for start in range(0, weight.shape[1], _BLOCK):
        here, behind = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        part, own = weight[:, here], factor[:, here, here]
        errors = torch.empty_like(part)
        for i in range(part.shape[1]):
            at = start + i
            whole = nearest(part[:, i] / scale[:, at], at)
            found[:, at] = whole
            errors[:, i] = (part[:, i] - whole * scale[:, at]) / own[:, i, i, None]
            part[:, i + 1 :] -= own[:, i, i + 1 :, None] * errors[:, i, None]
        weight[:, behind] -= factor[:, here, behind].mT @ errors
    return found


def _places(form: Tensor, order: bool) -> Tensor:
    """Returns the columns [groups, inputs] in their order."""
    if order:
        return form.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    return torch.arange(form.shape[1], device=form.device).expand(form.shape[:2])
