"""Calibrates the ranges of all activations with real images, before any fine-tuning.

The images pass through the graph once, in inference mode. Every FakeQuantize observes and none quantizes. An observer
keeps only a few numbers, so memory does not grow with the number of images. A batch of large images is run in parts,
which observers treat as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.calibration.limits import set_limits
from qatkit.graph.phase import inference, observe_in_parts, set_phase
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.scales.align import align
from qatkit.graph.scales.shared import choose_shared_ranges
from qatkit.graph.signature import Example, batch_multiple, batch_size, graph_axes, inputs_of, on
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit_verify.errors import ConfigError

_VALUES = (
    2**22
)  # number of input values that are run together: one image of 1024x1024 pixels, or 27 of 224x224


def calibrate(graph_module: fx.GraphModule, batches: Iterable[Example]) -> int:
    """Calibrates the ranges of a graph and turns fake quantization on; returns the number of images.

    Args:
        graph_module: a prepared graph.
        batches: batches of the graph's inputs: images [N, C, H, W], or several tensors in the graph's order or by
            name.

    Raises:
        ConfigError: there are no images, a batch has another number of tensors than the graph has inputs, an operator
            was never reached, or an activation is NaN or infinite. The message names the first such site in graph
            order.
    """
    device = next((p.device for p in graph_module.parameters()), torch.device("cpu"))
    images = 0

    def run(batch: Example) -> None:
        nonlocal images
        tensors = inputs_of(graph_module, batch)
        axes = graph_axes(graph_module, tensors)
        images += batch_size(tensors, axes)
        parts = list(_parts(tensors, axes, batch_multiple(graph_module)))
        observe_in_parts(graph_module, wanted=len(parts) > 1)
        for part in parts:
            graph_module(*on(device, part))
        observe_in_parts(graph_module, wanted=False)

    calibrate_parts({"": graph_module}, graph_module, run, batches)
    return images


def _parts(
    tensors: Sequence[Tensor], axes: Sequence[int | None], multiple: int
) -> Iterator[tuple[Tensor, ...]]:
    """Splits a batch into parts of about `_VALUES` input values; their sizes are multiples of `multiple`."""
    if all(axis is None for axis in axes):
        yield tuple(tensors)
        return
    count = batch_size(tensors, axes)
    size = max(1, _VALUES * count // max(1, sum(one.numel() for one in tensors)) // multiple) * multiple
    for start in range(0, count, size):
        rows = min(size, count - start)
        yield tuple(
            one if axis is None else one.narrow(axis, start, rows)
            for one, axis in zip(tensors, axes, strict=True)
        )


def calibrate_parts(
    parts: Mapping[str, fx.GraphModule], model: nn.Module, run: Callable[[Any], Any], batches: Iterable[Any]
) -> None:
    """Calibrates the prepared parts of a model while the whole model runs, and turns their fake quantization on.

    Args:
        parts: the prepared graphs, by their paths in the model.
        model: the model that contains them.
        run: a function that runs the whole model on a batch.
        batches: the batches for `run`.

    Raises:
        ConfigError: there are no batches, an operator was never reached, or an activation is NaN or infinite.
    """
    quantizers = {
        ".".join(p for p in (path, site) if p): quantizer
        for path, part in parts.items()
        for site, quantizer in fake_quantizers(part).items()
    }
    seen = False
    with inference(model, parts.values()):
        for part in parts.values():
            set_phase(part, observe=True, quantize=False, calibrating=True)
        for batch in batches:
            run(batch)
            seen = True
            _check_finite(quantizers)
    if not seen:
        raise ConfigError("calibration.images", 0, "at least 1 sample to find activation ranges")
    never = [site for site, q in quantizers.items() if q.observer is not None and not q.observer.seen]
    if never:
        reason = "the quantizer has seen no values; use calibration data that reach every operator"
        raise ConfigError("calibration", never[0], reason=reason)
    for quantizer in quantizers.values():
        quantizer.finish()
    for part in parts.values():
        choose_shared_ranges(part)
        set_limits(part)
        align(part)
        set_phase(part, observe=False, quantize=True)


def _check_finite(quantizers: dict[str, FakeQuantize]) -> None:
    observed = {name: q.observer for name, q in quantizers.items() if q.observer is not None}
    ends = (
        torch.stack([torch.stack((o.low, o.high)) for o in observed.values()])
        if observed
        else torch.zeros(1, 2)
    )
    unseen = (ends[:, 0] == torch.inf) & (ends[:, 1] == -torch.inf)
    bad = (~ends.isfinite()).any(dim=1) & ~unseen
    if bad.any():
        name = list(observed)[int(bad.nonzero()[0])]
        reason = "the tensor contains NaN or infinity; check the data and the float model"
        raise ConfigError("calibration", name, reason=reason)
