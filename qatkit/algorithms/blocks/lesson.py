"""What an algorithm gets of a block and gives back, and which operators it may change."""

from __future__ import annotations

import warnings
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

Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Lesson:
    """A block and what there is to learn from.

    Attributes:
        block: the nodes.
        module: the block alone; called with its inputs it gives its outputs.
        operators: of its operators those that may be changed, by site.
        chunks: how many batches of images there are.
        generator: of random numbers, the same whenever this block is learned.
        together: how many chunks a step should see: those of a block with few positions are small.
        inputs: of the quantized block, of some chunks.
        originals: of the float block, of some chunks.
        targets: the float outputs, of some chunks.
        importance: None, or of some chunks the weight of each value of the floating-point outputs.
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
    """What an algorithm makes of a block."""

    def learn(self, lesson: Lesson) -> Found:
        """What the block's operators should be; nothing is changed yet."""

    def apply(self, lesson: Lesson, found: Found) -> None:
        """Changes the operators to what `learn` found, now or before a kill."""


def changeable(
    graph_module: fx.GraphModule, what: str, *, tables: bool = False
) -> tuple[dict[str, QATOperator], list[tuple[str, str]]]:
    """The quantized Convs and Linears by site whose rounding or scale may be chosen, and (site, why not) of the others.

    Args:
        graph_module: prepared.
        what: stays as it is, in words.
        tables: whether a weight may be that of an Embedding, too (`tied_tables`).
    """
    tied = tied_tables(graph_module) if tables else {}

    def reason(module: QATOperator, reads: Counter[int]) -> str | None:
        if isinstance(module, Computed) and module.program("weight") is not None:
            return "its weight is computed from other parameters"
        if module.bn is not None:
            return "it has a BatchNorm of its own (schedule.batch_norm=fold folds it)"
        if reads[id(module.weight)] - len(tied.get(id(module.weight), ())) > 1:
            return "its weight serves several calls"
        return None

    chosen, skipped = sorted_out(graph_module, reason)
    return chosen, [(site, f"{what}: {reason}") for site, reason in skipped]


def tied_tables(graph_module: fx.GraphModule) -> dict[int, list[QATEmbedding]]:
    """Returns the Embeddings with a quantized table, by the id of the parameter that it is."""
    found: dict[int, list[QATEmbedding]] = {}
    for _, module, _ in quantized_weights(graph_module):
        if isinstance(module, QATEmbedding):
            found.setdefault(id(module.weight), []).append(module)
    return found


def rounded(algorithm: object, operators: dict[str, QATOperator]) -> int:
    """How many operators have a rounding of their own; warns where none has."""
    fakes = [operator.weight_fake_quant for operator in operators.values()]
    count = sum(fake is not None and fake.rounding is not None for fake in fakes)
    if not count:
        name = type(algorithm).__name__
        warnings.warn(
            f"{name}: no rounding better than the nearest was found; nothing is changed", stacklevel=3
        )
    return count
