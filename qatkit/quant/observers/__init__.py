"""Observers: modules that collect statistics of an activation to choose its range.

    base             the interface; minimum and maximum, and their moving average
    histogram        a histogram of a stream in fixed memory
    range_methods    the interface of methods that choose a range from a histogram, and their observer
    percentile, distribution, entropy, squared_error    one method each, with its observer

A new observer needs a file here with a subclass of `Observer`, or with subclasses of `Method` and
`HistogramObserver`, and a file under conf/calibration that names it by its dotted path.
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
