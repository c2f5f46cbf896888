"""Mean and second moments of the inputs that each Conv and Linear multiplies by its weight.

For a Conv these are the patches under its kernel, group by group. About `PLACES` positions per image are
enough (at most twice as many are used). Moments of all operators at once would not fit into memory, so they
are computed in rounds, each with one pass over the images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms.batches import Tensors
from qatkit.quant.qat_layers import QATOperator

PLACES = 256
# Largest number of inputs in a block of moments, and of float32 values in a round (half a GiB).
_WIDEST, _ROUND = 4608, 2**27


@dataclass
class Moments:
    """Sums over `count` positions: `total` [groups, inputs] and `second` [groups, inputs, inputs], float32."""

    total: Tensor
    second: Tensor
    count: int = 0

    def add(self, x: Tensor) -> None:
        """Adds inputs [groups, inputs, positions]."""
        self.total += x.sum(2)
        self.second += x @ x.transpose(1, 2)
        self.count += x.shape[2]

    @property
    def mean(self) -> Tensor:
        """The mean, [groups, inputs]."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """The covariance, [groups, inputs, inputs]."""
        return self.second / self.count - self.mean[:, :, None] * self.mean[:, None]


def input_moments(
    graph_module: fx.GraphModule, operators: Iterable[QATOperator], images: list[Tensors]
) -> Iterator[tuple[QATOperator, list[Moments]]]:
    """Yields each operator with the moments of its inputs, in blocks of at most `_WIDEST` inputs.

    The quantizers stay on or off, as the caller has set them (`set_phase`).

    Args:
        graph_module: the graph.
        operators: the operators.
        images: batches of images, all of which are read once per round.
    """
    for chosen in _rounds(operators):
        found = {operator: _empty(operator) for operator in chosen}

        def add(operator: QATOperator, args: tuple[Any, ...], _: Tensor, found: Any = found) -> None:
            for block, x in zip(found[operator], patches(operator, args[0]).split(_WIDEST, 1), strict=True):
                block.add(x)

        with ExitStack() as stack:
            for operator in chosen:
                stack.callback(operator.register_forward_hook(cast(Any, add)).remove)
            for batch in images:
                graph_module(*batch)
        yield from found.items()


def patches(operator: nn.Module, x: Tensor) -> Tensor:
    """Returns the inputs of the weight at about `PLACES` positions per image, or at all if there are fewer.

    The shape is [groups, inputs of a group times kernel size, positions]; the type is float32.

    Args:
        x: the input of a Conv [N, C, ...] or Linear [..., C].
    """
    if isinstance(operator, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        return rows[:: max(1, len(rows) // (PLACES * x.shape[0]))].T[None].float()
    conv: Any = operator
    rank, sides = len(conv.kernel_size), conv._reversed_padding_repeated_twice
    if any(sides):
        zeros = conv.padding_mode == "zeros"
        x = F.pad(x, sides, "constant" if zeros else conv.padding_mode)
    for axis in range(rank):
        reach = (conv.kernel_size[axis] - 1) * conv.dilation[axis] + 1
        x = x.unfold(2 + axis, reach, conv.stride[axis])[..., :: conv.dilation[axis]]
    step = max(1, math.ceil((math.prod(x.shape[2 : 2 + rank]) / PLACES) ** (1 / rank)))
    grid = (slice(step // 2 if size > step else 0, None, step) for size in x.shape[2 : 2 + rank])
    x = x[(slice(None), slice(None), *grid)].unflatten(
        1, (conv.groups, -1)
    )  # [N, g, c, places..., kernel...]
    x = x.permute(1, 2, *range(3 + rank, 3 + 2 * rank), 0, *range(3, 3 + rank))
    return x.flatten(2 + rank).flatten(1, 1 + rank).float()


def _shape(operator: QATOperator) -> tuple[int, int]:
    """Returns the number of groups, and the number of a group's inputs times the kernel size."""
    return int(getattr(operator, "groups", 1)), operator.weight[0].numel()


def _blocks(operator: QATOperator) -> list[int]:
    inputs = _shape(operator)[1]
    return [min(_WIDEST, inputs - start) for start in range(0, inputs, _WIDEST)]


def _empty(operator: QATOperator) -> list[Moments]:
    groups, like = _shape(operator)[0], operator.weight.detach().float()
    return [
        Moments(like.new_zeros(groups, size), like.new_zeros(groups, size, size))
        for size in _blocks(operator)
    ]


def _rounds(operators: Iterable[QATOperator]) -> Iterator[list[QATOperator]]:
    chosen, floats = list[QATOperator](), 0
    for operator in operators:
        size = _shape(operator)[0] * sum(n * n for n in _blocks(operator))
        if chosen and floats + size > _ROUND:
            yield chosen
            chosen, floats = [], 0
        chosen.append(operator)
        floats += size
    if chosen:
        yield chosen
