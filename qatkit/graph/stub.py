"""Stub: opens what hides arithmetic, so that quantization reaches inside.

A rule looks at a node and rewrites it (None), says why it can't, or finds that it is not meant (""). The
twins equal the originals to 1e-5 and take over their parameters; `original_names` and `load_original`
translate state_dicts between the two.

    MultiheadAttention(x, x, x)  →  qkv Linear, MatMul, Softmax, MatMul, out_proj Linear
    scaled_dot_product_attention →  MatMul, Softmax, MatMul
    shifted_window_attention(x)  →  the same for the windows of Swin, V1, V2 and 3-D
    relative positions of MViT   →  MatMuls with tables, a Pad and an Add
    shortcut of MViT, in place   →  Add
    hardswish(x)                 →  x · hardsigmoid(x)
    x.mean((2, 3))               →  global average pool, flatten
    einsum("…ID,…JD->…IJ", a, b) →  MatMul (and "…IJ,…JD->…ID")
    F.layer_norm(x, …, γ, β)     →  LayerNorm
    patch merging of Swin        →  one reshape, permute, reshape
    F.pad(x, (0, 0, …))          →  x

Rules that need the size of a tensor find it only if an example was given.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torchvision.models.video import mvit

from qatkit.graph import attention
from qatkit.graph.multiscale import RelativePositions
from qatkit.graph.ops import is_float_tensor, module_of, op_class, site
from qatkit.graph.result import PassResult
from qatkit.graph.trace import inline, propagate, tidy, trace
from qatkit.graph.windows import CosineWindowAttention, WindowAttention, Windows

_ATTENTION_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip

_TURNS = frozenset({"permute", "transpose", "swapaxes", "swapdims", torch.permute, torch.transpose,
                    torch.swapaxes, torch.swapdims})  # fmt: skip


def stub(model: nn.Module, example: Tensor | None = None) -> PassResult:
    """Applies every rule to every node; traces `model` first if it is no GraphModule yet.

    Args:
        model: the float model, or its graph.
        example: one input of the real shape [N, C, H, W].
    """
    graph_module = trace(model)
    if example is not None:
        propagate(graph_module, example)
    result = PassResult(graph_module)
    for node in list(graph_module.graph.nodes):
        rule = RULES.get(op_class(node))
        if rule is None:
            continue
        reason = rule(node)
        if reason is None:
            result.changed += 1
        elif reason:
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


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _open_dot_product(node: fx.Node) -> str | None:
    """softmax(q·kᵀ·scale + mask)·v for q, k, v [..., tokens, width] and a mask of floats or none."""
    given = dict(zip(_SDPA, node.args, strict=False)) | node.kwargs
    mask, shape = given.get("attn_mask"), _shape_of(given["query"])
    refused = [
        ("a causal mask is asked for", given.get("is_causal")),
        ("its heads share keys", given.get("enable_gqa")),
        ("its dropout or scale is computed", isinstance(given.get("dropout_p"), fx.Node)),
        ("its dropout or scale is computed", isinstance(given.get("scale"), fx.Node)),
        ("the size of its input is not known, give an example", shape is None),
        ("its mask is not one of floats", mask is not None and not is_float_tensor(mask)),
    ]
    reason = next((text for text, found in refused if found), None)
    if reason is not None or shape is None:
        return f"attention stays float: {reason}"
    rate, scale = cast(float, given.get("dropout_p", 0.0)), given.get("scale") or shape[-1] ** -0.5
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


def _shape_of(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _arguments(node: fx.Node, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a call of a Python function by name, with defaults."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _known(value: Any) -> Any:
    """A size that is computed, as the number or list that the example gave; anything else as it is."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return value if found is None or isinstance(found, Tensor) else found


def _get(node: Any) -> Any:
    """The parameter that a get_attr node names; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    return getattr(cast(fx.GraphModule, node.graph.owning_module).get_submodule(owner), name)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def _open_window_attention(node: fx.Node) -> str | None:
    given = {"logit_scale": None} | _arguments(node, cast(Callable[..., Any], node.target))
    shape = _shape_of(given["input"])
    if shape is None:
        return "attention stays float: the size of its input is not known, give an example"
    qkv_weight, proj_weight = _get(given["qkv_weight"]), _get(given["proj_weight"])
    if qkv_weight is None or proj_weight is None:
        return "attention stays float: its weights are computed"
    path = str(given["qkv_weight"].target).removesuffix(".qkv.weight")
    window, shift = tuple(_known(given["window_size"])), _known(given["shift_size"])
    padded = Windows(shape[1:-1], window, window).padded
    shift = tuple(0 if w >= size else s for s, w, size in zip(shift, window, padded, strict=True))
    kind = WindowAttention if given["logit_scale"] is None else CosineWindowAttention
    twin = kind(
        _linear(qkv_weight, _get(given["qkv_bias"])),
        _linear(proj_weight, _get(given["proj_bias"])),
        given["num_heads"],
        Windows(shape[1:-1], window, shift),
        given["attention_dropout"],
        given["dropout"],
    )
    bias = given["relative_position_bias"]
    bias.args = tuple(_known(a) for a in bias.args)  # on clips its window comes from the size of the input
    inline(node, twin, path, [given["input"], bias] + [given["logit_scale"]] * (kind is not WindowAttention))
    return None


def _open_relative_positions(node: fx.Node) -> str | None:
    given = {k: _known(v) for k, v in _arguments(node, cast(Callable[..., Any], node.target)).items()}
    sizes = [tuple(_known(size) for size in given[key]) for key in ("q_thw", "k_thw")]
    tables = [given[f"rel_pos_{axis}"] for axis in "thw"]
    if any(isinstance(size, fx.Node) for size in sum(sizes, ())):
        return "relative positions: the size of their input is not known, give an example"
    if any(_get(table) is None for table in tables):
        return "relative positions: their tables are computed"
    owner = cast(fx.GraphModule, node.graph.owning_module)
    path = str(tables[0].target).rpartition(".")[0] + ".relative"
    owner.add_submodule(path, nn.Module())
    node.meta["site"] = path
    inline(node, RelativePositions(*sizes), path, [given["attn"], given["q"], *tables])
    return "opened; its products of queries and tables of positions stay float"


def _open_shortcut(node: fx.Node) -> str | None:
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


def _merge_patches(node: fx.Node) -> str | None:
    """Every second row and column into channels: four strided slices and a Cat, or one permute."""
    shape = _shape_of(node.args[0])
    if shape is None or len(shape) < 4 or shape[-3] % 2 or shape[-2] % 2:
        return ""
    *before, rows, columns, channels = shape[1:]
    axis = len(before) + 1  # of the rows; frames of a clip come before
    order = (*range(axis), axis, axis + 2, axis + 3, axis + 1, axis + 4)
    graph, name = node.graph, site(node)
    with graph.inserting_before(node):
        cut = graph.call_method(
            "reshape", (node.args[0], -1, *before, rows // 2, 2, columns // 2, 2, channels)
        )
        moved = graph.call_method("permute", (cut, *order))
        merged = graph.call_method("reshape", (moved, -1, *before, rows // 2, columns // 2, 4 * channels))
    for new, what in ((cut, "cut"), (moved, "permute"), (merged, "merge")):
        new.meta["site"] = f"{name}.{what}"
    node.replace_all_uses_with(merged)
    graph.erase_node(node)
    return None


def _drop_empty_pad(node: fx.Node) -> str | None:
    """Padding up to a multiple that the example has already (the patches of clips)."""
    given = _arguments(node, F.pad)
    if any(_known(amount) != 0 for amount in given["pad"]):
        return ""
    node.replace_all_uses_with(given["input"])
    node.graph.erase_node(node)
    return None


def _mean_to_pool(node: fx.Node) -> str | None:
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    shape, axes = _shape_of(given["input"]), given.get("dim")
    if shape is None or len(shape) != 4 or not isinstance(axes, (tuple, list)):
        return ""
    if sorted(int(a) % 4 for a in axes) != [2, 3]:
        return ""
    graph, name = node.graph, site(node)
    with graph.inserting_before(node):
        new = graph.call_function(F.adaptive_avg_pool2d, (given["input"], 1))
        new.meta["site"] = name
        if not given.get("keepdim"):
            new = graph.call_function(torch.flatten, (new, 1))
            new.meta["site"] = f"{name}.flatten"
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return None


def _einsum_to_matmul(node: fx.Node) -> str | None:
    if len(node.args) != 3 or not isinstance(node.args[0], str):
        return ""
    equation = re.fullmatch(r"(\w+),(\w+)->(\w+)", node.args[0].replace(" ", ""))
    if equation is None:
        return ""
    (left, right, result), (a, b) = equation.groups(), node.args[1:]
    batch, i, j = left[:-2], left[-2:-1], left[-1:]
    if len(set(left)) != len(left) or right[: len(batch)] != batch or len(right) != len(left):
        return ""
    k = next((c for c in right[len(batch) :] if c != j), "")
    if not k or k in left or result != batch + i + k:
        return ""
    graph = node.graph
    with graph.inserting_before(node):
        if right == batch + k + j:
            b = graph.call_method("transpose", (b, -2, -1))
            b.meta["site"] = f"{site(node)}.transpose"
        elif right != batch + j + k:
            return ""
        product = graph.call_function(torch.matmul, (a, b))
    product.meta["site"] = f"{site(node)}.matmul"
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return None


def _layer_norm_module(node: fx.Node) -> str | None:
    """A LayerNorm called as a function becomes a module, which the exporter knows how to name and translate."""
    if node.op != "call_function":
        return _keep_norm_from_transposes(node)
    given = _arguments(node, F.layer_norm)
    weight, bias = _get(given["weight"]), _get(given["bias"])
    if not isinstance(weight, nn.Parameter) or (given["bias"] is not None and bias is None):
        return ""
    norm = nn.LayerNorm(given["normalized_shape"], given["eps"], bias=bias is not None)
    norm.weight = weight
    if bias is not None:
        norm.bias = bias
    path = str(given["weight"].target).rpartition(".")[0]
    owner = cast(fx.GraphModule, node.graph.owning_module)
    if not path or set(dict(owner.get_submodule(path).named_children())):
        return ""
    owner.set_submodule(path, norm)
    with node.graph.inserting_before(node):
        new = node.graph.call_module(path, (given["input"],))
    new.meta |= {"site": path, "value": node.meta.get("value")}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    _keep_norm_from_transposes(new)
    return None


def _keep_norm_from_transposes(node: fx.Node) -> str | None:
    """Between two Transposes that cancel, ONNX Runtime moves a norm to another axis, where it has no kernel; a
    Reshape, which is free, keeps it from that.
    """
    x, shape, norm = node.args[0], _shape_of(node), module_of(node)
    if shape is None or len(shape) != 4 or not isinstance(norm, nn.LayerNorm):
        return ""
    if op_class(cast(fx.Node, x)) not in ("shape", "cat") or not _turned(node):
        return ""
    graph, path = node.graph, site(node)
    with graph.inserting_before(node):
        flat = graph.call_method("flatten", (x, 1, 2))
    with graph.inserting_after(node):
        back = graph.call_method("unflatten", (node, 1, shape[1:3]))
    flat.meta["site"], back.meta["site"] = f"{path}.flatten", f"{path}.unflatten"
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    node.args = (flat,)
    return None


def _turned(node: fx.Node) -> bool:
    """Whether an operator that reads `node` exchanges its axes."""
    return any(u.target in _TURNS or (u.target is mvit._squeeze and _turned(u)) for u in node.users)


RULES: dict[str, Callable[[fx.Node], str | None]] = {
    "attention": _open_attention,
    "dot_product_attention": _open_dot_product,
    "window_attention": _open_window_attention,
    "relative_positions": _open_relative_positions,
    "shortcut": _open_shortcut,
    "patch_merging": _merge_patches,
    "pad": _drop_empty_pad,
    "mean": _mean_to_pool,
    "einsum": _einsum_to_matmul,
    "layer_norm": _layer_norm_module,
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
