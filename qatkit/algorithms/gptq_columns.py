"""The arithmetic of GPTQ, on tensors only; the first axis of all tensors is the groups of a convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qatkit.quant.formats import elements
from qatkit.quant.formats.table import Element
from qatkit.quant.numerics import Ends, clamped

# Number of columns that are rounded before their errors are applied to the others, and largest number of
# attempts, each with ten times the damping.
_BLOCK, _TRIES = 128, 6


def damped(form: Tensor, share: float) -> Tensor:
    """Returns a quadratic form with a share of its diagonal's mean added to its diagonal.

    Args:
        form: the form, [groups, inputs, inputs].
        share: the share of the mean.
    """
    found = form.clone()
    diagonal = found.diagonal(dim1=1, dim2=2)
    diagonal += share * diagonal.mean(1, keepdim=True)
    return found


def damped_factor(form: Tensor, damping: float) -> Tensor:
    """Returns the lower Cholesky factor of a damped quadratic form, float64.

    Args:
        form: the form, [groups, inputs, inputs], symmetric and positive semidefinite. A diagonal value of 0
            is replaced by 1: the weights of an input that is always 0 are rounded to the nearest, and affect
            no others.
        damping: share of the diagonal's mean that is added to the diagonal; it is multiplied by ten as long
            as the form is singular.

    Raises:
        ValueError: the form is not finite, or not positive with any damping.
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
        order: whether columns are rounded in order of decreasing values on the diagonal.
        damping: the damping of `damped_factor`.

    Attributes:
        importance: the cost of each column's squared error after the others have compensated for it, [groups,
            inputs].

    Raises:
        ValueError: `form` is not finite, or not positive with any damping (`damped_factor`).
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
            weight: the weight, [groups, rows, inputs].
            scale: the scale of each value, in the weight's shape.
            ends: the smallest and the largest integer, broadcastable to the weight.
        """
        least, most = (
            self._in_order(torch.as_tensor(end, device=weight.device).expand_as(weight)) for end in ends
        )
        return self._by_steps(
            weight, scale, lambda steps, at: clamped(torch.round(steps), (least[:, at], most[:, at]))
        )

    def rounded_to(self, weight: Tensor, scale: Tensor, element: Element) -> Tensor:
        """Returns the same as `rounded`, but with values of the number format `element` instead of integers."""
        return self._by_steps(weight, scale, lambda steps, _: elements.rounded(steps, element))

    def _in_order(self, of_weight: Tensor) -> Tensor:
        """Returns the columns as rows, in the order in which they are rounded.

        Rows are contiguous in memory, and `_rounded` processes one column at a time.
        """
        return of_weight.gather(2, self._places[:, None].expand_as(of_weight)).mT.contiguous()

    def _by_steps(self, weight: Tensor, scale: Tensor, nearest: Callable[[Tensor, int], Tensor]) -> Tensor:
        steps = _rounded(self._in_order(weight), self._in_order(scale), nearest, self._factor).mT
        return torch.empty_like(weight).scatter_(2, self._places[:, None].expand_as(weight), steps)


def _rounded(
    weight: Tensor, scale: Tensor, nearest: Callable[[Tensor, int], Tensor], factor: Tensor
) -> Tensor:
    """Returns the rounded steps [groups, inputs, rows] of a weight; changes the weight in place.

    Args:
        weight, scale: the weight and its scales, [groups, inputs, rows], inputs in the order of rounding.
        nearest: a function that rounds the steps [groups, rows] of one column.
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
    """Returns the indices of the columns, [groups, inputs], in the order in which they are rounded."""
    if order:
        return form.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    return torch.arange(form.shape[1], device=form.device).expand(form.shape[:2])
