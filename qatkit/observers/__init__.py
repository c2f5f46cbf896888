"""Observers: what is remembered of an activation to choose its range.

    base        the contract; minimum and maximum, and their moving average
    histogram   a histogram of a stream in fixed memory
    methods     ranges from a histogram: percentile, entropy, squared error, distribution
    calibrated  the observers that keep a histogram and choose by one method

Adding one: a subclass of `Observer`, or of `Method`, and a file under conf/calibration that names it.
"""

from qatkit.observers.base import MinMaxObserver, MovingAverageMinMaxObserver, Observer
from qatkit.observers.calibrated import (
    DistributionObserver,
    EntropyObserver,
    HistogramObserver,
    MSEObserver,
    PercentileObserver,
)
from qatkit.observers.histogram import Histogram
from qatkit.observers.methods import MSE, Distribution, Entropy, Method, MinMax, Percentile

__all__ = [
    "MSE",
    "Distribution",
    "DistributionObserver",
    "Entropy",
    "EntropyObserver",
    "Histogram",
    "HistogramObserver",
    "MSEObserver",
    "Method",
    "MinMax",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "Observer",
    "Percentile",
    "PercentileObserver",
]
