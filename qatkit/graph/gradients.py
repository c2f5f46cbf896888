"""Finds trainable weights that no gradient reaches, since every path to the outputs passes through an opaque module.

No gradient passes through an opaque module, since torch does not compute it (`qatkit.graph.nodes.is_opaque`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from qatkit.graph.nodes import is_opaque, module_of, site


@dataclass(frozen=True)
class Stopped:
    """A node with weights that get no gradient.

    Attributes:
        weights: the site of the node.
        by: the site of the opaque module between it and the outputs.
    """

    weights: str
    by: str


def stopped(graph: fx.Graph) -> Stopped | None:
    """Returns the first node whose trainable weights get no gradient because of an opaque module, if there is one."""
    reached: set[fx.Node] = set()  # nodes that a gradient reaches
    barred: dict[fx.Node, fx.Node] = {}  # the opaque module after each other node
    for node in reversed(graph.nodes):
        if node.op == "output" or any(user in reached and not _opaque(user) for user in node.users):
            reached.add(node)
        elif (behind := next((u if _opaque(u) else barred.get(u) for u in node.users), None)) is not None:
            barred[node] = behind
    for node in graph.nodes:
        if node in barred and not _opaque(node) and _trains(node):
            return Stopped(site(node), site(barred[node]))
    return None


def _opaque(node: fx.Node) -> bool:
    return node.op == "call_module" and is_opaque(module_of(node))


def _trains(node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(parameter.requires_grad for parameter in module_of(node).parameters())
    if node.op == "get_attr":
        return bool(operator.attrgetter(str(node.target))(node.graph.owning_module).requires_grad)
    return False
