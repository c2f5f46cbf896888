"""Finds the nodes of a graph whose values reach an output or a logarithm, and those that order values."""

from __future__ import annotations

import torch
from torch import fx

from qatkit.graph.nodes import facts, op_class
from qatkit.graph.quantizers import is_quantizer

_LOGARITHMS = (torch.log, torch.log2, torch.log10, torch.log1p, "log", "log2", "log10", "log1p")
_ORDERS = ("argmax", "argmin", "argsort", "kthvalue", "median", "nms", "sort", "suppress", "topk")


def orders(node: fx.Node) -> bool:
    """Returns whether a node orders or selects values; a small error may change the order."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _ORDERS


def weighted(node: fx.Node) -> bool:
    """Returns whether a node multiplies its input by weights, so that errors in the input change their size."""
    return node.op == "call_module" and (facts(node).weighted or op_class(node) in ("lstm", "gru", "rnn"))


def reaching_outputs(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose values reach an output without passing an operator with a weight."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (
            node in found or any(user in found and not weighted(user) for user in node.users)
        ):
            found.add(node)
    return found


def reaching_logarithms(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose values reach a logarithm without passing a quantizer."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(
            user.target in _LOGARITHMS or (user in found and not is_quantizer(user)) for user in node.users
        ):
            found.add(node)
    return found
