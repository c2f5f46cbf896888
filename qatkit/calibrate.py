"""Calibration: the ranges of all activations from real images, before any fine-tuning.

One pass in inference mode with every FakeQuantize observing and none quantizing. Memory does not grow with
the number of images: an observer keeps a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from qatkit.errors import ConfigError
from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.align import align
from qatkit.graph.prepare import fake_quantizers, set_phase


def calibrate(graph_module: fx.GraphModule, batches: Iterable[Tensor]) -> int:
    """Observes `batches` of [N, C, H, W] and turns fake quantization on; returns the number of images.

    Raises:
        ConfigError: no image at all, or a NaN or infinite activation (names the first site in graph order).
    """
    quantizers = fake_quantizers(graph_module)
    device = next((p.device for p in graph_module.parameters()), torch.device("cpu"))
    training, images = graph_module.training, 0
    graph_module.eval()
    set_phase(graph_module, observe=True, quantize=False)
    with torch.no_grad():
        for batch in batches:
            graph_module(batch.to(device))
            images += len(batch)
            _check_finite(quantizers)
    if images == 0:
        raise ConfigError("calibration.images", 0, "at least 1 image is needed to find activation ranges")
    for quantizer in quantizers.values():
        if quantizer.observer is not None:
            quantizer.observer.all_reduce()
    align(graph_module)
    set_phase(graph_module, observe=False, quantize=True)
    graph_module.train(training)
    return images


def _check_finite(quantizers: dict[str, FakeQuantize]) -> None:
    observed = {name: q.observer for name, q in quantizers.items() if q.observer is not None}
    ends = (
        torch.stack([torch.stack((o.low, o.high)) for o in observed.values()])
        if observed
        else torch.zeros(1, 2)
    )
    bad = (~ends.isfinite()).any(dim=1)
    if bad.any():
        name = list(observed)[int(bad.nonzero()[0])].removesuffix("_quant")
        raise ConfigError(
            "calibration",
            f"NaN or infinity in the output of '{name}'",
            "all activations must be finite numbers",
        )
