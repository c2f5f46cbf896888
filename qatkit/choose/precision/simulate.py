"""Simulates the loss of a set of float operators: the int8 module runs without the quantizers of these operators.

Sums of estimates (`qatkit.choose.precision.layout.Losses`) have errors of a dB or more, mostly if few
operators are quantized. Simulating a set takes one run with a few images, and no capture, export or
calibration. If a tensor is quantized for only some of its readers (a residual stream), the others read it in
float, as in the file of the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qatkit.analysis.outputs import rows_of
from qatkit.analysis.switches import Switch, switches, turn_all
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.choose.precision.layout import Layout, Layouts
from qatkit.graph.nodes import module_of, site
from qatkit.graph.phase import inference, set_phase
from qatkit.progress import Batches, shown
from qatkit.records.analysis import ACTIVATION


def simulated_losses(
    graph_module: fx.GraphModule,
    layouts: Layouts,
    sets: Sequence[Layout],
    batches: Batches,
    *,
    progress: bool = False,
) -> list[float]:
    """Returns, for each set of float operators, the squared error of the first floating-point output against float.

    The error is summed over classes and averaged over rows.

    Args:
        graph_module: the prepared graph with all operators in int8 and its ranges set.
        layouts: the layouts of the graph.
        sets: the sets of float operators.
        batches: batches of (inputs, labels); labels are not used.
        progress: whether a progress bar is shown.
    """
    if not sets:
        return []
    walker = _Mixture(graph_module, layouts)
    found, rows = torch.zeros(len(sets), dtype=torch.float64), 0
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        for inputs, _ in shown(batches, "precision: simulated", progress):
            exact = _rows(walker.of_float(inputs))
            rows += len(exact)
            for number, layout in enumerate(sets):
                found[number] += (_rows(walker.of_set(layout, inputs)) - exact).square().sum().cpu()
    return [float(loss) / max(1, rows) for loss in found]


def _rows(outputs: Sequence[Tensor]) -> Tensor:
    return rows_of(next(one for one in outputs if one.is_floating_point()))


@dataclass(frozen=True)
class _Place:
    """How a node is quantized: the quantizer that provides the range, and the readers that get the float values."""

    switch: Switch
    float_readers: frozenset[fx.Node]


class _Mixture(PreparedInterpreter):
    """Runs an int8 graph as if some operators were float."""

    def __init__(self, graph_module: fx.GraphModule, layouts: Layouts) -> None:
        super().__init__(graph_module)
        self._layouts, self._switches = layouts, switches(graph_module)
        self._tensors = {one.site: one for one in self._switches if one.kind == ACTIVATION}
        self._by_site = {site(node): node for node in graph_module.graph.nodes}
        self._places: dict[fx.Node, _Place] = {}
        self._floats: dict[fx.Node, Any] = {}

    def of_float(self, batch: Any) -> tuple[Tensor, ...]:
        """Returns the outputs without any quantization."""
        turn_all(self._switches, False)
        self._places = {}
        return self.outputs(batch)

    def of_set(self, layout: Layout, batch: Any) -> tuple[Tensor, ...]:
        """Returns the outputs with the quantization of a layout."""
        for one in self._switches:
            one.turn(one.kind != ACTIVATION and one.site in layout.weights)
        self._places = dict(self._placed(layout))
        return self.outputs(batch)

    def _placed(self, layout: Layout) -> Iterator[tuple[fx.Node, _Place]]:
        """Yields each node whose value is quantized, with its `_Place`.

        A tensor that only the mixture quantizes (after a float pool, or a ReLU with other readers) gets the
        range of the tensor before it, since that range includes its values. An absorbed ReLU is not a node of the
        int8 graph, but limits the range of its tensor.
        """
        for tensor, readers in layout.readers.items():
            way = self._layouts.way_back(tensor, self._tensors)
            if not way:
                continue
            switch = self._tensors[way[-1]]
            moved = tensor != way[-1] and tensor in self._by_site
            node = self._by_site[tensor] if moved else switch.node
            yield node, _Place(switch, frozenset(user for user in node.users if site(user) not in readers))

    def run_node(self, n: fx.Node) -> Any:
        exact, place = super().run_node(n), self._places.get(n)
        if place is None:
            return exact
        if place.float_readers:
            self._floats[n] = exact
        place.switch.turn(True)
        found = super().run_node(n) if n is place.switch.node else module_of(place.switch.node)(exact)
        place.switch.turn(False)
        return found

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Maps arguments like the base class; float readers of a quantized tensor get its unquantized values."""

        def value(one: fx.Node) -> Any:
            place = self._places.get(one)
            return self._floats[one] if place is not None and n in place.float_readers else self.env[one]

        return fx.node.map_arg(args, value)

    def _step(self, node: fx.Node) -> Any:
        result = super()._step(node)
        for done in self.user_to_last_uses.get(node, ()):
            self._floats.pop(done, None)
        return result
