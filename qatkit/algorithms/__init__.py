"""Algorithms that change a model's parameters after training, using its weights or a few images, without labels.

Each, except `dead_channels`, is an `Algorithm`: a frozen dataclass whose fields are its settings.

    Equalize          before prepare_qat: ranges of channels moved between neighbouring operators
    ShiftChannels     before calibration: means of activations' channels moved into the following biases
    SmoothQuant       before calibration: ranges of activations' channels moved into the weights that read them
    AWQ               before calibration: weights scaled up where their inputs are large
    BiasCorrection    after calibration: the mean error of each operator removed from its bias
    MomentRounding    after calibration: weights rounded up or down so that operators' outputs change least
    GPTQ              after calibration: weights rounded by columns, each compensating for the errors of earlier ones
    SequentialMSE     after calibration: ranges of weights chosen by the error of the operators' outputs
    AdaRound          after calibration: each weight rounded up or down, by the error of its operator's output
    BlockReconstruction   AdaRound on the error of a block's output; it can also learn biases and activation scales
    dead_channels     a check for channels whose weights are all zero, which no algorithm can restore
"""

from __future__ import annotations

from qatkit.algorithms.adaround import AdaRound
from qatkit.algorithms.awq import AWQ
from qatkit.algorithms.base import Algorithm, algorithms_of
from qatkit.algorithms.bias_correction import BiasCorrection
from qatkit.algorithms.block_reconstruction import BlockReconstruction
from qatkit.algorithms.dead_channels import dead_channels
from qatkit.algorithms.equalize import Equalize
from qatkit.algorithms.gptq import GPTQ
from qatkit.algorithms.moment_rounding import MomentRounding
from qatkit.algorithms.sequential_mse import SequentialMSE
from qatkit.algorithms.shift_channels import ShiftChannels
from qatkit.algorithms.smooth_quant import SmoothQuant

__all__ = [
    "AWQ",
    "GPTQ",
    "AdaRound",
    "Algorithm",
    "BiasCorrection",
    "BlockReconstruction",
    "Equalize",
    "MomentRounding",
    "SequentialMSE",
    "ShiftChannels",
    "SmoothQuant",
    "algorithms_of",
    "dead_channels",
]
