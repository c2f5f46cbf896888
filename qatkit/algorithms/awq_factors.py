"""The factors by which `AWQ` divides channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx

from qatkit.algorithms.batches import first_images
from qatkit.algorithms.input_moments import Moments, input_moments
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
from qatkit.graph.signature import Example
from qatkit.quant import numerics
from qatkit.quant.qat_layers import QATOperator

if TYPE_CHECKING:
    from qatkit.algorithms.awq import AWQ

# A strength is used only if it makes the error smaller by at least this share.
_BETTER = 0.02
# Channels smaller than this share of the largest one are treated as if they had this size.
_LEAST = 1e-4


def scale(settings: AWQ, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
    """Scales the channels of every source whose readers gain by it: implements `AWQ.__call__`."""
    found, skipped = scalable(graph_module)
    images = list(first_images(graph_module, inputs, settings.images))
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        search = _Search(settings.steps, found)
        search.run(graph_module, images)
        changed = 0
        for source in found:
            s = search.best(source)
            if s is not None:
                changed += 1
                source.divide(s)
                for reader in source.followed.readers:
                    multiply(reader, s)
    return PassResult(graph_module, changed, skipped)


def scalable(graph_module: fx.GraphModule) -> tuple[list[ScalableOperator], list[tuple[str, str]]]:
    """Returns the sources that quantized operators read, and (site, reason) of the sources that cannot be scaled."""
    return chosen_sources(graph_module, lambda reader: weight_quantizer(reader.node) is not None, "scaled")


class _Search:
    """A search for the strength of each source, by the errors of its readers; the first candidate is no scaling."""

    def __init__(self, steps: int, found: list[ScalableOperator]) -> None:
        self.strengths = [0.0, *((i + 1) / steps for i in range(steps))]
        self.readers = dict[QATOperator, list[tuple[ScalableOperator, Reader]]]()
        for source in found:
            for reader in source.followed.readers:
                if weight_quantizer(reader.node) is not None:
                    operator = cast(QATOperator, module_of(reader.node))
                    self.readers.setdefault(operator, []).append((source, reader))
        self.errors = {source: [0.0] * len(self.strengths) for source in found}
        self.sizes = {source: torch.zeros(len(source.followed.free), dtype=torch.float64) for source in found}

    def run(self, graph_module: fx.GraphModule, images: list[tuple[Tensor, ...]]) -> None:
        """Adds the errors of all readers; moments are computed in rounds, each with one pass over the images."""
        for operator, moments in input_moments(graph_module, self.readers, images):
            for source, reader in self.readers[operator]:
                sizes = self._sizes(operator, reader, moments, source)
                self.sizes[source] = torch.maximum(self.sizes[source], sizes)
                for i, strength in enumerate(self.strengths):
                    own = by_channel(_factors(sizes, source, strength), reader.channels)
                    self.errors[source][i] += _error(operator, moments, own)

    def best(self, source: ScalableOperator) -> Tensor | None:
        """Returns the factors [channels], float64, with the least error; None if they gain less than `_BETTER`."""
        none, *others = self.errors[source]
        least = min(others)
        if not least < none * (1 - _BETTER):
            return None
        return _factors(self.sizes[source], source, self.strengths[1 + others.index(least)])

    def _sizes(
        self, operator: QATOperator, reader: Reader, moments: list[Moments], source: ScalableOperator
    ) -> Tensor:
        """Returns the root mean square of the inputs for each channel of the source, [channels], float64."""
        squares = torch.cat([one.second.diagonal(dim1=1, dim2=2) / one.count for one in moments], 1)
        kernel = operator.weight[0, 0].numel()
        channels = squares.reshape(len(squares), -1, kernel).mean(2).flatten().cpu().double().sqrt()
        total = torch.zeros(len(source.followed.free), dtype=torch.float64)
        known = reader.channels >= 0
        return total.scatter_reduce_(0, reader.channels[known], channels[known], "amax")


def _factors(sizes: Tensor, source: ScalableOperator, strength: float) -> Tensor:
    """Returns the factors [channels], float64, 1 for channels that cannot be scaled.

    Over the other channels, largest · smallest = 1.
    """
    x = sizes.clamp(min=max(float(sizes.max()) * _LEAST, 1e-30))
    s = x**strength
    free = source.followed.free.to(s.device)
    s = s / (s[free].max() * s[free].min()).sqrt()
    return torch.where(free, s, 1.0)


def _error(operator: QATOperator, moments: list[Moments], own: Tensor) -> float:
    """Returns the squared error of an operator's outputs, as a share of their squares.

    Args:
        operator: the operator.
        moments: moments of its inputs.
        own: the factors of its inputs, [input channels], float64.
    """
    quantizer = operator.weight_fake_quant
    assert quantizer is not None
    weight = operator.effective()[0].detach().float()
    factors = input_factors(operator, own.to(weight.device)).float()
    scaled = weight * factors
    rounded = numerics.fake_quantize_weight(
        scaled, numerics.weight_scale(scaled, quantizer.spec), quantizer.spec
    )
    groups = len(moments[0].second)
    error = ((rounded / factors) - weight).reshape(groups, len(weight) // groups, -1)
    whole = weight.reshape(error.shape)
    lost = wanted = 0.0
    start = 0
    for one in moments:
        part = slice(start, start + one.second.shape[1])
        start = part.stop
        for rows in range(groups):
            h = one.second[rows] / one.count
            lost += float(((error[rows, :, part] @ h) * error[rows, :, part]).sum())
            wanted += float(((whole[rows, :, part] @ h) * whole[rows, :, part]).sum())
    return lost / max(wanted, 1e-30)
