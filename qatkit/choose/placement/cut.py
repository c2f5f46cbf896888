"""Finds the cheapest placement by a minimum cut, from the times of operators (in int8 and in float) and of borders.

    minimize   Σ time of operator i in its type  +  Σ time of each tensor's Quantize or Dequantize, where one is needed

There are two labels, and only neighbours with different labels have a cost. The best labels are therefore a
minimum cut between a source (int8) and a sink (float), which is found exactly (Greig, Porteous and Seheult,
"Exact maximum a posteriori estimation for binary images", 1989; flow: SciPy). A tensor with several readers
is quantized only once, so an additional vertex represents its Q/DQ pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_UNITS = 10**7  # units in the sum of all times, since capacities are 32-bit integers
_NEVER = 10**9


@dataclass(frozen=True)
class Times:
    """The times of one operator in int8 and in float, in any unit; infinity for an impossible type."""

    int8: float
    float: float


@dataclass(frozen=True)
class Edge:
    """A tensor and its readers.

    Attributes:
        source: the operator that decides the type of the tensor; None if the tensor is always float.
        readers: for each operator that reads the tensor: whether a float tensor may be quantized for this
            operator.
        float_reader: whether there is a reader that is always float.
        quantize, dequantize: the times of quantizing and dequantizing the tensor.
    """

    source: str | None
    readers: Mapping[str, bool]
    float_reader: bool
    quantize: float
    dequantize: float


def cheapest(operators: Mapping[str, Times], edges: Sequence[Edge]) -> frozenset[str]:
    """Returns the operators that are float in the cheapest placement."""
    network = _Network(operators, edges)
    for name, times in operators.items():
        network.add(_INT8, name, times.float)
        network.add(name, _FLOAT, times.int8)
    for number, edge in enumerate(edges):
        _add_edge(network, number, edge)
    return frozenset(operators) - network.of_the_source()


def total(operators: Mapping[str, Times], edges: Sequence[Edge], floats: Iterable[str]) -> float:
    """Returns the time of a placement in the unit of the inputs; infinity for an impossible one."""
    chosen = set(floats)
    time = sum(one.float if name in chosen else one.int8 for name, one in operators.items())
    for edge in edges:
        eight = edge.source is not None and edge.source not in chosen
        int8_readers = [may for reader, may in edge.readers.items() if reader not in chosen]
        if eight:
            time += edge.dequantize * (edge.float_reader or len(int8_readers) < len(edge.readers))
        elif int8_readers:
            time += edge.quantize if all(int8_readers) else math.inf
    return time


_INT8, _FLOAT = object(), object()


class _Network:
    """A flow network. Vertices are operators, the two ends, and (edge, kind); all times add up to `_UNITS`."""

    def __init__(self, operators: Mapping[str, Times], edges: Sequence[Edge]) -> None:
        known = [time for one in operators.values() for time in (one.int8, one.float)]
        known += [time for edge in edges for time in (edge.quantize, edge.dequantize)]
        self._unit = (sum(time for time in known if math.isfinite(time)) or 1.0) / _UNITS
        self._index: dict[object, int] = {_INT8: 0, _FLOAT: 1}
        self._capacity: dict[tuple[int, int], int] = {}

    def add(self, start: object, end: object, time: float) -> None:
        """Adds a cost that applies if `start` is int8 and `end` is float."""
        pair = (self._number(start), self._number(end))
        more = _NEVER if math.isinf(time) else round(time / self._unit)
        self._capacity[pair] = min(_NEVER, self._capacity.get(pair, 0) + more)

    def of_the_source(self) -> set[object]:
        """Returns the vertices on the int8 side of a minimum cut: those still reachable after a maximum flow."""
        size = len(self._index)
        rows, columns = np.array(list(self._capacity)).T
        values = np.array(list(self._capacity.values()), dtype=np.int32)
        graph = csr_array((values, (rows, columns)), shape=(size, size))
        left = csr_array(graph - maximum_flow(graph, 0, 1).flow)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return {name for name, number in self._index.items() if number in reached}

    def _number(self, vertex: object) -> int:
        return self._index.setdefault(vertex, len(self._index))


def _add_edge(network: _Network, number: int, edge: Edge) -> None:
    source, read = edge.source, (number, "dequantized")
    if source is not None and (edge.readers or edge.float_reader):
        network.add(source, read, edge.dequantize)
        for reader in edge.readers:
            network.add(read, reader, math.inf)
        if edge.float_reader:
            network.add(read, _FLOAT, math.inf)
    end, quantized = _FLOAT if source is None else source, (number, "quantized")
    for reader, may in edge.readers.items():
        network.add(reader, quantized if may else end, math.inf)
    if any(edge.readers.values()):
        network.add(quantized, end, edge.quantize)
