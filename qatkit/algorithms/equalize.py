"""Cross-layer equalization: the same function with channels of equal range.

    second(f(first(x)))        f(s·y) = s·f(y) for s > 0: a ReLU, poolings, dropout, a flatten, or none

Dividing channel i of `first` by s_i and multiplying input i of `second` by it changes nothing in float. With

    s_i = sqrt(r1_i / r2_i)    r1_i, r2_i: largest |weight| of output i of `first` and of input i of `second`

both ranges become sqrt(r1_i·r2_i), so that one scale per tensor serves all channels. An operator may be the
second of one pair and the first of the next (conv → depthwise → conv), so the pairs are visited in turn until
the ranges hardly change (`tolerance`), at most `rounds` times.

This helps where channels have different ranges but share one scale. Where their ranges are similar, or each
channel has its own scale, nothing is gained (figures: docs/decisions/0015-small-measurements.md).

Source: Nagel et al., "Data-free quantization through weight equalization and bias correction", 2019, section
4.1. The paper's absorption of high biases needs the statistics of a BatchNorm and is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import FUSED, Algorithm
from qatkit.config.fields import COUNT, Choices, Range, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class Equalize(Algorithm):
    """Gives the channels of neighbouring operators equal ranges; only relu6=relu changes the model's function."""

    stage: ClassVar[str] = FUSED
    rescales: ClassVar[bool] = True
    formats: ClassVar[bool] = True
    relu6: str = setting(
        "keep",
        "keep: operators with a ReLU6 between them are not equalized, because its bound would differ by channel; relu: "
        "the ReLU6 becomes a ReLU, which changes the function where its input exceeds 6",
        Choices(("keep", "relu")),
    )
    rounds: int = setting(200, "largest number of rounds over all pairs of neighbouring operators", COUNT)
    tolerance: float = setting(
        1e-4, "rounds end when every factor of a channel differs from 1 by less than this", Range(0)
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Example) -> PassResult:
        """Equalizes the channels; `changed` counts the pairs, `skipped` names operators that could not be equalized.

        Args:
            graph_module: the graph after fuse and stub, before prepare_qat.
            inputs: one batch with the real shapes.
        """
        from qatkit.algorithms.channel_pairs import equalize

        return equalize(self, graph_module, inputs)
