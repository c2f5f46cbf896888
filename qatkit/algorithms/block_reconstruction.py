"""Block reconstruction: the weights of several operators are rounded together, for the least error of their output.

    min over V, b of  E |F^½ ∘ (y' - y)|² + λ·Σ(1 - |2·h(V) - 1|^β)                (`qatkit.algorithms.blocks.learn`)

y and y' are a block's outputs in float and quantized. A block is, for example, a residual block or a layer of
a transformer (`qatkit.algorithms.blocks.partition`). Errors inside a block count only as far as they reach
its output. Biases may be learned together with the roundings (`bias_lr`). Scales of activations may be
learned before them, in a separate walk (`scale_lr`). All scales are then aligned again, so that the roundings
fit the exported scales. F is 1, or the diagonal of the Fisher information
(`qatkit.algorithms.blocks.fisher`), which costs a backward pass through the rest of the model for every block
and image.
Sources: Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", 2021,
equation 10; Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets" (AdaQuant),
2021, equation 4, for biases and scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qatkit.algorithms.blocks.algorithm import LearnedRounding
from qatkit.config.fields import COUNT, Range, setting
from qatkit.graph.pass_result import PassResult

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class BlockReconstruction(LearnedRounding):
    """Learns the rounding of every weight by minimizing the output error of its block."""

    operators: int = setting(5, "largest number of quantized Convs and Linears in a block", COUNT)
    bias_lr: float = setting(0.0, "learning rate of the biases; 0: biases are not learned", Range(0))
    scale_lr: float = setting(
        0.0, "learning rate of the logarithms of activation scales; 0: scales are not learned", Range(0)
    )
    fisher: bool = setting(
        False,
        "weight the errors in a block's output by their effect on the model's output; false: all count equally",
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Learns the roundings; `changed` counts the changed operators. Fake quantization is on afterwards.

        Args:
            graph_module: the calibrated graph.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.blocks.learn import Rounding
        from qatkit.algorithms.blocks.lesson import rounded
        from qatkit.algorithms.blocks.partition import blocks
        from qatkit.algorithms.blocks.scales import Scales, settle
        from qatkit.algorithms.blocks.walk import BlockWalk

        walker = BlockWalk.of(self, graph_module, inputs)
        parts = blocks(graph_module, self.operators)
        if self.scale_lr:
            walker.walk(parts, Scales(self.steps, self.scale_lr), "scales of activations")
            settle(graph_module)
        rounding = Rounding(self.steps, self.lr, self.strength, self.warm, self.bias_lr)
        walker.walk(parts, rounding, "block reconstruction", fisher=self.fisher)
        return PassResult(graph_module, rounded(self, walker.operators), walker.skipped)
