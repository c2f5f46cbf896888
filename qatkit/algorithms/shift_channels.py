"""Channel shifts: activations become easy to quantize because the means of their channels are moved into biases.

    reader(x)  =  reader(x - m) + W·m        m_j = E[x_j]

A scale per tensor has to cover the means of all channels, which carry no information. The subtraction is free
where x comes from an operator with a bias: a LayerNorm, GroupNorm or BatchNorm, a Conv or Linear. Readers are
found by following the channels through the graph (`qatkit.graph.channels`): through views, and through
attention, whose weights add up to 1. Shifts help with few bits, and before `SmoothQuant`, since its factors
fit better to channels that are centred at zero.

Sources: Li et al., "RepQ-ViT: Scale Reparameterization for Post-Training Quantization of Vision
Transformers", 2023, section 3.3, where zero points are the shifts; Wei et al., "Outlier Suppression+", 2023,
section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import OBSERVED, Algorithm
from qatkit.config.fields import COUNT, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class ShiftChannels(Algorithm):
    """Moves the means of an activation's channels into the following biases, without changing the function."""

    stage: ClassVar[str] = OBSERVED
    images: int = setting(128, "number of calibration samples for the mean of each channel", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Shifts the channels; `changed` counts the operators whose outputs were shifted.

        Args:
            graph_module: the prepared graph; its ranges are found afterwards.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.channel_means import shift

        return shift(self.images, graph_module, inputs)
