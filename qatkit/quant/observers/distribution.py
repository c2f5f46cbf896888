"""A range method: a number of standard deviations around the mean."""

from __future__ import annotations

from dataclasses import dataclass

from qatkit.config.fields import limit_of
from qatkit.config.schema import CalibrationConfig
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.observers.range_methods import Ends, HistogramObserver, Method, within
from qatkit.quant.spec import QuantSpec


@dataclass(frozen=True)
class Distribution(Method):
    """The range mean ± deviations·σ, cut to the extremes.

    For a normal distribution at 8 bits, four deviations are near the least squared error. Source:
    Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment", 2019.

    Attributes:
        deviations: the distance from the mean to either end, in standard deviations.

    Raises:
        ConfigError: `deviations` is not above 0.
    """

    deviations: float = 4.0

    def __post_init__(self) -> None:
        limit_of(CalibrationConfig, "deviations").check("calibration.deviations", self.deviations)

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        counts, edges = histogram.bins()
        middles, share = (edges[:-1] + edges[1:]) / 2, counts / counts.sum()
        mean = (share * middles).sum()
        half = self.deviations * (share * (middles - mean) ** 2).sum().sqrt().item()
        return within(mean.item() - half, mean.item() + half, edges[0].item(), edges[-1].item())


class DistributionObserver(HistogramObserver):
    """The observer of `Distribution`."""

    def __init__(self, deviations: float = 4.0) -> None:
        super().__init__(Distribution(deviations))
