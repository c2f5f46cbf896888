"""Stub: opens modules and functions that hide arithmetic, so that quantization reaches inside.

A rule returns None after it has rewritten its node, the reason if it can't, or "" if it does not apply. The
results of the new operators equal those of the originals to 1e-5, and parameters stay the same.

    MultiheadAttention(x, x, x)  →  qkv Linear, MatMul, Softmax, MatMul, out_proj Linear
    scaled_dot_product_attention →  MatMul, Softmax, MatMul
    shifted_window_attention(x)  →  the same for the windows of Swin, V1, V2 and 3-D
    relative positions of MViT   →  MatMuls with tables, a Pad and an Add
    shortcut of MViT, in place   →  Add
    hardswish(x)                 →  x · hardsigmoid(x)
    silu(x), where selected      →  x · sigmoid(x)
    x.mean((2, 3))               →  global average pool, flatten
    einsum("…ID,…JD->…IJ", a, b) →  MatMul (and "…IJ,…JD->…ID")
    F.layer_norm(x, …, γ, β)     →  LayerNorm
    patch merging of Swin        →  one reshape, permute, reshape
    F.pad(x, (0, 0, …))          →  x
    relu(relu(x))                →  relu(x)
    x + 0, sum([x]), x * 1       →  x

Rules that need the size of a tensor take it from the example.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.attention.rules import (
    open_attention,
    open_dot_product,
    open_relative_positions,
    open_shortcut,
    open_window_attention,
)
from qatkit.graph.node_arguments import arguments, has_free_axes, known, parameter_of, shape_of
from qatkit.graph.nodes import called, module_of, op_class, site, turns_axes
from qatkit.graph.pass_result import PassResult
from qatkit.graph.selectors import IN_INT8, matched
from qatkit.graph.signature import Example
from qatkit.graph.trace import propagate, tidy, trace


def stub(model: nn.Module, example: Example, silu_in_int8: Iterable[str] = ()) -> PassResult:
    """Applies every rule to every node; records the graph of `model` first if it is not a graph yet.

    Args:
        model: the float model, or its graph.
        example: an example input with the real shapes, such as an image [N, C, H, W].
        silu_in_int8: patterns (`qatkit.graph.selectors`) of SiLUs that become a Sigmoid and a Mul, which have int8
            kernels; other SiLUs stay one float operator.

    Raises:
        ConfigError: a pattern matches no SiLU, or the graph can't be recorded.
    """
    graph_module = trace(model, example)
    propagate(graph_module, example)
    result = PassResult(graph_module)
    chosen = {pattern: matched(graph_module.graph, pattern, "silu") for pattern in silu_in_int8}
    graph_module.meta[IN_INT8] = {pattern: [site(n) for n in nodes] for pattern, nodes in chosen.items()}
    gated = {node for nodes in chosen.values() for node in nodes}
    for node in list(graph_module.graph.nodes):
        rule = _open_gated(torch.sigmoid) if node in gated else RULES.get(op_class(node))
        if rule is None:
            continue
        reason = rule(node)
        if reason is None:
            result.changed += 1
        elif reason:
            result.skipped.append((site(node), reason))
    tidy(graph_module)
    return result


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


def _merge_patches(node: fx.Node) -> str | None:
    """Rewrites the merging of every second row and column into channels.

    Four strided slices and a Cat become one reshape, permute and reshape.
    """
    shape = shape_of(node.args[0])
    if shape is None or len(shape) < 4 or shape[-3] % 2 or shape[-2] % 2 or has_free_axes(node):
        return ""
    *before, rows, columns, channels = shape[1:]
    axis = len(before) + 1  # the axis of the rows, after the frames of a clip
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
    """Removes a padding whose amounts are 0 for the example, such as that of clips to a multiple of the patch size."""
    given = arguments(node, F.pad)
    computed = has_free_axes(node) and any(isinstance(amount, fx.Node) for amount in given["pad"])
    if not node.all_input_nodes or computed or any(known(amount) != 0 for amount in given["pad"]):
        return ""
    node.replace_all_uses_with(given["input"])
    node.graph.erase_node(node)
    return None


def _drop_second_clamp(node: fx.Node) -> str | None:
    """Merges relu(relu(x)), relu(relu6(x)) and relu6(relu(x)) into one clamp, which a quantized range can replace."""
    before = node.all_input_nodes[0]
    if op_class(before) not in ("relu", "relu6"):
        return ""
    if op_class(node) == "relu" or op_class(before) == "relu6":
        node.replace_all_uses_with(before)
        node.graph.erase_node(node)
    else:
        node.replace_input_with(before, before.all_input_nodes[0])
    return None


def _drop_neutral(number: int) -> Callable[[fx.Node], str | None]:
    """Returns a rule that removes an Add or Mul whose other operand is `number`, 0 or 1, so that it changes nothing.

    Python's `sum` starts with such an Add of 0.
    """

    def rule(node: fx.Node) -> str | None:
        values = [arg for arg in node.args if not (isinstance(arg, int | float) and arg == number)]
        if len(node.args) != 2 or len(values) != 1 or node.kwargs or not isinstance(values[0], fx.Node):
            return ""
        before, after = values[0].meta.get("value"), node.meta.get("value")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.dtype != after.dtype:
            return ""
        node.replace_all_uses_with(values[0])
        node.graph.erase_node(node)
        return None

    return rule


def _mean_to_pool(node: fx.Node) -> str | None:
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    shape, axes = shape_of(given["input"]), given.get("dim")
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
    """Turns a LayerNorm called as a function into a module, which the exporter can name and translate."""
    if node.op != "call_function":
        return _keep_norm_from_transposes(node)
    given = arguments(node, F.layer_norm)
    weight, bias = parameter_of(given["weight"]), parameter_of(given["bias"])
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
    beside = [n for n in node.graph.nodes if n.op == "get_attr" and str(n.target).rpartition(".")[0] == path]
    if any(user is not node for read in beside for user in read.users):
        return ""  # other nodes read tensors of the module that it would replace
    owner.set_submodule(path, norm)
    with node.graph.inserting_before(node):
        new = node.graph.call_module(path, (given["input"],))
    new.meta |= {"site": path, "value": node.meta.get("value")}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    _keep_norm_from_transposes(new)
    return None


def _keep_norm_from_transposes(node: fx.Node) -> str | None:
    """Inserts Reshapes, which are free, before and after a norm that follows a Transpose.

    If another Transpose cancels the first one, ONNX Runtime would otherwise move the norm to another axis,
    where it has no kernel.
    """
    x, shape, norm = node.args[0], shape_of(node), module_of(node)
    if shape is None or not isinstance(norm, nn.LayerNorm) or not isinstance(x, fx.Node):
        return ""
    if len(norm.normalized_shape) > 1:  # ONNX Runtime does not move such a norm
        return ""
    images = len(shape) == 4 and op_class(x) in ("shape", "cat") and _turned(node)
    if images and has_free_axes(node):
        return ""
    if not images and (len(shape) < 3 or not _behind_a_turn(x)):
        return ""
    graph, path = node.graph, site(node)
    with graph.inserting_before(node):
        flat = graph.call_method(
            *(("flatten", (x, 1, 2)) if images else ("unflatten", (x, -1, (1, shape[-1]))))
        )
    with graph.inserting_after(node):
        back = graph.call_method(
            *(("unflatten", (node, 1, shape[1:3])) if images else ("flatten", (node, -2, -1)))
        )
    flat.meta["site"], back.meta["site"] = f"{path}.flatten", f"{path}.unflatten"
    value = node.meta["value"]  # later rules need shapes
    back.meta["value"] = value
    flat.meta["value"] = node.meta["value"] = (
        value.flatten(1, 2) if images else value.unflatten(-1, (1, shape[-1]))
    )
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    node.args = (flat,)
    return None


def _is_turn(x: fx.Node) -> bool:
    while op_class(x) == "pass":
        x = x.all_input_nodes[0]
    return op_class(x) == "shape" and turns_axes(x)


def _behind_a_turn(x: fx.Node) -> bool:
    """Returns whether `x` is an exchange of axes, followed only by shape changes, concatenations and no-ops.

    Also true if `x` is the sum of a tensor and an exchange of axes, as in mixers of tokens.
    """
    if op_class(x) == "shape" and turns_axes(x):
        return True
    if op_class(x) == "add":
        return any(_is_turn(n) for n in x.all_input_nodes)
    return op_class(x) in ("shape", "pass", "cat") and any(map(_behind_a_turn, x.all_input_nodes))


def _turned(node: fx.Node) -> bool:
    """Returns whether an operator that reads `node` exchanges its axes."""
    return any(turns_axes(u) or (called(u) == "_squeeze" and _turned(u)) for u in node.users)


RULES: dict[str, Callable[[fx.Node], str | None]] = {
    "attention": open_attention,
    "dot_product_attention": open_dot_product,
    "window_attention": open_window_attention,
    "relative_positions": open_relative_positions,
    "shortcut": open_shortcut,
    "patch_merging": _merge_patches,
    "pad": _drop_empty_pad,
    "mean": _mean_to_pool,
    "einsum": _einsum_to_matmul,
    "layer_norm": _layer_norm_module,
    "hardswish": _open_gated(F.hardsigmoid),
    "relu": _drop_second_clamp,
    "relu6": _drop_second_clamp,
    "add": _drop_neutral(0),
    "mul": _drop_neutral(1),
}
