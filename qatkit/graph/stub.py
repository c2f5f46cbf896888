"""Stub: opens what hides arithmetic, so that quantization reaches inside.

A rule looks at a node, and either rewrites it or says why it can't. The twins equal the originals to 1e-5
and take over their parameters; `original_names` and `load_original` translate state_dicts between the two.

    MultiheadAttention(x, x, x)  →  qkv Linear, MatMul, Softmax, MatMul, out_proj Linear
    hardswish(x)                 →  x · hardsigmoid(x)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph import attention
from qatkit.graph.ops import module_of, op_class, site
from qatkit.graph.result import PassResult
from qatkit.graph.trace import inline, tidy, trace

_ATTENTION_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip


def stub(model: nn.Module) -> PassResult:
    """Applies every rule to every node; traces `model` first if it is no GraphModule yet."""
    graph_module = trace(model)
    result = PassResult(graph_module)
    for node in list(graph_module.graph.nodes):
        rule = RULES.get(op_class(node))
        if rule is None:
            continue
        reason = rule(node)
        if reason is None:
            result.changed += 1
        else:
            result.skipped.append((site(node), reason))
    tidy(graph_module)
    return result


def _open_attention(node: fx.Node) -> str | None:
    module = cast(nn.MultiheadAttention, module_of(node))
    reason = attention.why_not(module) or _unusual_call(node)
    if reason:
        return f"attention stays float: {reason}"
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    node.args, node.kwargs = (node.all_input_nodes[0],), {}
    path = str(node.target)
    inline(node, attention.SelfAttention(module))
    owner = cast(fx.GraphModule, node.graph.owning_module)
    owner.meta.setdefault("renamed", {}).update(
        {f"{path}.qkv.{kind}": f"{path}.in_proj_{kind}" for kind in ("weight", "bias")}
    )
    return None


def _unusual_call(node: fx.Node) -> str | None:
    given = dict(zip(_ATTENTION_ARGUMENTS, node.args, strict=False)) | node.kwargs
    if sum(n.op == "call_module" and n.target == node.target for n in node.graph.nodes) > 1:
        return "it is called more than once"
    if not given["query"] is given["key"] is given["value"]:
        return "query, key and value are not the same tensor"
    if any(given.get(k) not in (None, False) for k in ("key_padding_mask", "attn_mask", "is_causal")):
        return "a mask is given"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return "its attention weights are read"
    return None


def _open_gated(gate: Callable[[Tensor], Tensor]) -> Callable[[fx.Node], str | None]:
    def rule(node: fx.Node) -> str | None:
        x, graph, name = node.all_input_nodes[0], node.graph, site(node)
        with graph.inserting_before(node):
            gated = graph.call_function(gate, (x,))
            product = graph.call_function(operator.mul, (x, gated))
        gated.meta["site"], product.meta["site"] = f"{name}.gate", f"{name}.mul"
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        return None

    return rule


RULES: dict[str, Callable[[fx.Node], str | None]] = {
    "attention": _open_attention,
    "hardswish": _open_gated(F.hardsigmoid),
}


def original_names(graph_module: fx.GraphModule, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` of a stubbed graph under the names of the model that was traced."""
    renamed: dict[str, str] = graph_module.meta.get("renamed", {})
    return {renamed.get(name, name): value for name, value in state.items()}


def load_original(graph_module: fx.GraphModule, state: Mapping[str, Tensor]) -> None:
    """Loads a state_dict of the model that was traced into its stubbed (not BatchNorm-folded) graph."""
    back = {old: new for new, old in graph_module.meta.get("renamed", {}).items()}
    graph_module.load_state_dict({back.get(name, name): value for name, value in state.items()})
