"""Measures the effect of quantization on each weight and activation, by itself and accumulated over the graph.

Weights of embeddings and recurrent layers are left out. Let x be a tensor of the float graph, x' the same tensor of the
quantized graph, and q its quantization.

own         compares x with q(x)
simulated   compares x with q(x')
avoidable   10 log10(squared error of q(x) / squared error with the range from the smallest to the largest value of x)
            in dB: the gain from this other range

The energy of rounding noise grows with the square of the step. A scale that is four times too large therefore
has an avoidable error of 12 dB in any tensor. A scale that is four times too small has a much larger one, since values
are clipped. A good range has about 0 dB or less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.analysis.outputs import decibel
from qatkit.analysis.switches import Switch, switches, turn_all
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.graph.nodes import module_of
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example, batch_size, graph_axes, inputs_of
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.records.analysis import ACTIVATION, WEIGHT, Comparison, Difference, Histogram, TensorRow
from qatkit_verify.errors import ConfigError

_BINS = 64
# Avoidable error in dB from which a scale is reported; a percentile that clips on purpose stays below it.
SUSPECT = 7.0
_CAP = 99.0


@dataclass
class PairSums:
    """Sums over all batches for the float values of a tensor (`exact`) and values compared with them (`found`)."""

    count: int = 0
    exact: float = 0.0  # sum of squares
    found: float = 0.0
    product: float = 0.0
    squared: float = 0.0  # sum of squares of the difference
    shift: float = 0.0
    largest: float = 0.0

    def add(self, exact: Tensor, found: Tensor) -> None:
        """Adds one batch of both tensors, which have the same number of values and may have any shapes."""
        x, y = exact.detach().double().reshape(-1), found.detach().double().reshape(-1)
        difference = y - x
        self.count += x.numel()
        self.exact += float(x.square().sum())
        self.found += float(y.square().sum())
        self.product += float((x * y).sum())
        self.squared += float(difference.square().sum())
        self.shift += float(difference.sum())
        self.largest = max(self.largest, float(difference.abs().max()) if x.numel() else 0.0)

    def difference(self) -> Difference:
        """Returns the metrics, computed from the sums."""
        count, size = max(1, self.count), (self.exact * self.found) ** 0.5
        sqnr = decibel(self.exact, self.squared) if self.squared else None
        cosine = min(1.0, self.product / size) if size else float(self.exact == self.found)
        return Difference(self.squared / count, sqnr, cosine, self.largest, self.shift / count)


@dataclass
class _Site:
    """The sums of one tensor."""

    switch: Switch
    low: float = float("inf")
    high: float = float("-inf")
    own: PairSums = field(default_factory=PairSums)
    simulated: PairSums = field(default_factory=PairSums)
    runtime: PairSums = field(default_factory=PairSums)
    best: float = 0.0  # sum of squared errors with the range from the smallest to the largest value
    clipped: int = 0
    seen: Tensor | None = None  # [integers of the type]: whether each occurred
    exact: Tensor | None = None  # histogram [bins]
    found: Tensor | None = None

    @property
    def quantizer(self) -> FakeQuantize:
        return cast(FakeQuantize, module_of(self.switch.node))

    def widen(self, x: Tensor) -> None:
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def add(self, x: Tensor, y: Tensor, clipped: Tensor, integers: Tensor, best: Tensor, levels: int) -> None:
        """Adds one batch.

        Args:
            x: the float values.
            y: the quantized values.
            clipped: a mask of the values that are clipped.
            integers: the quantized integers minus the smallest integer of the type.
            best: the values quantized with the range from the smallest to the largest value.
            levels: the number of integers of the type.
        """
        self.own.add(x, y)
        self.clipped += int(clipped.sum())
        self.best += float((best.double() - x.double()).square().sum())
        seen = torch.bincount(integers.reshape(-1).long().cpu(), minlength=levels) > 0
        self.seen = seen if self.seen is None else self.seen | seen
        parts = [self._histogram(one) for one in (x, y)]
        self.exact = parts[0] if self.exact is None else self.exact + parts[0]
        self.found = parts[1] if self.found is None else self.found + parts[1]

    def _histogram(self, x: Tensor) -> Tensor:
        low, high = self._ends()
        return torch.histc(x.detach().float().clamp(low, high), _BINS, low, high)

    def _ends(self) -> tuple[float, float]:
        return (self.low, self.high) if self.high > self.low else (self.low - 0.5, self.high + 0.5)

    def row(self, ends: tuple[float, float, float]) -> TensorRow:
        assert self.seen is not None and self.exact is not None and self.found is not None
        low, high = self._ends()
        counts = [[int(count) for count in one.tolist()] for one in (self.exact, self.found)]
        return TensorRow(
            self.switch.site,
            self.switch.kind,
            self.own.difference(),
            self.simulated.difference() if self.simulated.count else None,
            self.runtime.difference() if self.runtime.count else None,
            self.clipped / max(1, self.own.count),
            float(self.seen.double().mean()),
            avoidable(self.own.squared, self.best),
            Histogram(low, high, counts[0], counts[1], *ends),
        )


def avoidable(own: float, best: float) -> float:
    """Returns the ratio of two squared errors in dB, from -99 to 99; 0 if they are equal."""
    if own == best:
        return 0.0
    if not best or not own:
        return _CAP if own else -_CAP
    return max(-_CAP, min(_CAP, decibel(own, best)))


class Tensors:
    """Compares a graph's tensors in float with those in the simulation and in ONNX Runtime, batch by batch.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of inputs, kept in memory. They run once at the start to find the range of every tensor.
        at: the sites to compare; all by default.

    Raises:
        ConfigError: there are no images.
    """

    def __init__(
        self, graph_module: fx.GraphModule, batches: Iterable[Example], at: Sequence[Switch] | None = None
    ) -> None:
        self._graph, self._batches = graph_module, list(batches)
        if not self._batches:
            raise ConfigError("analysis.tensors", 0, "at least one sample to compare tensors")
        self._every = switches(graph_module)
        self._walker = _Recorder(graph_module)
        chosen = self._every if at is None else at
        self._sites = {one.key: _Site(one) for one in chosen}
        self._activations = {one.node: one.key for one in chosen if one.kind == ACTIVATION}
        with inference(graph_module):
            for batch in self._batches:
                for key, x in self._run(batch, quantize=False).items():
                    self._sites[key].widen(x)

    def measure(self) -> None:
        """Measures the weights, and all activations in float and in the simulation."""
        with inference(self._graph):
            for one in self._sites.values():
                if one.switch.kind == WEIGHT:
                    _add_weight(one, self._walker)
            for batch in self._batches:
                exact = self._run(batch, quantize=False)
                for key, x in exact.items():
                    _add_activation(self._sites[key], x)
                for key, y in self._run(batch, quantize=True).items():
                    self._sites[key].simulated.add(exact[key], y)

    def beside(self, found: Iterable[dict[str, Tensor]]) -> list[str]:
        """Compares the float values with those that ONNX Runtime computed for the same batches.

        Args:
            found: for each batch, the values by the path of their quantizer.

        Sites without values in `found` are skipped.

        Returns:
            The sites that cannot be compared, since the number of values differs.
        """
        left_out: dict[str, None] = {}
        with inference(self._graph):
            for batch, values in zip(self._batches, found, strict=True):
                for key, x in self._run(batch, quantize=False).items():
                    one = self._sites[key]
                    y = values.get(str(one.switch.node.target))
                    if y is not None and y.ndim == x.ndim == 4:
                        y = y[
                            :, : x.shape[1]
                        ]  # without padded channels of zeros (`qatkit.graph.pad_channels`)
                    if y is not None and y.numel() == x.numel():
                        one.runtime.add(x, y)
                    elif y is not None:
                        left_out[one.switch.site] = None
        return list(left_out)

    def result(self, first: str | None = None, notes: Sequence[str] = ()) -> Comparison:
        """Returns the comparison, with a row for each tensor that was measured, in graph order.

        Args:
            first: a description of the first tensor at which ONNX Runtime deviates from the simulation; None if there
                is none, or if this was not examined.
            notes: notes for the report.
        """
        images = 0
        for batch in self._batches:
            tensors = inputs_of(self._graph, batch)
            images += batch_size(tensors, graph_axes(self._graph, tensors))
        rows = [one.row(_ends_of(one, self._walker)) for one in self._sites.values() if one.own.count]
        worst = max(rows, key=lambda row: row.avoidable, default=None)
        named = worst is not None and worst.avoidable >= SUSPECT
        return Comparison(
            images, rows, f"{worst.kind} {worst.site}" if named and worst else None, first, notes
        )

    def _run(self, batch: Example, *, quantize: bool) -> dict[str, Tensor]:
        """Runs the graph and returns the values of every activation, by the key of its switch."""
        set_phase(self._graph, observe=False, quantize=False)
        turn_all(self._every, quantize)
        self._walker.wanted, self._walker.found = self._activations, {}
        self._walker.outputs(batch)
        return self._walker.found


def tensors(
    graph_module: fx.GraphModule, batches: Iterable[Example], at: Sequence[Switch] | None = None
) -> Comparison:
    """Compares float with the simulation, tensor by tensor, without an exported file.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of inputs. They should be small, since all tensors of a batch are in memory at once.
        at: the sites to compare (`switches`); all by default.

    Raises:
        ConfigError: there are no images.
    """
    found = Tensors(graph_module, batches, at)
    found.measure()
    return found.result()


class _Recorder(PreparedInterpreter):
    """An interpreter that keeps the values of some nodes."""

    wanted: dict[fx.Node, str]
    found: dict[str, Tensor]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted:
            self.found[self.wanted[n]] = result
        return result


def _add_activation(one: _Site, x: Tensor) -> None:
    quantizer, spec = one.quantizer, one.quantizer.spec
    quantizer.enabled = True
    y = quantizer(x)
    quantizer.enabled = False
    scale, zero = quantizer.shipped()
    low, high = spec.type_range
    integers = (torch.round(y / scale) + zero.to(y.dtype)).clamp(low, high) - low
    ends = [(end - float(zero)) * float(scale) for end in (low, high)]
    half = float(scale) / 2
    clipped = (x < ends[0] - half) | (x > ends[1] + half)
    least, most = _seen_range(one)
    wide = numerics.choose_qparams(torch.tensor(least), torch.tensor(most), spec)
    best = numerics.fake_quantize(x, wide[0].to(x.device), wide[1].to(x.device), spec)
    one.add(x, y, clipped, integers, best, high - low + 1)


def _seen_range(one: _Site) -> tuple[float, float]:
    """Returns the smallest and the largest value seen, or a fixed range (0..1 for a sigmoid) if the tensor has one."""
    low, high = one.quantizer.bounds
    if one.quantizer.observer is None and low is not None and high is not None:
        return low, high
    return one.low, one.high


def _add_weight(one: _Site, walker: PreparedInterpreter) -> None:
    operator = one.switch.operator
    if operator is None or operator.weight_fake_quant is None:
        return  # embeddings and recurrent layers, of which only the sensitivity is measured
    quantizer = operator.weight_fake_quant
    (weight, _), (near, _) = walker.weights(operator, False), walker.weights(operator, True)
    spec = quantizer.spec
    scale = spec.granularity.spread(quantizer.scale(weight), weight.shape)
    low, high = ends = quantizer.ends(weight)
    integers = numerics.clamped(torch.round(near / scale), ends) - low
    clipped = (weight < (low - 0.5) * scale) | (weight > (high + 0.5) * scale)
    best = numerics.fake_quantize_weight(weight, numerics.weight_scale(weight, spec), spec)
    one.widen(weight)
    one.add(weight, near, clipped, integers, best, spec.quant_max - spec.quant_min + 1)


def _ends_of(one: _Site, walker: PreparedInterpreter) -> tuple[float, float, float]:
    """Returns the lowest and the highest value that the tensor can have when quantized, and its largest scale."""
    operator = one.switch.operator
    if operator is None:
        record = one.quantizer.range_record()
        return float(record["low"]), float(record["high"]), float(record["scale"])
    assert operator.weight_fake_quant is not None
    quantizer, weight = operator.weight_fake_quant, walker.weights(operator, False)[0]
    scale = quantizer.spec.granularity.spread(quantizer.scale(weight), weight.shape)
    low, high = (end * scale for end in quantizer.ends(weight))
    return float(low.min()), float(high.max()), float(scale.max())


def without_histograms(found: Comparison, kept: Iterable[str]) -> Comparison:
    """Returns a copy in which only the rows with a key ("weight conv1") in `kept` have a histogram."""
    names = set(kept)
    rows = [r if f"{r.kind} {r.site}" in names else replace(r, histogram=None) for r in found.rows]
    return replace(found, rows=rows)
