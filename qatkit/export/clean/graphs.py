"""Iterates over a model's graphs at any depth, and over their nodes and values."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qatkit.export.rewrite import subgraphs


def graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yields a graph, then the branches and loop bodies in it."""
    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from graphs(inner)


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yields a graph's inputs, its initializers, and the outputs of its nodes, without those of inner graphs."""
    yield from graph.inputs
    for value in graph.initializers.values():
        if not value.is_graph_input():
            yield value
    for node in graph:
        yield from node.outputs


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields all nodes, including those of branches and loop bodies."""
    for graph in graphs(model.graph):
        yield from graph


def taken_names(model: ir.Model) -> set[str | None]:
    """Returns the names of all tensors."""
    return {value.name for graph in graphs(model.graph) for value in values(graph)}


def size_name(size: int | ir.SymbolicDim) -> str | None:
    """Returns the name of a dynamic size; None for a number, or for a placeholder that exporters write for any size."""
    return None if isinstance(size, int) or size.value in (None, "", "?") else size.value
