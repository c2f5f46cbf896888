"""Algorithms: what changes a model's parameters after training, by its weights or a few images, without labels.

Each is an `Algorithm`, a frozen dataclass whose fields are its settings.

    Equalize          before prepare_qat: ranges of channels moved between neighbouring operators
    BiasCorrection    after calibration: the mean error of each operator taken out of its bias
    dead_channels     a check: what no algorithm can bring back
"""

from __future__ import annotations

from qatkit.algorithms.base import Algorithm, algorithms_of
from qatkit.algorithms.bias_correction import BiasCorrection
from qatkit.algorithms.dead_channels import dead_channels
from qatkit.algorithms.equalize import Equalize

__all__ = ["Algorithm", "BiasCorrection", "Equalize", "algorithms_of", "dead_channels"]
