"""Selects the images of a batch that the sensitivity estimate uses in its backward pass.

    the images that are clipped most    weight 1
    a random part of the others         weight (number of others) / (number drawn), so that sums are unbiased

The loss from rounding is about the same in every image, so a few images are enough to measure it. The loss from
clipping may occur in only one image of a hundred, which most random draws would miss.

The clipped images are found by a forward pass, which takes a third of the time of a forward and a backward pass. This
pass shows how far the values of each image exceed each range. For each range, the square of an image's excess is
divided by the sum of squares over all images so far. Images are ranked by their largest share over all ranges.

At least 32 images are selected from the first batches. If all images of a batch are selected, as for models that accept
only one batch size, their weight is 1.
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

# The fraction of a batch that is selected, the least number of images that are selected from the first batches, and the
# fraction of the selected images that are clipped most. Figures: docs/decisions/0020-sensitivity-analysis.md.
SHARE, ALL_OF_THE_FIRST, CLIPPED = 1 / 6, 32, 1 / 4


class DrawnImages(PreparedInterpreter):
    """Selects images batch by batch.

    Args:
        graph_module: a prepared graph; its quantizers must be off while images are selected.
        sites: the switches of the activations whose ranges are examined; weights among them are ignored.
    """

    def __init__(self, graph_module: fx.GraphModule, sites: Iterable[Switch]) -> None:
        super().__init__(graph_module)
        self._ranges = {s.node: cast(FakeQuantize, s.quantizers[0]) for s in sites if s.kind == ACTIVATION}
        self._squares: dict[fx.Node, Tensor] = {}  # the sum of squares of the excess over all images so far
        self._reach: dict[fx.Node, Tensor] = {}
        self._seen, self._images = 0, 1

    def draw(
        self, tensors: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns the inputs of the selected images, and the weights of these images [images].

        Args:
            tensors: the graph's inputs; all images are selected if the model accepts only one batch size.
            generator: the generator of the random draws.
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
    """Returns how far the values [rows, values] of each row exceed the quantizer's range, [rows]; 0 within it."""
    record = quantizer.range_record()
    low, high = float(record["low"]), float(record["high"])
    over = values.amax(1) - high
    if low == quantizer.bounds[0]:  # no value can be lower
        return over.clamp(min=0)
    return torch.maximum(over, low - values.amin(1)).clamp(min=0)
