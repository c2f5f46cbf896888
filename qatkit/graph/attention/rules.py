"""Rules of `qatkit.graph.stub` for attention: its Linears, its MatMuls and Softmax as nodes of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from qatkit.graph.attention import self_attention
from qatkit.graph.attention.mvit import RelativePositions
from qatkit.graph.attention.swin import CosineWindowAttention, WindowAttention, Windows
from qatkit.graph.node_arguments import arguments, known, parameter_of, shape_of
from qatkit.graph.nodes import is_float_tensor, module_of, site
from qatkit.graph.trace import inline

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def open_attention(node: fx.Node) -> str | None:
    """nn.MultiheadAttention of a tensor with itself becomes `self_attention.SelfAttention`."""
    module = cast(nn.MultiheadAttention, module_of(node))
    reason = self_attention.why_not(module) or self_attention.unusual_call(node)
    if reason:
        return f"attention stays float: {reason}"
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    node.args, node.kwargs = (node.all_input_nodes[0],), {}
    inline(node, self_attention.SelfAttention(module))
    return None


def open_dot_product(node: fx.Node) -> str | None:
    """softmax(q·kᵀ·scale + mask)·v for q, k, v [..., tokens, width] and a mask of floats or none."""
    given = dict(zip(_SDPA, node.args, strict=False)) | node.kwargs
    mask, shape = given.get("attn_mask"), shape_of(given["query"])
    refused = [
        ("a causal mask is asked for", given.get("is_causal")),
        ("its heads share keys", given.get("enable_gqa")),
        ("its dropout or scale is computed", isinstance(given.get("dropout_p"), fx.Node)),
        ("its dropout or scale is computed", isinstance(given.get("scale"), fx.Node)),
        ("the size of its input is not known, give an example", shape is None),
        ("its mask is not one of floats", mask is not None and not is_float_tensor(mask)),
    ]
    reason = next((text for text, found in refused if found), None)
    # A graph is captured in inference mode, and remembers the rate of training.
    rate = cast(float, node.meta.get("dropout", given.get("dropout_p", 0.0)))
    if reason is not None or shape is None:
        return f"attention stays float{', its dropout is off' if rate else ''}: {reason}"
    scale = given.get("scale") or shape[-1] ** -0.5
    graph, path = node.graph, f"{site(node)}_drop"
    with graph.inserting_before(node):
        scaled = graph.call_function(operator.mul, (given["query"], scale))
        turned = graph.call_method("transpose", (given["key"], -2, -1))
        y = graph.call_function(torch.matmul, (scaled, turned))
        steps = {"scale": scaled, "transpose": turned, "scores": y}
        if mask is not None:
            steps["mask"] = y = graph.call_function(operator.add, (y, mask))
        steps["softmax"] = y = graph.call_function(torch.softmax, (y, -1))
        if rate:
            cast(fx.GraphModule, graph.owning_module).add_submodule(path, nn.Dropout(rate))
            steps["drop"] = y = graph.call_module(path, (y,))
        steps["matmul"] = y = graph.call_function(torch.matmul, (y, given["value"]))
    for name, new in steps.items():
        new.meta["site"] = f"{site(node)}.{name}"
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return None


def open_window_attention(node: fx.Node) -> str | None:
    """Torchvision's function for Swin (2-D, V1 and V2, and 3-D) becomes a module of `qatkit.graph.attention.swin`."""
    given = {"logit_scale": None} | arguments(node, cast(Callable[..., Any], node.target))
    shape = shape_of(given["input"])
    if shape is None:
        return "attention stays float: the size of its input is not known, give an example"
    qkv_weight, proj_weight = parameter_of(given["qkv_weight"]), parameter_of(given["proj_weight"])
    if qkv_weight is None or proj_weight is None:
        return "attention stays float: its weights are computed"
    path = str(given["qkv_weight"].target).removesuffix(".qkv.weight")
    window, shift = tuple(known(given["window_size"])), known(given["shift_size"])
    padded = Windows(shape[1:-1], window, window).padded
    shift = tuple(0 if w >= size else s for s, w, size in zip(shift, window, padded, strict=True))
    kind = WindowAttention if given["logit_scale"] is None else CosineWindowAttention
    twin = kind(
        _linear(qkv_weight, parameter_of(given["qkv_bias"])),
        _linear(proj_weight, parameter_of(given["proj_bias"])),
        given["num_heads"],
        Windows(shape[1:-1], window, shift),
        given["attention_dropout"],
        given["dropout"],
    )
    bias = given["relative_position_bias"]
    bias.args = tuple(known(a) for a in bias.args)  # on clips its window comes from the size of the input
    inline(node, twin, path, [given["input"], bias] + [given["logit_scale"]] * (kind is not WindowAttention))
    return None


def open_relative_positions(node: fx.Node) -> str | None:
    """MViT's relative positions become `multiscale.RelativePositions`."""
    given = {k: known(v) for k, v in arguments(node, cast(Callable[..., Any], node.target)).items()}
    sizes = [tuple(known(size) for size in given[key]) for key in ("q_thw", "k_thw")]
    tables = [given[f"rel_pos_{axis}"] for axis in "thw"]
    if any(isinstance(size, fx.Node) for size in sum(sizes, ())):
        return "relative positions: the size of their input is not known, give an example"
    if any(parameter_of(table) is None for table in tables):
        return "relative positions: their tables are computed"
    owner = cast(fx.GraphModule, node.graph.owning_module)
    path = str(tables[0].target).rpartition(".")[0] + ".relative"
    owner.add_submodule(path, nn.Module())
    node.meta["site"] = path
    inline(node, RelativePositions(*sizes), path, [given["attn"], given["q"], *tables])
    return "opened; its products of queries and tables of positions stay float"


def open_shortcut(node: fx.Node) -> str | None:
    """X + shortcut, with zero for the class token where that has no part in it."""
    x, shortcut, with_class = node.args
    graph, name = node.graph, site(node)
    with graph.inserting_before(node):
        if not with_class:
            patches = graph.call_function(
                operator.getitem, (shortcut, (slice(None), slice(None), slice(1, None)))
            )
            shortcut = graph.call_function(F.pad, (patches, (0, 0, 1, 0)))
            patches.meta["site"], shortcut.meta["site"] = f"{name}.slice", f"{name}.pad"
        total = graph.call_function(operator.add, (x, shortcut))
    total.meta["site"] = f"{name}.add"
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return None


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear
