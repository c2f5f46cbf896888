"""The remaining quantization for a set of float operators, and the borders at which tensors change their type.

    Conv ─ Q ─ Conv ─ Q ─ Conv ─ Q ─ Linear          int8: one border, at the input
    Conv ─ Q ─ [Conv] ─ Q ─ Conv ─ Q ─ Linear        the second one float: two borders more, its weight is saved,
                                                     and its input and output are quantized as before
    Conv ─ Q ─ [Conv] ─── [Conv] ─ Q ─ Linear        two in a row save the tensor between them as well

Placement determines both for each set by a walk over the graph, without values. The loss of a set is then the
sum of the losses that were estimated for each weight and each tensor (`qatkit.analysis.estimate`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from qatkit.graph.nodes import is_float_tensor, site
from qatkit.graph.placement import Placement, Placer, Point
from qatkit.quant.backends import Backend
from qatkit.records.analysis import ACTIVATION, WEIGHT, SensitivityRow

Floats = frozenset[str]  # sites of the float operators
_NONE: Floats = frozenset()


@dataclass(frozen=True)
class Layout:
    """The quantization for one set of float operators.

    Attributes:
        floats: the Convs and Linears that are float, by request or as a consequence of other float operators.
        int8: the sites of all nodes that compute in 8 bits.
        weights: the sites whose weight is quantized.
        readers: by quantized tensor, the nodes that read its quantized values; other nodes read its float values.
        quantized, dequantized: the numbers of values of the tensors that are quantized or dequantized at a
            border.
        moved: the same for the tensors whose memory layout may also change at a border. Borders of
            elementwise operators that compute in float between two Q/DQ pairs are left out, since these
            accept any layout.
    """

    floats: Floats
    int8: frozenset[str]
    weights: tuple[str, ...]
    readers: Mapping[str, frozenset[str]]
    quantized: tuple[int, ...]
    dequantized: tuple[int, ...]
    moved: tuple[int, ...]


class Layouts:
    """The layouts of one graph for sets of float operators.

    Args:
        graph: the graph after `qatkit.graph.prepare.ready_to_place`, before quantizers are inserted.
        backend: the backend, which has the placement rules.
        forced: the sites that are always float.

    Attributes:
        operators: the sites of the Convs and Linears that can be int8 or float, in graph order.
        sites: the sites of all nodes.
    """

    def __init__(self, graph: fx.Graph, backend: Backend, forced: Collection[str] = ()) -> None:
        self._placer = Placer(graph, backend)
        self._facts = self._placer.facts
        self._by_site = {site(node): node for node in graph.nodes}
        self._forced = frozenset(forced)
        self._known: dict[tuple[Floats, Floats], Layout] = {}
        self.sites = tuple(self._by_site)
        self.operators = tuple(site(node) for node in self.place(_NONE).weighted)

    def __call__(self, floats: Iterable[str], opened: Iterable[str] = ()) -> Layout:
        """Returns the layout for a set of float operators.

        Args:
            floats: the sites of the float operators.
            opened: the sites of operators without an 8-bit kernel (SiLU) that are written as operators with
                one.
        """
        wanted = frozenset(floats), frozenset(opened)
        if wanted not in self._known:
            self._known[wanted] = self._layout(*wanted)
        return self._known[wanted]

    def _layout(self, wanted: Floats, opened: Floats) -> Layout:
        placement = self.place(wanted)
        islands = {node for node in placement.int8 if self._facts[node].island and site(node) not in opened}
        weighted = {site(node) for node in placement.weighted}
        # An elementwise operator works in any memory layout, whether or not its output is quantized.
        whole = self.place(frozenset(one for one in wanted if not self._facts[self._by_site[one]].island))
        without, within = self._borders(placement, islands), self._borders(whole, set())
        return Layout(
            frozenset(self.operators) - weighted,
            frozenset(site(node) for node in placement.int8 - islands) | weighted,
            tuple(site(node) for node in placement.weighted),
            {site(point.node): frozenset(map(site, point.readers)) for point in placement.points},
            *without,
            (*within[0], *within[1]),
        )

    def _borders(
        self, placement: Placement, islands: set[fx.Node]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of tensors that are quantized before int8 operators, and of those dequantized after them.

        Islands count as float operators.
        """
        made = {node for node in placement.int8 - islands if node.op != "placeholder"}
        eight = (placement.int8 - islands) | set(placement.weighted)
        return (
            tuple(_size(point.node) for point in placement.points if point.node not in made),
            tuple(
                _size(point.node)
                for point in placement.points
                if point.node in placement.int8 and self._is_read_as_float(point, eight)
            ),
        )

    def _is_read_as_float(self, point: Point, eight: set[fx.Node]) -> bool:
        """Returns whether a float operator reads an 8-bit tensor, also after operators that move or select values."""
        waiting = list(point.readers)
        while waiting:
            reader = waiting.pop()
            if reader not in eight and reader.op != "output":
                return True
            if self._facts[reader].keeps_range:
                waiting += reader.users
        return False

    def place(self, floats: Floats) -> Placement:
        """Returns the placement for a set of float operators."""
        return self._placer.place({self._by_site[one] for one in self._forced | floats})

    def way_back(self, tensor: str, known: Collection[str]) -> tuple[str, ...]:
        """Returns the tensors on the way from this one back to the nearest known one, which is the last.

        The result is empty if there is no known tensor.
        """
        node, passed = self._by_site[tensor], [tensor]
        while site(node) not in known:
            before = [one for one in node.all_input_nodes if is_float_tensor(one)]
            if not before:
                return ()
            node = before[0]
            passed.append(site(node))
        return tuple(passed)


def _size(node: fx.Node) -> int:
    value = node.meta["value"]
    return value.numel() if isinstance(value, Tensor) else 0


class Losses:
    """The loss of a set: the sum of the estimates for each weight and tensor that stays quantized.

    Args:
        layouts: the layouts of the graph.
        estimated: the estimates for the graph with everything quantized, at the same sites.
    """

    def __init__(self, layouts: Layouts, estimated: Iterable[SensitivityRow]) -> None:
        self._layouts = layouts
        self.by: Mapping[str, dict[str, float]] = {WEIGHT: {}, ACTIVATION: {}}
        for row in estimated:
            self.by[row.kind][row.site] = row.loss

    def __call__(self, layout: Layout) -> float:
        """Returns the loss of a layout, in the unit of the estimates."""
        weights = sum(self.by[WEIGHT].get(one, 0.0) for one in layout.weights)
        return weights + sum(self._of_tensor(one) for one in layout.readers)

    def of_operator(self, operator: str) -> float:
        """Returns the loss of an operator's weight and output, which is the sensitivity of this layer."""
        return self.by[WEIGHT].get(operator, 0.0) + self.by[ACTIVATION].get(operator, 0.0)

    def _of_tensor(self, tensor: str) -> float:
        way = self._layouts.way_back(tensor, self.by[ACTIVATION])
        return self.by[ACTIVATION][way[-1]] if way else 0.0
