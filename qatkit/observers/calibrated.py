"""Observers that keep a histogram of what calibration shows them, and choose the range when it ends.

Fine-tuning does not move their ranges: a histogram of the activations of weights that have changed since
would describe no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.observers.base import Observer
from qatkit.observers.histogram import Histogram
from qatkit.observers.methods import MSE, Distribution, Entropy, Method, Percentile
from qatkit.spec import QuantSpec


class HistogramObserver(Observer):
    """A histogram and the method that reads a range from it.

    Attributes:
        low, high: the extremes until `finish`, then the range chosen.
        histogram: kept afterwards: another method's range costs no second pass.
    """

    follows_training = False

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method, self.histogram = method, Histogram()

    def update(self, low: Tensor, high: Tensor, values: Tensor) -> None:
        self.histogram.add(values, low, high)
        self.low.copy_(self.histogram.low)
        self.high.copy_(self.histogram.high)

    def all_reduce(self) -> None:
        self.histogram.all_reduce()

    def finish(self, spec: QuantSpec) -> None:
        if self.histogram.low <= self.histogram.high:
            for end, chosen in zip(
                (self.low, self.high), self.method.range_of(self.histogram, spec), strict=True
            ):
                end.copy_(torch.tensor(chosen))


class PercentileObserver(HistogramObserver):
    """`methods.Percentile`."""

    def __init__(self, percentile: float = 99.99) -> None:
        super().__init__(Percentile(percentile))


class EntropyObserver(HistogramObserver):
    """`methods.Entropy`."""

    def __init__(self) -> None:
        super().__init__(Entropy())


class MSEObserver(HistogramObserver):
    """`methods.MSE`."""

    def __init__(self) -> None:
        super().__init__(MSE())


class DistributionObserver(HistogramObserver):
    """`methods.Distribution`."""

    def __init__(self, deviations: float = 4.0) -> None:
        super().__init__(Distribution(deviations))
