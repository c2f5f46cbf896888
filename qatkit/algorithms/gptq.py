"""GPTQ: weights rounded column by column, each column's error compensated by the columns that still follow.

For a row w of a weight, rounded to w', the mean squared error of the output is (w - w')·H·(w - w'), with H
the second moments of the operator's inputs. When column i is rounded, the change of the others that minimizes
the form is

    w ← w - (w_i - w'_i) / U_ii · U_i        U: upper Cholesky factor of H⁻¹

Columns are taken in descending order of H_ii (`order`), so that the most important ones have the most others
to compensate for them. Scales and zero points are found before any column is rounded ("static groups"), and
the scales are fitted to the integers afterwards (`qatkit.algorithms.gptq_scales`). Operators are rounded in
graph order; H is computed from inputs that have passed the operators already rounded. The error of these
inputs is compensated first: with x the float inputs and x' the quantized ones, the row that reproduces the
float output best is

    w + share · w·E[(x - x')·x'ᵀ]·H⁻¹

An operator with a bias leaves means to it: H and E are covariances then, and the bias takes the mean error. A
weight that is also the table of an Embedding is rounded for the operator, and the table has the same
integers. The looked-up rows are then a little further from float, which costs less than a head rounded to the
nearest.

Sources: Frantar et al., "GPTQ: Accurate post-training quantization for generative pre-trained transformers",
2023, algorithm 1; act-order and static groups: its authors' code; the errors of the past: Li et al., "GPTAQ",
2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.blocks.algorithm import BlockAlgorithm
from qatkit.config.fields import FRACTION, Range, setting
from qatkit.graph.pass_result import PassResult

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.signature import Example

_TITLE = "gptq"


@dataclass(frozen=True)
class GPTQ(BlockAlgorithm):
    """Rounds weights column by column; each column compensates for the errors of the columns before it."""

    stays: ClassVar[str] = "rounded to nearest"
    formats: ClassVar[bool] = True
    tables: ClassVar[bool] = True
    order: bool = setting(
        True, "round columns in descending order of their second moments; false: in their own order"
    )
    damping: float = setting(
        0.01, "share of the mean second moment that is added to that of each input; raised if it is too small",
        Range(0, 1),
    )  # fmt: skip
    past: float = setting(0.5, "share of the error of earlier operators that is compensated", FRACTION)
    scales: bool = setting(
        True,
        "search scales of few bits and fit them to the integers; false: scales follow the weights' ranges",
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Rounds the weights; `changed` counts the operators.

        Afterwards fake quantization is on, and the operators' scales and rounding are fixed.

        Args:
            graph_module: calibrated.
            inputs: batches, as for `calibrate`, read no further than needed.
        """
        from qatkit.algorithms import biases
        from qatkit.algorithms.blocks.column_rounding import ColumnRounding
        from qatkit.algorithms.blocks.partition import layers
        from qatkit.algorithms.blocks.walk import BlockWalk

        biases.restore(graph_module)
        walker = BlockWalk.of(self, graph_module, inputs)
        walker.walk(layers(graph_module), ColumnRounding.of(self, graph_module), _TITLE, targets=False)
        return PassResult(graph_module, len(walker.operators), walker.skipped)
