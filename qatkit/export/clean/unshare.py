"""Copies shared initializers, so that each has one reader."""

from __future__ import annotations

import onnx_ir as ir

from qatkit.export.clean.graphs import graphs, taken_names
from qatkit.export.for_ort_tools import copied
from qatkit.export.hidden_names import free_name


def unshare(model: ir.Model) -> list[str]:
    """Copies each initializer with several readers for all but the first of them.

    If the initializer is also an output of the file, every reader gets a copy.
    """
    taken, copies = taken_names(model), 0
    for graph in graphs(model.graph):
        for value in list(graph.initializers.values()):
            places = list(value.uses())
            kept = 0 if value.is_graph_output() else 1
            for node, index in places[kept:]:
                assert value.const_value is not None
                name = free_name(f"{value.name}_copy", taken)
                node.replace_input_with(index, copied(graph, value.const_value, name))
                copies += 1
    return [f"{copies} {'copy' if copies == 1 else 'copies'} of initializers"] if copies else []
