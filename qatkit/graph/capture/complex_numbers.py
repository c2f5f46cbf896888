"""Replaces complex numbers with pairs of real ones, since quantizers and ONNX's arithmetic support only real numbers.

    view_as_complex(x)      →  x[..., 0], x[..., 1]
    z · w                   →  re(z)·re(w) - im(z)·im(w), re(z)·im(w) + im(z)·re(w)
    z.reshape(..), z.sum()  →  the same of both parts
    z.abs()                 →  the norm of the stacked parts

A parameter or buffer of complex numbers becomes two, NAME_real and NAME_imag. An operator without a rule
(`qatkit.graph.capture.complex_rules`), such as a Fourier transform, stays, and reads torch.complex(re, im).
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

from qatkit.graph.capture.complex_rules import rule_of
from qatkit.graph.capture.complex_writer import Pair, PairWriter


def open_complex(graph_module: fx.GraphModule) -> None:
    """Rewrites, in place, the nodes that compute with complex numbers.

    Args:
        graph_module: the recorded graph; the meta of its nodes says which of them are complex, and their shapes.
    """
    writer = PairWriter(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        writer.place = node
        if node.op == "get_attr":
            _split(writer, node, graph_module)
        elif node.meta.get("complex") or any(one in writer.pairs for one in node.all_input_nodes):
            _open(writer, node)
    if writer.pairs:
        graph_module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        _drop_unread(graph_module)


def _open(writer: PairWriter, node: fx.Node) -> None:
    """Replaces a complex node by a pair of nodes, and a real node with complex arguments by one that reads parts.

    A node without a rule stays, and so does a call that its rule does not support.
    """
    rule = rule_of(node)
    with node.graph.inserting_before(node):
        found = None if rule is None else rule(writer, node)
    if isinstance(found, Pair):
        writer.pairs[node] = found
    elif found is not None:
        node.replace_all_uses_with(found)
    else:
        _leave(writer, node)


def _leave(writer: PairWriter, node: fx.Node) -> None:
    """Composes the complex arguments of a node from their parts; reads both parts of its result if it is complex."""

    def joined(one: fx.Node) -> fx.Node:
        return writer.call(torch.complex, *writer.nodes(one)) if one in writer.pairs else one

    with node.graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), joined)
    if not node.meta.get("complex"):
        return
    with node.graph.inserting_before(node.next):
        both = writer.call(torch.view_as_real, node)
        parts = [writer.call(operator.getitem, both, (Ellipsis, i)) for i in (0, 1)]
    writer.pairs[node] = Pair(*parts)


def _split(writer: PairWriter, node: fx.Node, graph_module: fx.GraphModule) -> None:
    """Splits a complex parameter or buffer into two real ones."""
    owner_path, _, name = str(node.target).rpartition(".")
    owner = graph_module.get_submodule(owner_path)
    tensor = getattr(owner, name)
    if not isinstance(tensor, Tensor) or not tensor.is_complex():
        return
    nodes = []
    for suffix, part in (("real", tensor.detach().real), ("imag", tensor.detach().resolve_conj().imag)):
        new, value = f"{name}_{suffix}", part.clone().contiguous()
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(new, nn.Parameter(value, tensor.requires_grad))
        else:
            owner.register_buffer(new, value, name not in owner._non_persistent_buffers_set)
        with node.graph.inserting_before(node):
            nodes.append(writer.marked(node.graph.get_attr(f"{owner_path}.{new}".lstrip("."))))
    writer.pairs[node] = Pair(*nodes)


def _drop_unread(graph_module: fx.GraphModule) -> None:
    """Removes the complex parameters and buffers that no node reads any more."""
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for path, tensor in (*graph_module.named_parameters(), *graph_module.named_buffers()):
        owner, _, name = path.rpartition(".")
        if tensor.is_complex() and path not in read:
            delattr(graph_module.get_submodule(owner), name)
