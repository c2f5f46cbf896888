"""The factors by which `SmoothQuant` divides channels: the channels that can be divided, and the best factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx

from qatkit.algorithms.batches import first_images
from qatkit.algorithms.channel_pairs import input_ranges, magnitudes
from qatkit.algorithms.scalable import (
    ScalableOperator,
    by_channel,
    chosen_sources,
    input_factors,
    multiply,
    weight_quantizer,
)
from qatkit.graph.channels import Reader
from qatkit.graph.nodes import module_of
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import quantizer_of
from qatkit.graph.signature import Example
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize, round_to_format
from qatkit.quant.granularity import along
from qatkit.quant.observers import MSE, HistogramObserver
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.qat_layers import QATOperator

if TYPE_CHECKING:
    from qatkit.algorithms.smooth_quant import SmoothQuant

# Number of images on which strengths are compared.
_JUDGES = 16
# A strength is used only if it makes the error smaller by at least this share.
_BETTER = 0.02
# Channels smaller than this share of the largest one are treated as if they had this size, to limit factors.
_LEAST = 1e-5


def smooth(settings: SmoothQuant, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
    """Divides the channels of the sources: implements `SmoothQuant.__call__`.

    If the strengths are searched, only sources whose readers gain by it are scaled.
    """
    found, skipped = smoothable(graph_module)
    images = list(first_images(graph_module, inputs, settings.images))
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        chosen = _chosen(settings, graph_module, found, images)
        for source, s in chosen.items():
            source.divide(s)
            for reader in source.followed.readers:
                multiply(reader, s)
    return PassResult(graph_module, len(chosen), skipped)


def _chosen(
    settings: SmoothQuant,
    graph_module: fx.GraphModule,
    found: list[ScalableOperator],
    images: list[tuple[Tensor, ...]],
) -> dict[ScalableOperator, Tensor]:
    """Returns the factors of each source that is scaled, [channels], float64."""
    largest = _largest(graph_module, found, images)
    grid = (
        [i / settings.steps for i in range(settings.steps + 1)]
        if settings.strength is None
        else [settings.strength]
    )
    offered = {
        source: [
            torch.ones(len(source.followed.free)),
            *(factors(source, largest[source], a) for a in grid),
        ]
        for source in found
    }
    if settings.strength is not None:
        return {source: tried[1] for source, tried in offered.items()}
    judge = _Judge(graph_module, offered)
    for batch in first_images(graph_module, images, _JUDGES):
        judge.run(*batch)
    return {source: best for source in found if (best := judge.best(source)) is not None}


def factors(source: ScalableOperator, largest: Tensor, strength: float) -> Tensor:
    """Returns the paper's s [channels], float64; 1 for channels that cannot be scaled.

    Args:
        source: the operator whose channels are divided.
        largest: max|X_j|, [channels].
        strength: the paper's α.
    """
    weights = torch.zeros_like(largest)
    for reader in source.followed.readers:
        _largest_of(weights, reader, input_ranges(magnitudes(module_of(reader.node))))
    x, w = (values.clamp(min=max(float(values.max()) * _LEAST, 1e-30)) for values in (largest, weights))
    return torch.where(source.followed.free.to(x.device), x**strength / w ** (1 - strength), 1.0)


def smoothable(graph_module: fx.GraphModule) -> tuple[list[ScalableOperator], list[tuple[str, str]]]:
    """Returns the sources with a reader whose input and weight are quantized, and (site, reason) of unscalable ones."""
    return chosen_sources(graph_module, lambda reader: _fake(reader) is not None, "smoothed")


def _fake(reader: Reader) -> FakeQuantize | None:
    """Returns the quantizer of a reader's input; None if the input or the reader's weight is not quantized."""
    node = quantizer_of(reader.node.args[0])
    if node is None or weight_quantizer(reader.node) is None:
        return None
    return cast(FakeQuantize, module_of(node))


def _largest(
    graph_module: fx.GraphModule, found: list[ScalableOperator], images: list[tuple[Tensor, ...]]
) -> dict[ScalableOperator, Tensor]:
    """Returns max|X_j| [channels], float64, of the readers' inputs, by source."""
    total = {source: torch.zeros(len(source.followed.free), dtype=torch.float64) for source in found}
    readers = _by_node(found)

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            for source, reader in readers[n]:
                x = self.env[cast(fx.Node, n.args[0])].abs().movedim(_axis(reader), 0)
                _largest_of(total[source], reader, x.flatten(1).amax(1))
            return super().run_node(n)

    watch = Watch(graph_module)
    for batch in images:
        watch.run(*batch)
    return total


def _largest_of(total: Tensor, reader: Reader, values: Tensor) -> None:
    """Raises `total`, by channel of the source, to a reader's `values` [input channels] where these are larger."""
    known = reader.channels >= 0
    total.scatter_reduce_(0, reader.channels[known], values.cpu().double()[known], "amax")


def _by_node(found: Iterable[ScalableOperator]) -> dict[fx.Node, list[tuple[ScalableOperator, Reader]]]:
    readers = defaultdict[fx.Node, list[tuple[ScalableOperator, Reader]]](list)
    for source in found:
        for reader in source.followed.readers:
            readers[reader.node].append((source, reader))
    return readers


def _axis(reader: Reader) -> int:
    weight = cast(Tensor, module_of(reader.node).weight)
    return -1 if weight.ndim == 2 else 1 - weight.ndim


class _Judge(fx.Interpreter):
    """An interpreter that runs the float graph and tries every vector of factors at every quantized reader."""

    def __init__(self, graph_module: fx.GraphModule, offered: dict[ScalableOperator, list[Tensor]]) -> None:
        super().__init__(graph_module)
        self.offered = offered
        self.at = _by_node(offered)
        self.errors: dict[ScalableOperator, list[float]] = {
            s: [0.0] * len(tried) for s, tried in offered.items()
        }

    def run_node(self, n: fx.Node) -> Any:
        for source, reader in self.at[n]:
            fake = _fake(reader)
            if fake is not None:
                x = self.env[cast(fx.Node, n.args[0])]
                for i, s in enumerate(self.offered[source]):
                    self.errors[source][i] += output_error(reader, fake, x, s)
        return super().run_node(n)

    def best(self, source: ScalableOperator) -> Tensor | None:
        """Returns the factors with the least error; None if they gain less than `_BETTER`."""
        none, *others = self.errors[source]
        least = min(others)
        return self.offered[source][1 + others.index(least)] if least < none * (1 - _BETTER) else None


def output_error(reader: Reader, fake: FakeQuantize, x: Tensor, s: Tensor) -> float:
    """Returns |r(q(x/s), q(W·s)) - r(x, W)|² / |r(x, W)|² of a reader without its bias.

    Args:
        reader: the reader.
        fake: the quantizer of its input, whose range is not used: one is found for x/s.
        x: its input.
        s: the factors, [channels of the source].
    """
    module = cast(QATOperator, module_of(reader.node))
    quantizer = module.weight_fake_quant
    assert quantizer is not None
    weight, _ = module.effective()
    wanted = module.run(x, weight, None)
    own = by_channel(s, reader.channels).to(x)
    scaled = x / along(own, _axis(reader), x.ndim)
    scaled = _quantized_input(fake, scaled)
    weight = weight * input_factors(module, own)
    if isinstance(quantizer, FormatWeightFakeQuantize):
        weight = quantizer.rounded(weight, quantizer.scale(weight))
    else:
        scale = numerics.weight_scale(weight, quantizer.spec)
        weight = numerics.fake_quantize_weight(weight, scale, quantizer.spec)
    error = module.run(scaled, weight, None) - wanted
    return float(error.square().sum() / wanted.square().sum().clamp(min=1e-30))


def _quantized_input(fake: FakeQuantize, x: Tensor) -> Tensor:
    """Returns `x` quantized with a range that is found for it."""
    if isinstance(fake, FormatFakeQuantize):
        return round_to_format(x, fake.qparams(*torch.aminmax(x))[0], fake.spec)
    return numerics.fake_quantize(x, *_qparams(fake, x), fake.spec)


def _qparams(fake: FakeQuantize, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point for the range of least error if there is a histogram, else for all values of `x`."""
    low, high = torch.aminmax(x)
    if isinstance(fake.observer, HistogramObserver):
        histogram = Histogram().to(x.device)
        histogram.add(x, low, high)
        low, high = (torch.tensor(end) for end in MSE().range_of(histogram, fake.spec))
    return numerics.choose_qparams(low, high, fake.spec)
