"""Nodes of an ONNX graph in an order in which each is computed before it is read, as the standard wants it."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import onnx


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sorts the nodes of a graph and of its branches and bodies in place; an order that is right already stays.

    Raises:
        ValueError: a node reads what it makes itself, directly or through others.
    """
    for node in graph.node:
        for inner in _graphs(node):
            sort_nodes(inner)
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs = [sorted({makers[name] for name in _read(node) if name in makers}) for node in graph.node]
    if all(maker < index for index, found in enumerate(needs) for maker in found):
        return
    try:
        order = list(TopologicalSorter(dict(enumerate(needs))).static_order())
    except CycleError as error:
        first = graph.node[error.args[1][0]]
        raise ValueError(f"the node '{first.name}' ({first.op_type}) reads a result of its own") from error
    nodes = [graph.node[index] for index in order]
    ordered = onnx.GraphProto(node=nodes)
    del graph.node[:]
    graph.node.extend(ordered.node)


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, in its branches and bodies too."""
    yield from node.input
    for graph in _graphs(node):
        own = {name for inner in graph.node for name in inner.output}
        own |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            yield from (name for name in _read(inner) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)
