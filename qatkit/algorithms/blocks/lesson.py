"""The interface of a block algorithm: its inputs and results for a block, and the operators that it may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.partition import Block
from qatkit.graph.quantizers import quantized_weights, sorted_out
from qatkit.quant.computed_weights import Computed
from qatkit.quant.qat_layers import QATEmbedding, QATOperator
from qatkit.warning import warn

Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Lesson:
    """A block and the data to learn from.

    Attributes:
        block: the nodes of the block.
        module: the block as a module, from its inputs to its outputs.
        operators: the operators of the block that may be changed, by site.
        chunks: the number of batches of images.
        generator: a generator of random numbers, in the same state whenever this block is learned.
        together: the number of chunks per step, more than one for a block with small tensors.
        inputs: a function that returns the inputs of the quantized block for some chunks.
        originals: a function that returns the inputs of the float block for some chunks.
        targets: a function that returns the float outputs for some chunks.
        importance: a function that returns the weight of each value of the floating-point outputs for some
            chunks; None: all values have the same weight.
    """

    block: Block
    module: fx.GraphModule
    operators: dict[str, QATOperator]
    chunks: int
    generator: torch.Generator
    together: int
    inputs: Callable[[Sequence[int]], Tensors]
    originals: Callable[[Sequence[int]], Tensors]
    targets: Callable[[Sequence[int]], Tensors]
    importance: Callable[[Sequence[int]], Tensors] | None = None


class Learner(Protocol):
    """The part of an algorithm that learns a block."""

    def learn(self, lesson: Lesson) -> Found:
        """Returns new values for the block's operators and quantizers, without changing them."""

    def apply(self, lesson: Lesson, found: Found) -> None:
        """Applies the results of `learn` to the block; `found` may come from the journal of a killed run."""


def changeable(
    graph_module: fx.GraphModule, what: str, *, tables: bool = False
) -> tuple[dict[str, QATOperator], list[tuple[str, str]]]:
    """Returns quantized Convs and Linears that can be changed, by site, and (site, reason) of the other quantized ones.

    Args:
        graph_module: the prepared graph.
        what: the beginning of each reason, such as "rounding not learned".
        tables: whether a weight may also be the table of an Embedding (`tied_tables`).
    """
    tied = tied_tables(graph_module) if tables else {}

    def reason(module: QATOperator, reads: Counter[int]) -> str | None:
        if isinstance(module, Computed) and module.program("weight") is not None:
            return "its weight is computed from other parameters"
        if module.bn is not None:
            return "its BatchNorm is not folded (schedule.batch_norm=fold folds it)"
        if reads[id(module.weight)] - len(tied.get(id(module.weight), ())) > 1:
            return "several calls share its weight"
        return None

    chosen, skipped = sorted_out(graph_module, reason)
    return chosen, [(site, f"{what}: {reason}") for site, reason in skipped]


def tied_tables(graph_module: fx.GraphModule) -> dict[int, list[QATEmbedding]]:
    """Returns the Embeddings with a quantized table, by the id of the table's parameter."""
    found: dict[int, list[QATEmbedding]] = {}
    for _, module, _ in quantized_weights(graph_module):
        if isinstance(module, QATEmbedding):
            found.setdefault(id(module.weight), []).append(module)
    return found


def rounded(algorithm: object, operators: dict[str, QATOperator]) -> int:
    """Returns the number of operators whose weight has fixed roundings; warns if there are none."""
    fakes = [operator.weight_fake_quant for operator in operators.values()]
    count = sum(fake is not None and fake.rounding is not None for fake in fakes)
    if not count:
        found = "nothing better than rounding to nearest" if operators else "no operator that it can change"
        warn(f"{type(algorithm).__name__} found {found} and changed nothing")
    return count
