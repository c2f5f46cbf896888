"""AdaRound: each weight is rounded up or down, whichever leaves the operator's output nearest to the float one.

    min over V of  |f_a(W x) - f_a(W'(V) x')|²_F + λ·Σ(1 - |2·h(V) - 1|^β)         (`qatkit.algorithms.blocks.learn`)

Operator by operator in the order of the graph: x' comes from the operators before as they were rounded, x from the
float ones (asymmetric), f_a is the activation behind, a ReLU that a quantizer stands for as well. Scales and biases
stay. `BlockReconstruction` does the same for several operators at once.
Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020, equation 25.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.algorithms.blocks.learn import Rounding
from qatkit.algorithms.blocks.lesson import changeable, rounded
from qatkit.algorithms.blocks.partition import layers
from qatkit.algorithms.blocks.walk import Walker
from qatkit.config.fields import COUNT, POSITIVE, Range, setting
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example

_TITLE = "adaround"


@dataclass(frozen=True)
class AdaRound(Algorithm):
    """Learns the rounding of every weight from the output error of its operator."""

    stage: ClassVar[str] = CALIBRATED
    expensive: ClassVar[bool] = True
    stays: ClassVar[str] = "rounding not learned"
    images: int = setting(
        128, "of the calibration images, whose activations between two operators are kept", COUNT
    )
    steps: int = setting(100, "of Adam an operator", COUNT)
    lr: float = setting(0.03, "of the variable behind each rounding", POSITIVE)
    strength: float = setting(
        10.0, "of the pull to up or down, in shares of the error at the start", Range(0)
    )
    warm: float = setting(0.2, "share of the steps before that", Range(0, 1))
    batch_size: int = setting(
        4, "images kept together; a step takes several such lots of small tensors", COUNT
    )
    memory: int = setting(2048, "MiB of activations in memory; what is more is in temporary files", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """`changed` counts the operators that got a rounding; fake quantization is on afterwards.

        Args:
            graph_module: calibrated.
            inputs: batches, as `calibrate` takes them, read no further than needed.
        """
        walker = Walker.of(self, graph_module, inputs)
        walker.walk(layers(graph_module), Rounding(self.steps, self.lr, self.strength, self.warm), _TITLE)
        return PassResult(graph_module, rounded(self, walker.operators), walker.skipped)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """The quantized operators that are rounded to the nearest."""
        return changeable(graph_module, self.stays)[1]
