"""AdaRound: each weight is rounded up or down, whichever keeps the operator's output closest to the float one.

    min over V of  |f_a(W x) - f_a(W'(V) x')|²_F + λ·Σ(1 - |2·h(V) - 1|^β)         (`qatkit.algorithms.blocks.learn`)

Operators are rounded in graph order: x' is the output of the earlier operators after rounding, x is the
output of the float operators (asymmetric). f_a is the following activation, including a ReLU that a quantizer
replaces. Scales and biases do not change. `BlockReconstruction` does the same for several operators at once.
Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020, equation 25.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qatkit.algorithms.blocks.algorithm import LearnedRounding
from qatkit.graph.pass_result import PassResult

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.signature import Example

_TITLE = "adaround"


@dataclass(frozen=True)
class AdaRound(LearnedRounding):
    """Learns the rounding of every weight by minimizing the output error of its operator."""

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Learns the roundings; `changed` counts the changed operators. Fake quantization is on afterwards.

        Args:
            graph_module: the calibrated graph.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.blocks.learn import Rounding
        from qatkit.algorithms.blocks.lesson import rounded
        from qatkit.algorithms.blocks.partition import layers
        from qatkit.algorithms.blocks.walk import BlockWalk

        walker = BlockWalk.of(self, graph_module, inputs)
        walker.walk(layers(graph_module), Rounding(self.steps, self.lr, self.strength, self.warm), _TITLE)
        return PassResult(graph_module, rounded(self, walker.operators), walker.skipped)
