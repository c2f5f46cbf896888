"""Draws the images of a batch that the sensitivity estimate follows backward: the hardest clipped, others at random.

    clipped hardest     weight 1
    drawn               weight others / drawn: sums over the images are unbiased

The loss from rounding is much the same in every image, so a few images show it. The loss from clipping may
occur on one image in a hundred, which most draws would miss. But a forward pass, a third of the cost, shows
how far values reach beyond each range. For each range, an image has a share of the sum of squares of that
reach over all images so far; its largest share over the ranges counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.analysis.switches import Switch
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.graph.signature import batch_size, graph_axes
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.records.analysis import ACTIVATION

# Share of a batch that is followed, the number of first images that are all followed, and the part of the
# followed ones that is clipped hardest. Figures: docs/decisions/0020-sensitivity-analysis.md.
SHARE, ALL_OF_THE_FIRST, CLIPPED = 1 / 6, 32, 1 / 4


class DrawnImages(PreparedInterpreter):
    """Draws images batch by batch.

    Args:
        graph_module: prepared, its quantizers off while images are drawn.
        sites: the ranges that count.
    """

    def __init__(self, graph_module: fx.GraphModule, sites: Iterable[Switch]) -> None:
        super().__init__(graph_module)
        self._ranges = {s.node: cast(FakeQuantize, s.quantizers[0]) for s in sites if s.kind == ACTIVATION}
        self._squares: dict[fx.Node, Tensor] = {}  # of the reach, summed over the images so far
        self._reach: dict[fx.Node, Tensor] = {}
        self._seen, self._images = 0, 1

    def draw(
        self, tensors: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns the images to follow, and the weight of each [images].

        Args:
            tensors: the graph's inputs; where a model accepts only one batch size, all are followed.
        """
        axes = graph_axes(self._graph, tensors)
        self._images = count = batch_size(tensors, axes)
        wanted = max(math.ceil(SHARE * count), min(count, ALL_OF_THE_FIRST - self._seen))
        self._seen += count
        if wanted == count or all(axis is None for axis in axes):
            return tensors, torch.ones(count)
        self._reach = {}
        with torch.no_grad():
            self.outputs(tensors)
        chosen, weights = self._chosen(wanted, generator)
        few = (
            tensor if axis is None else tensor.index_select(axis, chosen.to(tensor.device))
            for tensor, axis in zip(tensors, axes, strict=True)
        )
        return tuple(few), weights

    def _chosen(self, wanted: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shares = torch.zeros(self._images)
        for node, reach in self._reach.items():
            squares = reach.double().square().cpu()
            total = self._squares[node] = self._squares.get(node, torch.tensor(0.0)) + squares.sum()
            if total > 0:
                shares = torch.maximum(shares, squares / total)
        order = shares.argsort(descending=True)
        certain = min(round(CLIPPED * wanted), int((shares > 0).sum()))
        others = order[certain:]
        drawn = others[torch.randperm(len(others), generator=generator)[: wanted - certain]]
        weights = torch.cat([torch.ones(certain), torch.full((len(drawn),), len(others) / len(drawn))])
        return torch.cat([order[:certain], drawn]), weights

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        quantizer = self._ranges.get(n)
        if quantizer is not None and _by_images(result, self._images):
            self._reach[n] = reach_beyond(quantizer, result.reshape(self._images, -1))
        return result


def _by_images(value: Any, images: int) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0 and value.ndim > 0 and len(value) % images == 0


def reach_beyond(quantizer: FakeQuantize, values: Tensor) -> Tensor:
    """Returns how far values reach beyond the quantizer's range, [rows] for values [rows, places]; 0 within."""
    record = quantizer.range_record()
    low, high = float(record["low"]), float(record["high"])
    over = values.amax(1) - high
    if low == quantizer.bounds[0]:  # nothing is lower
        return over.clamp(min=0)
    return torch.maximum(over, low - values.amin(1)).clamp(min=0)
