"""Finds tensors of mixed scale: with one scale for all their values, some values are lost.

    boxes  0..640 ─┐
                   Concat ─ [steps of 2.5] ─ output         every score becomes 0
    scores 0..1   ─┘

Each quantizer is inserted into the float graph by itself, and its error is measured where the values are used:

    at an output          The error is measured for each channel, relative to the channel's variation, since each
                          channel has its own meaning.
    at the next operator  The error is measured over all values if the operator has a weight or a quantizer follows. A
                          weight selects from its inputs, and channels with little information are common inside a
                          network.
    before an ordering    TopK, Sort and non-maximum suppression are measured over all values of their input. Their
                          outputs are not followed, since an error may change the order; operators that select
                          values by their indices use the exact order.
    before a logarithm    Small values count as much as large ones after a logarithm. If an operator with a weight
                          leads to a logarithm, the nodes after the operator are measured as well.

If too much is lost, the operator that computes the tensor is left float, and so are the operators with a weight that
read the tensor and lose too much. Only tensors in 8-bit integers are examined.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.calibration.losses import Loss, MixedScale
from qatkit.calibration.reach import orders, reaching_logarithms, reaching_outputs, weighted
from qatkit.graph.nodes import facts, module_of, op_class, site
from qatkit.graph.overrides import OVERRIDDEN
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import QUANTIZES, is_quantizer
from qatkit.graph.signature import Example, batch_multiple, batch_size, graph_axes, inputs_of, on
from qatkit.progress import shown
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.spec import WHOLE

# The lowest accepted signal-to-error ratio in dB: of a channel of an output, and of all values at the next operator
# (decision 46).
CHANNEL, TOTAL = 10.0, 18.0
# The smallest number of values per channel that is enough to estimate the channel's variation.
_LEAST = 16
_WIDEST = 65536  # largest number of channels along an axis
SAMPLE, AT_ONCE = 16, 8  # number of images in a sample, and how many of them are run together
_KEPT = 2**24  # largest number of input values in a sample; the first image is always kept
_VALUES = 2**20  # approximate number of input values that go through the graph together


class Sample:
    """Keeps the first images of a pass; iteration yields them in small batches.

    Args:
        graph_module: the graph that reads the images.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._graph = graph_module
        self._kept: list[tuple[Tensor, ...]] = []

    def of(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yields `batches` unchanged and keeps the first images; a batch has the tensors in the graph's order."""
        left, room = SAMPLE, _KEPT
        for batch in batches:
            axes = graph_axes(self._graph, batch)
            count = batch_size(batch, axes)
            values = max(1, sum(one.numel() for one in batch) // count)
            fitting = room // values if self._kept else max(1, room // values)
            wanted, at_once = max(0, min(left, count, fitting)), max(1, min(AT_ONCE, _VALUES // values))
            multiple = batch_multiple(self._graph)
            wanted, at_once = wanted // multiple * multiple, max(1, at_once // multiple) * multiple
            if all(axis is None for axis in axes):
                wanted, at_once = (count, count) if left > 0 else (0, 1)
            for start in range(0, wanted, at_once):
                rows = min(at_once, wanted - start)
                self._kept.append(
                    tuple(_rows(one, axis, start, rows) for one, axis in zip(batch, axes, strict=True))
                )
            left, room = left - count, room - wanted * values
            yield batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self._kept)


def _rows(tensor: Tensor, axis: int | None, start: int, count: int) -> Tensor:
    return tensor if axis is None else tensor.narrow(axis, start, count).clone()


def mixed_scales(
    graph_module: fx.GraphModule, batches: Iterable[Example], progress: bool = False
) -> list[MixedScale]:
    """Returns the tensors that lose too much, in graph order, with the operators that should be left float.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of inputs as for `calibrate`; a few images are enough.
        progress: whether to show a progress bar.
    """
    measured = _Measured(graph_module)
    pairs = [(batch, inputs_of(graph_module, batch)[0]) for batch in batches]
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        for batch, _ in shown(pairs, "mixed scales", progress):
            measured.add(batch)
    return [found for at in measured.points if (found := _judged(at)) is not None]


@dataclass
class Sums:
    """Sums over all values of each channel."""

    count: int = 0
    exact: Tensor | None = None  # [channels]: sum of the values
    squared: Tensor | None = None  # [channels]: sum of their squares
    error: Tensor | None = None  # [channels]: sum of their squared errors

    def add(self, exact: Tensor, found: Tensor, axis: int) -> bool:
        """Adds one batch.

        Returns:
            False if the number of channels differs from earlier batches, or if the two shapes differ.
        """
        if exact.shape != found.shape:
            return False
        others = [one for one in range(exact.ndim) if one != axis]
        parts = tuple(
            one.sum(others, dtype=torch.float64) if others else one.double()
            for one in (exact, exact.square(), (found - exact).square())
        )
        if self.exact is None or self.squared is None or self.error is None:
            self.exact, self.squared, self.error = parts
        elif len(self.exact) != len(parts[0]):
            return False
        else:
            self.exact, self.squared = self.exact + parts[0], self.squared + parts[1]
            self.error = self.error + parts[2]
        self.count += exact.numel() // max(1, len(parts[0]))
        return True

    @property
    def signal(self) -> Tensor:
        """The sum of squared deviations from the mean, for each channel [channels]."""
        assert self.exact is not None and self.squared is not None
        around = self.squared - self.exact.square() / max(1, self.count)
        return around.where(around > 1e-12 * self.squared, 0.0)  # anything smaller is rounding of a constant


@dataclass
class _Sink:
    """An operator or output at which the error of a quantizer is measured.

    Attributes:
        where: the site of the operator, or "output NAME".
        output: whether it is an output.
        by_axis: the sums over the channels, by channel axis.
        closed: the axes that do not count, because their sizes differ between batches, or the shapes of the
            exact and the quantized tensor differ.
    """

    where: str
    output: bool
    by_axis: dict[int, Sums] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def add(self, exact: Tensor, found: Tensor, axes: Collection[int]) -> None:
        for axis in axes:
            if axis not in self.closed and not self.by_axis.setdefault(axis, Sums()).add(exact, found, axis):
                self.closed.add(axis)

    def loss(self) -> Loss | None:
        """Returns the loss along the channel axis with the largest share of lost channels; None if all are small."""
        known = {axis: sums for axis, sums in self.by_axis.items() if axis not in self.closed}
        found = [
            self._by_channel(axis, sums) if self.output else self._total(sums) for axis, sums in known.items()
        ]
        lost = [one for one in found if one is not None]
        return max(lost, key=lambda one: one.lost / one.channels, default=None)

    def _by_channel(self, axis: int, sums: Sums) -> Loss | None:
        assert sums.error is not None
        left = _decibel(sums.signal, sums.error)
        lost = left < CHANNEL
        if sums.count < _LEAST or not bool(lost.any()):
            return None
        return Loss(self.where, axis, len(left), int(lost.sum()), float(left.min()))

    def _total(self, sums: Sums) -> Loss | None:
        assert sums.error is not None and sums.squared is not None
        signal = sums.signal if sums.count >= _LEAST else sums.squared
        left = float(_decibel(signal.sum(), sums.error.sum()))
        return Loss(self.where, None, 1, 1, left) if left < TOTAL else None


def _decibel(signal: Tensor, error: Tensor) -> Tensor:
    """Returns the signal-to-error ratio in dB; infinite if there is no signal that could be lost."""
    ratio = 10 * torch.log10(signal / error.clamp(min=1e-300))
    return ratio.where(signal > 0, math.inf)


@dataclass
class _At:
    """A quantizer, and the operators and outputs at which its error is measured.

    Attributes:
        node: the quantizer.
        behind: the nodes that its values reach, in graph order.
        through: the nodes among them that have a weight and lead to a logarithm.
        sinks: the measurements, by the name of the operator or output.
    """

    node: fx.Node
    behind: list[fx.Node]
    through: frozenset[fx.Node]
    sinks: dict[str, _Sink] = field(default_factory=dict)


class _Measured(fx.Interpreter):
    """An interpreter that runs the float graph, and computes its values again with the error of each quantizer.

    Values are freed after their last reader.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self._graph = graph_module
        self._tail = reaching_outputs(graph_module.graph)
        self._logged = reaching_logarithms(graph_module.graph)
        self.points = [
            _At(node, behind := self._behind(node), frozenset(filter(self._passed, behind)))
            for node in graph_module.graph.nodes
            if is_quantizer(node) and cast(FakeQuantize, module_of(node)).spec.dtype in WHOLE
        ]
        self._by_node = {at.node: at for at in self.points}
        self._following: dict[fx.Node, list[_At]] = {}
        for at in self.points:
            for node in at.behind:
                self._following.setdefault(node, []).append(at)
        self._with_error: dict[
            fx.Node, dict[fx.Node, Any]
        ] = {}  # values with the error of one quantizer, by this quantizer
        self._names = graph_module.meta.get("outputs", ("output",))

    def add(self, batch: Example) -> None:
        """Measures one batch."""
        first = next(self._graph.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self._with_error = {}
        self.run(*on(device, inputs_of(self._graph, batch)))
        self._with_error = {}

    def run_node(self, n: fx.Node) -> Any:
        exact = self.env
        result = super().run_node(n)
        for at in self._following.get(n, ()):
            values = self._with_error.get(at.node)
            if values is not None:
                self.env = cast("dict[fx.Node, Any]", ChainMap(values, exact))
                self._follow(at, n, exact, result)
        self.env = exact
        if n in self._by_node and result.numel():
            quantizer = cast(FakeQuantize, module_of(n))
            found = numerics.fake_quantize(result, quantizer.scale, quantizer.zero_point, quantizer.spec)
            self._with_error[n] = {n: found}
        for values in self._with_error.values():
            for gone in self.user_to_last_uses.get(n, ()):
                values.pop(gone, None)
        return result

    def _follow(self, at: _At, node: fx.Node, exact: dict[fx.Node, Any], result: Any) -> None:
        values = self._with_error[at.node]
        if node.op == "output":
            for place, value in enumerate(node.all_input_nodes):
                if value in values and isinstance(exact[value], Tensor) and exact[value].is_floating_point():
                    name = self._names[place] if len(self._names) == len(node.all_input_nodes) else value.name
                    self._sink(at, f"output {name}", True).add(
                        exact[value], values[value], _axes(exact[value])
                    )
            return
        if is_quantizer(node) and node not in self._tail:
            before = node.all_input_nodes[0]
            self._sink(at, str(node.meta[QUANTIZES]), False).add(
                exact[before], values[before], [_channels(before, exact[before])]
            )
            return
        if orders(node):
            for before in node.all_input_nodes:
                if before in values and values[before].is_floating_point():
                    axis = min(1, values[before].ndim - 1)
                    self._sink(at, site(node), False).add(exact[before], values[before], [axis])
            return
        found = super().run_node(node)
        if not weighted(node) or self._passed(node):
            values[node] = found
        if not weighted(node):
            return
        before, after = (result, found) if isinstance(found, Tensor) else (result[0], found[0])
        self._sink(at, site(node), False).add(before, after, [_channels(node, before)])

    def _sink(self, at: _At, where: str, output: bool) -> _Sink:
        return at.sinks.setdefault(where, _Sink(where, output))

    def _behind(self, quantizer: fx.Node) -> list[fx.Node]:
        """Returns the nodes that a quantizer's values reach, in graph order.

        A path ends at the next quantizer, operator with a weight, or operator that orders values. It continues after
        quantizers before an output, and after operators with a weight that lead to a logarithm.
        """
        found: set[fx.Node] = set()
        left = [quantizer]
        while left:
            node = left.pop()
            for user in node.users:
                if user in found:
                    continue
                found.add(user)
                ends = orders(user) or (weighted(user) and not self._passed(user))
                if not ends and not (is_quantizer(user) and user not in self._tail):
                    left.append(user)
        return [node for node in quantizer.graph.nodes if node in found]

    def _passed(self, node: fx.Node) -> bool:
        return weighted(node) and node in self._logged


def _axes(value: Tensor) -> Sequence[int]:
    """Returns the axes along which an output may have channels: the one after the batch, and the last."""
    return [
        axis for axis in sorted({1, value.ndim - 1}) if 0 < axis < value.ndim and value.shape[axis] <= _WIDEST
    ]


def _channels(node: fx.Node, value: Tensor) -> int:
    """Returns the channel axis of a node's output."""
    return value.ndim - 1 if op_class(node) in ("linear", "lstm", "gru", "rnn") else min(1, value.ndim - 1)


def _judged(at: _At) -> MixedScale | None:
    """Returns the losses of a tensor and the operators to leave float; None if all losses are small enough."""
    losses = tuple(loss for sink in at.sinks.values() if (loss := sink.loss()) is not None)
    if not losses:
        return None
    lost = {one.where for one in losses}
    readers = [node for node in _direct(at.node) if site(node) in lost or node in at.through]
    source = _source(at.node)
    chosen = readers if source.op == "placeholder" else [source, *readers]
    overridden = cast(fx.GraphModule, at.node.graph.owning_module).meta.get(OVERRIDDEN, ())
    floats = tuple(name for node in chosen if (name := site(node)) not in overridden)
    return MixedScale(str(at.node.meta[QUANTIZES]), losses, floats)


def _source(quantizer: fx.Node) -> fx.Node:
    """Returns the node that computes a quantizer's values; operators that only move or select values are skipped."""
    source = quantizer.all_input_nodes[0]
    while facts(source).keeps_range:
        source = source.all_input_nodes[0]
    return source


def _direct(quantizer: fx.Node) -> list[fx.Node]:
    """Returns the operators with a weight that read a quantizer, also after operators that move or select values."""
    found, left = [], list(quantizer.users)
    while left:
        node = left.pop(0)
        if weighted(node):
            found.append(node)
        elif facts(node).keeps_range:
            left += node.users
    return found
