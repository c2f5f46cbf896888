"""A range method: the range with the least mean squared error of rounding and clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.quant import numerics
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.observers.range_methods import Ends, HistogramObserver, Method, points_of, within
from qatkit.quant.spec import QuantSpec


@dataclass(frozen=True)
class MSE(Method):
    """The range with the least mean squared error of quantization, rounding and clipping together.

    The middle of every bin is quantized with each of `steps` ranges at a time. First both ends shrink
    together, then only the upper, then only the lower: in a coarse search by a factor of up to `furthest`, then in
    a fine search within one coarse step. With symmetric quantization both ends only move together, and an end at
    zero does not move. The bin that starts at zero counts as zero, which every range represents exactly.

    Attributes:
        steps: number of ranges that are tried at a time.
        furthest: the largest factor between an extreme and the chosen end.
    """

    steps: int = 64
    furthest: float = 1024.0

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        full = torch.tensor([histogram.low.item(), histogram.high.item()])
        points, weights = points_of(histogram)
        coarse = self.furthest ** -torch.linspace(0, 1, self.steps)
        step = self.furthest ** (1 / (self.steps - 1))
        fine = torch.linspace(1 / step, step, self.steps)
        best, least = full, _squared_error(points, weights, full[None], spec).item()
        for factors, around_best in ((coarse, False), (fine, True)):
            for moved in _moves(full, spec):
                start = best if around_best else full
                tried = torch.where(moved, start * factors[:, None], best)
                tried = torch.stack((tried[:, 0].clamp(min=full[0]), tried[:, 1].clamp(max=full[1])), 1)
                errors = _squared_error(points, weights, tried, spec)
                if errors.min() < least:
                    best, least = tried[errors.argmin()], errors.min().item()
        return within(best[0].item(), best[1].item(), full[0].item(), full[1].item())


def relative_error(histogram: Histogram, ends: Ends, spec: QuantSpec) -> float:
    """Returns the mean squared error of quantization by the range `ends` over the mean square of all values.

    0 if all values are zero.
    """
    points, weights = points_of(histogram)
    energy = (points.square() @ weights).item()
    return _squared_error(points, weights, torch.tensor([ends]), spec).item() / energy if energy else 0.0


def _moves(full: Tensor, spec: QuantSpec) -> list[Tensor]:
    """Returns masks of the ends that move together; an end at zero never moves, since every range contains zero."""
    free = torch.stack((full[0] < 0, full[1] > 0))
    if spec.symmetric or not free.all():
        return [free]
    return [free, torch.tensor([False, True]), torch.tensor([True, False])]


def _squared_error(points: Tensor, weights: Tensor, ranges: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the mean squared error [T] of quantizing `points` [n] with each of `ranges` [T, 2]."""
    scale, zero_point = numerics.choose_qparams(ranges[:, 0], ranges[:, 1], spec)
    qmin, qmax = spec.type_range
    scale, zero_point = scale[:, None], zero_point[:, None]
    q = (points / scale).round_().clamp_(qmin - zero_point, qmax - zero_point)
    return q.mul_(scale).sub_(points).square_() @ weights


class MSEObserver(HistogramObserver):
    """The observer of `MSE`."""

    def __init__(self) -> None:
        super().__init__(MSE())
