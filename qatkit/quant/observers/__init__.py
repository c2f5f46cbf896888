"""Observers: what is remembered of an activation to choose its range.

    base             the contract; minimum and maximum, and their moving average
    histogram        a histogram of a stream in fixed memory
    range_methods    the contract of methods that read a range from it, and the observer that keeps it for one
    percentile, distribution, entropy, squared_error    a method each, with its observer

Adding one: a file here with a subclass of `Observer`, or of `Method` and of `HistogramObserver`, and a file under
conf/calibration that names it by its dotted path.
"""

from qatkit.quant.observers.base import MinMaxObserver, MovingAverageMinMaxObserver, Observer
from qatkit.quant.observers.distribution import Distribution, DistributionObserver
from qatkit.quant.observers.entropy import Entropy, EntropyObserver
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.observers.percentile import Percentile, PercentileObserver
from qatkit.quant.observers.range_methods import HistogramObserver, Method, MinMax
from qatkit.quant.observers.squared_error import MSE, MSEObserver

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
