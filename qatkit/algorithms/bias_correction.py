"""Bias correction: rounding a weight shifts the mean of the operator's output; the bias compensates for the shift.

    analytic     E[op(x, W')] - E[op(x, W)] = op(E[x], W' - W), since op is linear. One pass of the float model
                 gives E[x], the mean input of each operator at every position, borders included
    empirical    the mean difference of each operator's output, quantized minus float. In graph order, every
                 operator is corrected before the next one runs, so that a shift from earlier operators
                 (rounded or clipped activations) is removed as well

The empirical mean leaves out, channel by channel, the images with the lowest and the highest differences. If
the ranges clip a single image in 512, its difference may be as large as those of all others together, and
would shift the bias for all of them (figures: docs/decisions/0015-small-measurements.md).

W' is the weight as exported (`WeightFakeQuantize`); the corrected bias is rounded to the steps of its type afterwards.
Source: Nagel et al., "Data-free quantization through weight equalization and bias correction", 2019, section
4.2 and appendix D. The paper takes E[x] from the preceding BatchNorm; here it is observed, so that no
BatchNorm is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.config.fields import COUNT, Choices, Range, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class BiasCorrection(Algorithm):
    """Subtracts the mean quantization error of every operator's output from the operator's bias, after calibration."""

    stage: ClassVar[str] = CALIBRATED
    formats: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = False
    method: str = setting(
        "empirical",
        "how the mean error is found. analytic: from the mean of the float inputs; empirical: from "
        "the outputs of the quantized and the float model",
        Choices(("analytic", "empirical")),
    )
    images: int = setting(
        128,
        "number of calibration samples; empirical uses them as one batch, whose activations must fit into memory",
        COUNT,
    )
    trim: float = setting(
        0.05,
        "share of samples to ignore at each end, those with the smallest and those with the largest "
        "errors; only with method=empirical",
        Range(0, 0.49),
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Corrects the biases; `changed` counts the operators, and fake quantization is on afterwards.

        Args:
            graph_module: the prepared graph, with ranges.
            inputs: batches as for `calibrate`; no more are read than needed. Batches of a model with a fixed batch
                size are not cut, and "empirical" uses only the first of them.
        """
        from qatkit.algorithms.bias_errors import correct

        return correct(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the quantized operators whose bias is not corrected."""
        from qatkit.algorithms.bias_errors import targets

        return targets(graph_module)[1]
