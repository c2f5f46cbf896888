"""The calibration images that an algorithm needs, as several batches or as a single batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from qatkit.graph.signature import Example, batch_multiple, batch_size, graph_axes, inputs_of, on, resized

Tensors = tuple[Tensor, ...]


def first_images(graph_module: fx.GraphModule, batches: Iterable[Example], images: int) -> Iterator[Tensors]:
    """Yields batches, on the graph's device, until there are `images` images.

    The last batch is cut to the number of images that is still missing, rounded up to a batch size that the
    model supports. It is not cut if the batch size is fixed.
    """
    device = next(p.device for p in graph_module.parameters())
    left = images
    for batch in batches:
        tensors = inputs_of(graph_module, batch)
        axes = graph_axes(graph_module, tensors)
        size = batch_size(tensors, axes)
        multiple = batch_multiple(graph_module)
        rows = -(-left // multiple) * multiple
        yield on(device, tensors if size <= rows else resized(tensors, rows, axes))
        left -= size
        if left <= 0:
            return


def joined(graph_module: fx.GraphModule, batches: Iterable[Tensors]) -> Tensors:
    """Joins all batches into one; inputs without a batch axis are taken from the first.

    For a model with a fixed batch size, this is the first batch.
    """
    found = list(batches)
    axes = graph_axes(graph_module, found[0])
    return tuple(
        parts[0] if axis is None else torch.cat(parts, axis)
        for parts, axis in zip(zip(*found, strict=True), axes, strict=True)
    )
