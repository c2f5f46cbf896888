"""The operators of a graph that can be int8 or float, the tensors between them, and the placement given by a cut.

The rules are those of placement (`qatkit.graph.placement`). The input of a Conv or Linear may be quantized
for this operator only. A sum, a pool or a gate is int8 if all of its inputs are. An operator without an 8-bit
kernel (SiLU) computes in float between two Q/DQ pairs, or is written as operators that have one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import Tensor, fx

from qatkit.choose.placement.cut import Edge, Times, cheapest
from qatkit.choose.precision.costs import Costs
from qatkit.choose.precision.layout import Layouts
from qatkit.graph.nodes import carries_float, facts, is_float_tensor, site
from qatkit.graph.operators import Operator
from qatkit.graph.placement import Placer
from qatkit.quant.backends import Backend
from qatkit.verify.site_kernels import DEQUANTIZE, LAYOUT, QUANTIZE
from qatkit_verify.placement.sites import Sites

_CLEARLY = 1e-3
_ROUNDS = 4  # rounds over all operators: the first few find nearly all gains


class Choices:
    """The operators of one graph that can be int8 or float; finds the cheapest placement.

    Args:
        graph: the graph after `qatkit.graph.prepare.ready_to_place`, without quantizers; a SiLU is one operator.
        backend: the backend, which has the placement rules.
        layouts: the layouts of the same graph.
        forced: the sites that are always float.

    Attributes:
        computing: the sites of the operators that can be int8 or float, in graph order.
        islands: the sites of the operators without an 8-bit kernel that the backend's table puts between two
            Q/DQ pairs.
    """

    def __init__(self, graph: fx.Graph, backend: Backend, layouts: Layouts, forced: Collection[str]) -> None:
        self._layouts = layouts
        self.backend, placer = backend, Placer(graph, backend)
        floats = {node for node in graph.nodes if site(node) in forced}
        int8 = placer.place(floats).int8
        self._chosen: dict[fx.Node, Operator] = {}
        self._gives_float: set[fx.Node] = set()
        for node in graph.nodes:
            rule = placer.rule(node)
            if rule.when in ("always", "inputs") and carries_float(node) and node.op != "placeholder":
                self._chosen[node] = facts(node)
                if rule.when == "always" and not rule.output:
                    self._gives_float.add(node)
        self.computing = tuple(site(node) for node in self._chosen if self._computes(node))
        self.islands = frozenset(site(node) for node in self._chosen if facts(node).island and node in int8)

    def __call__(self, costs: Costs, *, borders: float = 1.0) -> Sites:
        """Returns the cheapest placement by the times of operators and of borders (type conversions).

        Args:
            costs: the costs for this graph.
            borders: the factor by which the time of borders is multiplied.
        """
        times = {
            site(node): Times(costs.of_site(site(node), eight=True), costs.of_site(site(node), eight=False))
            for node in self._chosen
        }
        edges = [self._edge(node, costs, borders) for node in self._sources()]
        return self._sites(cheapest(times, [edge for edge in edges if edge.readers]))

    def _sources(self) -> list[fx.Node]:
        graph = next(iter(self._chosen)).graph
        return [node for node in graph.nodes if carries_float(node) and node.op != "get_attr"]

    def _edge(self, node: fx.Node, costs: Costs, borders: float) -> Edge:
        made = node in self._chosen and node not in self._gives_float
        readers = {site(user): self._may(user, node) for user in node.users if user in self._chosen}
        values = _size(node)
        moves = site(node) not in self.islands and any(user not in self.islands for user in readers)
        moved = costs.of_border(LAYOUT, values) if moves else 0.0
        return Edge(
            site(node) if made else None,
            readers,
            any(user not in self._chosen for user in node.users),
            borders * (costs.of_border(QUANTIZE, values) + moved),
            borders * (costs.of_border(DEQUANTIZE, values) + moved),
        )

    def _may(self, reader: fx.Node, node: fx.Node) -> bool:
        """Returns whether this reader alone, if it is int8, justifies quantizing the float tensor that it reads."""
        kind = self._chosen[reader]
        return kind.weighted or kind.values == "moved" or site(node) in self.islands

    def _sites(self, labelled: frozenset[str]) -> Sites:
        floats = {node for node in self._chosen if site(node) in labelled and self._computes(node)}
        kept = {
            node for node in floats if site(node) in self.islands and self._is_read_by_int8(node, labelled)
        }
        opened = frozenset(self.islands - labelled)
        return self._trimmed(Sites(frozenset(map(site, floats - kept)), opened))

    def _computes(self, node: fx.Node) -> bool:
        kind = self._chosen[node]
        return not kind.keeps_range and kind.activation is None

    def _is_read_by_int8(self, node: fx.Node, labelled: frozenset[str]) -> bool:
        """Returns whether the node has an int8 reader that needs an int8 input."""
        chosen = [user for user in node.users if user in self._chosen and not self._chosen[user].weighted]
        return any(site(user) not in labelled for user in chosen)

    def _trimmed(self, found: Sites) -> Sites:
        """Returns the sites without the float operators that stay float anyway because of their neighbours."""
        floats = set(found.floats)
        wanted = self._layouts(floats, found.opened)
        for one in sorted(found.floats - set(self._layouts.operators)):
            if self._layouts(floats - {one}, found.opened) == wanted:
                floats.remove(one)
        return Sites(frozenset(floats), found.opened)


def refined(start: Sites, sites: Sequence[str], time: Callable[[Sites], float]) -> Sites:
    """Returns a placement that no change of a single operator makes faster by more than a thousandth.

    After a few rounds over all operators, the search stops even if there is still such a change. A cut considers
    only borders between two operators; `time` predicts the whole file.

    Args:
        start: the initial placement.
        sites: the sites of the operators that can be int8 or float.
        time: a function that predicts the time of a placement.
    """
    best, least, idle = start, time(start), 0
    for one in itertools.islice(itertools.cycle(sites), _ROUNDS * len(sites)):
        if idle == len(sites):
            break
        other = replace(best, floats=best.floats ^ {one})
        if (predicted := time(other)) < least * (1 - _CLEARLY):
            best, least, idle = other, predicted, 0
        else:
            idle += 1
    return best


def _size(node: fx.Node) -> int:
    value = node.meta.get("value")
    return value.numel() if isinstance(value, Tensor) and is_float_tensor(node) else 0
