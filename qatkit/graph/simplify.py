"""Simplify: what a graph in training has and inference needs not: dropout, auxiliary heads, computed constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.fuse import fuse
from qatkit.graph.ops import op_class, site
from qatkit.graph.place import constants
from qatkit.graph.stub import stub
from qatkit.graph.trace import tidy


def simplify(graph_module: fx.GraphModule) -> None:
    """Changes `graph_module`, in inference mode, in place."""
    _drop_passes(graph_module)
    _fold_constants(graph_module)
    tidy(graph_module)


def float_baseline(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """The float model as ONNX Runtime runs it fastest: BatchNorm folded, attention as in the INT8 file."""
    graph_module = stub(fuse(model, example=example).graph, example).graph.eval()
    simplify(graph_module)
    return graph_module


def _drop_passes(graph_module: fx.GraphModule) -> None:
    """Dropout and its like are the identity in inference; auxiliary heads have no reader any more."""
    for node in list(graph_module.graph.nodes):
        if op_class(node) in ("pass", "outputs") and node.all_input_nodes:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph_module.graph.erase_node(node)


def _fold_constants(graph_module: fx.GraphModule) -> None:
    """Computes once what depends on parameters alone (Swin's relative position bias)."""
    constant = constants(graph_module.graph)
    values: dict[fx.Node, Any] = {}
    run = fx.Interpreter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node not in constant:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            values[node] = getattr(run, node.op)(node.target, args, kwargs)
        if node.op == "get_attr" or all(user in constant for user in node.users):
            continue
        name = f"{site(node).replace('.', '_')}_folded"
        graph_module.register_buffer(name, values[node].detach().clone())
        with graph_module.graph.inserting_after(node):
            folded = graph_module.graph.get_attr(name)
        folded.meta = {"site": site(node), "value": node.meta.get("value")}
        node.replace_all_uses_with(folded)
