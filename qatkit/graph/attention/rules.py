"""Rules of `qatkit.graph.stub` that turn attention into Linears, MatMuls and Softmax as nodes of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from qatkit.graph.attention import self_attention
from qatkit.graph.attention.mvit import RelativePositions
from qatkit.graph.attention.swin import CosineWindowAttention, WindowAttention, Windows
from qatkit.graph.node_arguments import arguments, has_free_axes, known, parameter_of, shape_of
from qatkit.graph.nodes import is_float_tensor, known_type, module_of, site
from qatkit.graph.trace import name_sites

_HIDDEN = -1e30  # far below any score, but finite, so that the softmax of a row of them is defined
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def open_attention(node: fx.Node) -> str | None:
    """Replaces a call of an nn.MultiheadAttention by the operators of `SelfAttention`; returns None.

    Calls that `SelfAttention` does not support have been replaced already, while the graph was recorded
    (`qatkit.graph.capture`).
    """
    module = cast(nn.MultiheadAttention, module_of(node))
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    node.args, node.kwargs = (node.all_input_nodes[0],), {}
    _inline(node, self_attention.SelfAttention(module))
    return None


def open_dot_product(node: fx.Node) -> str | None:
    """Rewrites softmax(q·kᵀ·scale + mask)·v for q, k, v [..., tokens, width].

    Heads may share keys and values, and the mask may be causal. Returns the reason if the attention stays float, else
    None.
    """
    given = dict(zip(_SDPA, node.args, strict=False)) | node.kwargs
    shape, keys = shape_of(given["query"]), shape_of(given["key"])
    computed = any(isinstance(given.get(name), fx.Node) for name in ("dropout_p", "scale"))
    # A graph is captured in inference mode; its meta has the dropout rate of training.
    rate = cast(float, node.meta.get("dropout", given.get("dropout_p", 0.0)))
    if shape is None or keys is None or computed:
        reason = (
            "its dropout or scale is computed"
            if computed
            else "the size of its input is not known; give an example"
        )
        return f"attention stays float{' and its dropout is off' if rate else ''}: {reason}"
    graph, path = node.graph, f"{site(node)}_drop"
    with graph.inserting_before(node):
        if given.get("enable_gqa"):
            for name in ("key", "value"):
                given[name] = _for_every_head(cast(fx.Node, given[name]), shape)
        scaled = graph.call_function(operator.mul, (given["query"], given.get("scale") or shape[-1] ** -0.5))
        turned = graph.call_method("transpose", (given["key"], -2, -1))
        y = graph.call_function(torch.matmul, (scaled, turned))
        steps = {"scale": scaled, "transpose": turned, "scores": y}
        mask, hidden = _mask(node, given, (shape[-2], keys[-2]))
        if mask is not None:
            steps["mask"] = y = graph.call_function(operator.add, (y, mask))
        elif hidden is not None:
            steps["mask"] = y = graph.call_method("masked_fill", (y, hidden, _HIDDEN))
        steps["softmax"] = y = graph.call_function(torch.softmax, (y, -1))
        if hidden is not None:  # a query that may attend to no key has the output zero
            steps["seen"] = y = graph.call_method("masked_fill", (y, hidden, 0.0))
        if rate:
            cast(fx.GraphModule, graph.owning_module).add_submodule(path, nn.Dropout(rate))
            steps["drop"] = y = graph.call_module(path, (y,))
        steps["matmul"] = y = graph.call_function(torch.matmul, (y, given["value"]))
    for name, new in steps.items():
        new.meta["site"] = f"{site(node)}.{name}"
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return None


def _mask(node: fx.Node, given: Mapping[str, Any], size: tuple[int, int]) -> tuple[Any, fx.Node | None]:
    """Returns (mask, hidden), of which at most one is not None.

    `mask` is added to the scores; it is for a float or causal mask. `hidden` is for a boolean mask; it is
    true where a query may not attend to a key.
    """
    graph, mask = node.graph, given.get("attn_mask")
    if given.get("is_causal"):
        name, owner = f"{site(node)}_causal_mask".replace(".", "_"), cast(fx.GraphModule, graph.owning_module)
        if has_free_axes(node):
            rows, columns = (graph.call_method("size", (given[key], -2)) for key in ("query", "key"))
            whole = graph.call_function(torch.full, ((rows, columns), -torch.inf))
            mask = graph.call_method("triu", (whole, 1))
            for new, what in ((rows, "rows"), (columns, "columns"), (whole, "hidden")):
                new.meta["site"] = f"{site(node)}.causal_{what}"
        else:
            owner.register_buffer(name, torch.full(size, -torch.inf).triu(1), persistent=False)
            mask = graph.get_attr(name)
        mask.meta["site"] = f"{site(node)}.causal_mask"
    elif mask is not None and not is_float_tensor(mask):
        hidden = graph.call_function(operator.invert, (mask,))
        hidden.meta["site"] = f"{site(node)}.hidden"
        return None, hidden
    return mask, None


def _for_every_head(node: fx.Node, query: tuple[int, ...]) -> fx.Node:
    """Repeats keys or values for the heads that share them.

    The shape changes from [..., few, tokens, width] to [..., heads, tokens, width].
    """
    shape, graph = cast("tuple[int, ...]", shape_of(node)), node.graph
    apart = graph.call_method("unsqueeze", (node, -3))
    sizes = [-1] * len(shape)
    sizes.insert(len(shape) - 2, query[-3] // shape[-3])
    spread = graph.call_method("expand", (apart, *sizes))
    whole = graph.call_method("flatten", (spread, -4, -3))
    for new, what in ((apart, "unsqueeze"), (spread, "expand"), (whole, "flatten")):
        new.meta["site"] = f"{site(node)}.{what}"
    return whole


def open_window_attention(node: fx.Node) -> str | None:
    """Replaces torchvision's function for Swin's attention by a module of `qatkit.graph.attention.swin`.

    Swin V1 and V2 on images and Video Swin are supported. Returns the reason if the attention stays float, else None.
    """
    given = {"logit_scale": None} | arguments(node, cast(Callable[..., Any], node.target))
    shape = shape_of(given["input"])
    if shape is None:
        return "attention stays float: the size of its input is not known; give an example"
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
    bias.args = tuple(
        known(a) for a in bias.args
    )  # on clips, its window is computed from the size of the input
    _inline(node, twin, path, [given["input"], bias] + [given["logit_scale"]] * (kind is not WindowAttention))
    return None


def open_relative_positions(node: fx.Node) -> str | None:
    """Replaces MViT's relative positions by `qatkit.graph.attention.mvit.RelativePositions`.

    Returns a note on what stays float: the products with the position tables, or everything with the reason
    if nothing was replaced.
    """
    given = {k: known(v) for k, v in arguments(node, cast(Callable[..., Any], node.target)).items()}
    sizes = [tuple(known(size) for size in given[key]) for key in ("q_thw", "k_thw")]
    tables = [given[f"rel_pos_{axis}"] for axis in "thw"]
    if any(isinstance(size, fx.Node) for size in sum(sizes, ())):
        return "relative positions stay float: the size of their input is not known; give an example"
    if any(parameter_of(table) is None for table in tables):
        return "relative positions stay float: their tables are computed"
    owner = cast(fx.GraphModule, node.graph.owning_module)
    path = str(tables[0].target).rpartition(".")[0] + ".relative"
    owner.add_submodule(path, nn.Module())
    node.meta["site"] = path
    _inline(node, RelativePositions(*sizes), path, [given["attn"], given["q"], *tables])
    return "the products of queries and position tables stay float; the rest is quantized"


def open_shortcut(node: fx.Node) -> str | None:
    """Rewrites x + shortcut as an Add, with zeros for the class token if it has no shortcut; returns None."""
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


class _Tracer(fx.Tracer):
    """A tracer whose leaves are torch.nn's modules and subclasses of them with the same forward."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return known_type(m) is not None or super().is_leaf_module(m, module_qualified_name)


def _inline(node: fx.Node, module: nn.Module, path: str = "", inputs: Sequence[Any] = ()) -> fx.Node:
    """Replaces a call of a leaf by the traced body of `module` and returns the node of the result.

    Args:
        node: the call of a module, which `module` replaces, or of a function.
        module: the module to trace.
        path: for a function, the path of the module to which `module`'s children and buffers are added.
        inputs: for a function, the arguments for `module`.
    """
    owner = node.graph.owning_module
    assert owner is not None
    path, inputs = path or str(node.target), inputs or node.args
    tracer = _Tracer()
    tracer.proxy_buffer_attributes = True  # computations on the module's buffers are part of the graph
    body = tracer.trace(module)
    name_sites(body, f"{path}.")
    placeholders = [n for n in body.nodes if n.op == "placeholder"]
    value_map: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with node.graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "output":
                break
            if inner.op != "placeholder":
                new = node.graph.node_copy(inner, lambda n: value_map[n])
                if inner.op in ("call_module", "get_attr"):
                    new.target = f"{path}.{inner.target}"
                value_map[inner] = new
    if node.op == "call_module":
        owner.set_submodule(path, module)
    else:
        _add_all(owner.get_submodule(path), module)
    result: fx.Node = value_map[inner.args[0]]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return result


def _add_all(home: nn.Module, module: nn.Module) -> None:
    """Adds the children and buffers of `module` to `home`."""
    for name, child in module.named_children():
        home.add_module(name, child)
    for name, value in module.named_buffers(recurse=False):
        home.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)
