"""Lifts weights into modules: a product with a weight outside of torch.nn's modules becomes such a module.

    F.conv2d(x, self.weight), F.linear(x, w, b)      →  Conv2d, Linear with the same parameters
    x @ w + b, w @ x, addmm, bmm, einsum             →  Linear, with operators that move axes where needed
    einsum("bhtd,hde->bhte", x, w)                   →  Conv1d in groups: a weight per head
    ConvTranspose2d                                  →  Conv2d, DepthToSpace (`qatkit.graph.weights.transposed`)
    F.linear(x, g · v / |v|)                         →  Linear with a computed weight (`qatkit.quant.computed_weights`)

A weight is a value that depends only on parameters and buffers. It keeps its parameters: all readers of a tied
parameter train it, and a frozen parameter stays frozen. A product that can't be written in this way stays unchanged,
and the reason is reported.
"""

from __future__ import annotations

from torch import fx, nn

from qatkit.graph.nodes import module_of, owner, site
from qatkit.graph.pass_result import PassResult
from qatkit.graph.trace import tidy
from qatkit.graph.weights.cut import Constants
from qatkit.graph.weights.held import open_held
from qatkit.graph.weights.operator import OperatorBuilder
from qatkit.graph.weights.rules import rule_of

_NO_WEIGHT = "stays float: the operator of the file does not multiply by a constant matrix on its right"


def lift_weights(graph_module: fx.GraphModule) -> PassResult:
    """Lifts weights in a traced and propagated graph, in place.

    `changed` in the result is the number of operators that got a module. New nodes have no value in their meta yet.
    """
    result = PassResult(graph_module, open_held(graph_module))
    _drop_identities(graph_module)
    builder = OperatorBuilder(Constants(graph_module))
    for node in list(graph_module.graph.nodes):
        rule = None if node in builder.constants else rule_of(node)
        if rule is None:
            continue
        if node.op != "call_module" and owner(node):
            result.skipped.append((site(node), _NO_WEIGHT))
            continue
        reason = rule(builder, node)
        if reason is None:
            result.changed += 1
        elif reason:
            result.skipped.append((site(node), reason))
    if result.changed:
        for node in reversed(
            list(graph_module.graph.nodes)
        ):  # the tensor of such a node may have moved into an operator
            if node in builder.constants and not node.users:
                graph_module.graph.erase_node(node)
        tidy(graph_module)
        _drop_unread(graph_module)
    return result


def _drop_identities(graph_module: fx.GraphModule) -> None:
    """Removes an nn.Identity before a function of the same module, so that an operator may take the module's place."""
    for node in [n for n in graph_module.graph.nodes if n.op == "call_module"]:
        inside = site(node).rpartition(".")[0]
        if isinstance(module_of(node), nn.Identity) and all(
            rule_of(user) is not None and site(user).rpartition(".")[0] == inside for user in node.users
        ):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph_module.graph.erase_node(node)


def _drop_unread(graph_module: fx.GraphModule) -> None:
    """Removes unread tensors of modules that are not called: operators have the tensors that are still used."""
    called = {str(n.target) for n in graph_module.graph.nodes if n.op == "call_module"}
    read = {str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr"}
    for path, module in graph_module.named_modules():
        parts = path.split(".")
        if any(".".join(parts[: i + 1]) in called for i in range(len(parts))):
            continue
        for held in (module._parameters, module._buffers):
            for name in [n for n in held if ".".join(filter(None, (path, n))) not in read]:
                del held[name]
