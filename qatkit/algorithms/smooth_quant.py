"""SmoothQuant: activations with a few large channels become easy to quantize, the weights behind take the factors.

    reader(x)  =  reader·diag(s) (x / s)        s_j = max|X_j|^α / max|W_j|^(1 - α)

The division costs nothing where x comes from an operator whose output channels have parameters of their own: a
LayerNorm, GroupNorm, RMSNorm or BatchNorm, a Conv or Linear, a product with a parameter. Pairs are found by following
the channels through the graph (`qatkit.graph.channels`): attention's values through their heads, a ReLU, poolings,
views; all readers are scaled alike. Channels whose readers don't commute with a factor keep theirs.

The strength α is searched for each source: "none" and a grid, by the error of the readers' outputs with the input
quantized per tensor and the weights as the backend does, |r(q(x/s), q(W·s)) - r(x, W)|² / |r(x, W)|². Ranges are
found as the observer finds them: least squares where it keeps a histogram, else the extremes.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2023,
section 4, equation 4 (figures: docs/design.md, D19).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx

from qatkit import numerics
from qatkit.algorithms.base import OBSERVED, Algorithm
from qatkit.algorithms.batches import first_images
from qatkit.algorithms.equalize import input_ranges, magnitudes
from qatkit.algorithms.scalable import Source, by_channel, input_factors, multiply, sources
from qatkit.config.fields import COUNT, Range, setting
from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.channels import Reader
from qatkit.graph.nodes import module_of, site
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import quantizer_of
from qatkit.graph.signature import Example
from qatkit.observers import MSE, HistogramObserver
from qatkit.observers.histogram import Histogram
from qatkit.qat_layers import QATOperator
from qatkit.weight_fake_quantize import WeightFakeQuantize

# Images that judge the strengths.
_JUDGES = 16
# A strength has to leave this share less error than none at all.
_BETTER = 0.02
# A channel below this share of the largest is taken for as large: a factor without an end helps nobody.
_LEAST = 1e-5


@dataclass(frozen=True)
class SmoothQuant(Algorithm):
    """Moves the differences between an activation's channels into the weights that read it; the function stays."""

    stage: ClassVar[str] = OBSERVED
    strength: float | None = setting(
        None, "how much of the differences moves, 0 to 1; null: searched for each tensor", Range(0, 1)
    )
    steps: int = setting(10, "of the search: strengths 0, 1/steps, ... 1 and none at all", COUNT)
    images: int = setting(128, "of the calibration images, for each channel's largest value", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """`changed` counts the sources that were scaled.

        Args:
            graph_module: prepared; its ranges are found afterwards.
            inputs: batches, as `calibrate` takes them, read no further than needed.
        """
        found, skipped = _pairs(graph_module)
        images = list(first_images(graph_module, inputs, self.images))
        with inference(graph_module):
            set_phase(graph_module, observe=False, quantize=False)
            chosen = self._factors(graph_module, found, images)
            for source, s in chosen.items():
                source.divide(s)
                for reader in source.followed.readers:
                    multiply(reader, s)
        return PassResult(graph_module, len(chosen), skipped)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """The operators whose outputs cannot be scaled."""
        return _pairs(graph_module)[1]

    def _factors(
        self, graph_module: fx.GraphModule, found: list[Source], images: list[tuple[Tensor, ...]]
    ) -> dict[Source, Tensor]:
        largest = _largest(graph_module, found, images)
        grid = [i / self.steps for i in range(self.steps + 1)] if self.strength is None else [self.strength]
        offered = {
            source: [
                torch.ones(len(source.followed.free)),
                *(factors(source, largest[source], a) for a in grid),
            ]
            for source in found
        }
        if self.strength is not None:
            return {source: tried[1] for source, tried in offered.items()}
        judge = _Judge(graph_module, offered)
        for batch in first_images(graph_module, images, _JUDGES):
            judge.run(*batch)
        return {source: best for source in found if (best := judge.best(source)) is not None}


def factors(source: Source, largest: Tensor, strength: float) -> Tensor:
    """The paper's s [channels], float64; 1 for channels that are not free.

    Args:
        largest: [channels], max|X_j|.
    """
    weights = torch.zeros_like(largest)
    for reader in source.followed.readers:
        _largest_of(weights, reader, input_ranges(magnitudes(module_of(reader.node))))
    x, w = (values.clamp(min=max(float(values.max()) * _LEAST, 1e-30)) for values in (largest, weights))
    return torch.where(source.followed.free.to(x.device), x**strength / w ** (1 - strength), 1.0)


def _pairs(graph_module: fx.GraphModule) -> tuple[list[Source], list[tuple[str, str]]]:
    """Sources with a reader whose input is quantized; of the others, why they stay."""
    found, skipped = sources(graph_module)
    chosen = list[Source]()
    for source in _nearest(found):
        own = _weight_quantizer(source.node)
        if own is not None and not own.spec.per_channel:
            skipped.append((site(source.node), "one scale serves its weight, which factors would spread"))
        elif any(_fake(reader) is not None for reader in source.followed.readers):
            chosen.append(source)
    return chosen, [(where, f"not smoothed: {reason}") for where, reason in skipped]


def _nearest(found: list[Source]) -> list[Source]:
    """Without those behind which another one scales the same channels: a Linear, then a product with a parameter."""
    taken: dict[fx.Node, Tensor] = {}
    kept = list[Source]()
    for source in reversed(found):
        read = {r.node: by_channel(source.followed.free, r.channels, 0) for r in source.followed.readers}
        read = {node: inputs for node, inputs in read.items() if inputs.any()}
        if not any((taken[node] & inputs).any() for node, inputs in read.items() if node in taken):
            kept.append(source)
            for node, inputs in read.items():
                taken[node] = taken.get(node, torch.zeros_like(inputs)) | inputs
    return kept[::-1]


def _weight_quantizer(node: fx.Node) -> WeightFakeQuantize | None:
    module = module_of(node) if node.op == "call_module" else None
    return module.weight_fake_quant if isinstance(module, QATOperator) else None


def _fake(reader: Reader) -> FakeQuantize | None:
    """What quantizes the input of a reader that is quantized itself."""
    node = quantizer_of(reader.node.args[0])
    if node is None or _weight_quantizer(reader.node) is None:
        return None
    return cast(FakeQuantize, module_of(node))


def _largest(
    graph_module: fx.GraphModule, found: list[Source], images: list[tuple[Tensor, ...]]
) -> dict[Source, Tensor]:
    """max|X_j| [channels], float64, of what the readers read."""
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
    """Takes [input channels] of a reader into the largest by channel of the source."""
    known = reader.channels >= 0
    total.scatter_reduce_(0, reader.channels[known], values.cpu().double()[known], "amax")


def _by_node(found: Iterable[Source]) -> dict[fx.Node, list[tuple[Source, Reader]]]:
    readers = defaultdict[fx.Node, list[tuple[Source, Reader]]](list)
    for source in found:
        for reader in source.followed.readers:
            readers[reader.node].append((source, reader))
    return readers


def _axis(reader: Reader) -> int:
    weight = cast(Tensor, module_of(reader.node).weight)
    return -1 if weight.ndim == 2 else 1 - weight.ndim


class _Judge(fx.Interpreter):
    """Runs the float graph and tries every vector of factors at every reader on the way."""

    def __init__(self, graph_module: fx.GraphModule, offered: dict[Source, list[Tensor]]) -> None:
        super().__init__(graph_module)
        self.offered = offered
        self.at = _by_node(offered)
        self.errors: dict[Source, list[float]] = {s: [0.0] * len(tried) for s, tried in offered.items()}

    def run_node(self, n: fx.Node) -> Any:
        for source, reader in self.at[n]:
            fake = _fake(reader)
            if fake is not None:
                x = self.env[cast(fx.Node, n.args[0])]
                for i, s in enumerate(self.offered[source]):
                    self.errors[source][i] += output_error(reader, fake, x, s)
        return super().run_node(n)

    def best(self, source: Source) -> Tensor | None:
        """The factors with the least error; None where they gain nothing."""
        none, *others = self.errors[source]
        least = min(others)
        return self.offered[source][1 + others.index(least)] if least < none * (1 - _BETTER) else None


def output_error(reader: Reader, fake: FakeQuantize, x: Tensor, s: Tensor) -> float:
    """|r(q(x/s), q(W·s)) - r(x, W)|² / |r(x, W)|² of a reader without its bias.

    Args:
        fake: quantizes the input, by a range that is found here.
        x: the input.
        s: [channels of the source].
    """
    module = cast(QATOperator, module_of(reader.node))
    quantizer = module.weight_fake_quant
    assert quantizer is not None
    weight, _ = module.effective()
    wanted = module.run(x, weight, None)
    own = by_channel(s, reader.channels).to(x)
    scaled = x / numerics.along(own, _axis(reader), x.ndim)
    scaled = numerics.fake_quantize(scaled, *_qparams(fake, scaled), fake.spec)
    weight = weight * input_factors(module, own)
    scale = numerics.weight_scale(weight, quantizer.spec, quantizer.axis)
    weight = numerics.fake_quantize_weight(weight, scale, quantizer.spec, quantizer.axis)
    error = module.run(scaled, weight, None) - wanted
    return float(error.square().sum() / wanted.square().sum().clamp(min=1e-30))


def _qparams(fake: FakeQuantize, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the range of `x`, of the kind that calibration will find."""
    low, high = torch.aminmax(x)
    if isinstance(fake.observer, HistogramObserver):
        histogram = Histogram().to(x.device)
        histogram.add(x, low, high)
        low, high = (torch.tensor(end) for end in MSE().range_of(histogram, fake.spec))
    return numerics.choose_qparams(low, high, fake.spec)
