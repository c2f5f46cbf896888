"""GPTQ: weights rounded column by column, each column's error compensated by the columns that still follow.

For a row w of a weight, rounded to w', the mean squared error of the output is (w - w')·H·(w - w'), with H
the second moments of the operator's inputs. When column i is rounded, the following change of the other
columns minimizes the error:

    w ← w - (w_i - w'_i) / U_ii · U_i        U: upper Cholesky factor of H⁻¹

Columns are rounded in order of decreasing H_ii (`order`), so that as many columns as possible remain to
compensate for the most important ones. Scales and zero points are found before any column is rounded ("static
groups"). The scales of low-bit weights are fitted to the integers afterwards
(`qatkit.algorithms.gptq_scales`). Operators are rounded in graph order; H is computed from inputs that have
passed the operators already rounded. The error of these inputs is compensated first. With x the float inputs
and x' the quantized ones, the row that best reproduces the float output is

    w + past · w·E[(x - x')·x'ᵀ]·H⁻¹        past: the setting

If an operator has a bias, H and E are covariances, and the bias compensates for the mean error. A weight that
is also the table of an Embedding (the head of a language model) is rounded for the operator, and a table of
the same type and granularity gets the same integers. The looked-up rows are then a little less accurate,
which costs less than rounding the weight to the nearest.

Sources: Frantar et al., "GPTQ: Accurate post-training quantization for generative pre-trained transformers",
2023, algorithm 1; act-order and static groups: its authors' code; errors of earlier operators: Li et al.,
"GPTAQ", 2025.
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
        True,
        "round columns in descending order of the inputs' second moments; false: in the order of the weight",
    )
    damping: float = setting(
        0.01,
        "share of the mean second moment that is added to that of each input; multiplied by ten "
        "until the Cholesky decomposition succeeds",
        Range(0, 1),
    )
    past: float = setting(0.5, "share of the error of earlier operators that is compensated", FRACTION)
    scales: bool = setting(
        True,
        "search the scales of low-bit weights and fit them to the integers; false: scales follow "
        "from the weights' ranges",
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Rounds the weights; `changed` counts the operators.

        Afterwards fake quantization is on, and the operators' scales and rounding are fixed.

        Args:
            graph_module: the calibrated graph.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms import biases
        from qatkit.algorithms.blocks.column_rounding import ColumnRounding
        from qatkit.algorithms.blocks.partition import layers
        from qatkit.algorithms.blocks.walk import BlockWalk

        biases.restore(graph_module)
        walker = BlockWalk.of(self, graph_module, inputs)
        walker.walk(layers(graph_module), ColumnRounding.of(self, graph_module), _TITLE, targets=False)
        return PassResult(graph_module, len(walker.operators), walker.skipped)
