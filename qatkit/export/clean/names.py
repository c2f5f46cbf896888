"""Gives nodes and tensors names that any tool accepts: unique, and of plain characters."""

from __future__ import annotations

import re

import onnx_ir as ir

from qatkit.export.clean.graphs import graphs, values

_OTHERS = re.compile(r"[^A-Za-z0-9_./]")


def safe_names(model: ir.Model, *, ends: bool) -> list[str]:
    """Gives nodes and tensors safe names.

    Args:
        model: the model, changed in place.
        ends: whether to rename the model's inputs and outputs as well.

    Returns:
        Lines with the numbers of renamed tensors and nodes.
    """
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    tensors = _tensors(model)
    keeps = set() if ends else kept
    present: set[str | None] = set(keeps)
    renamed = []
    for value in tensors:
        if value.name in keeps and value in (*model.graph.inputs, *model.graph.outputs):
            continue
        if (name := _free(str(value.name), present)) != value.name:
            renamed.append((value, name))
    for number, (value, _) in enumerate(
        renamed
    ):  # temporary names, so that a new name never collides with an old one
        value.name = f"\0{number}"
    for value, name in renamed:
        value.name = name
    nodes = _rename_nodes(model)
    lines = [f"{len(renamed)} {'tensor' if len(renamed) == 1 else 'tensors'} renamed"] if renamed else []
    return lines + ([f"{nodes} {'node' if nodes == 1 else 'nodes'} renamed"] if nodes else [])


def _tensors(model: ir.Model) -> list[ir.Value]:
    found = (value for graph in graphs(model.graph) for value in values(graph) if value.name)
    return list(dict.fromkeys(found))


def _rename_nodes(model: ir.Model) -> int:
    present: set[str | None] = set()
    renamed = 0
    for graph in graphs(model.graph):
        for node in graph:
            name = _free(node.name or f"{node.op_type}_{node.outputs[0].name}", present)
            renamed += name != node.name
            node.name = name
    return renamed


def _free(name: str, present: set[str | None]) -> str:
    """Returns a safe form of a name that is not yet in `present`, and adds it to `present`."""
    plain = _OTHERS.sub("_", name) or "_"
    free, number = plain, 1
    while free in present:
        free, number = f"{plain}_{number}", number + 1
    present.add(free)
    return free
