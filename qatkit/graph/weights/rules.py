"""Rules that rewrite products with a weight, and lookups in a table, as calls of torch.nn modules.

A rule returns None after it has rewritten its node, the reason if it can't, or "" if it does not apply.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from qatkit.graph.node_arguments import shape_of
from qatkit.graph.nodes import called, module_of, site
from qatkit.graph.weights.contract import Contraction, lower, parse, why_not
from qatkit.graph.weights.operator import Kind, OperatorBuilder
from qatkit.graph.weights.several import take_product
from qatkit.graph.weights.transposed import FUNCTIONS, TYPES, lower_transposed

Rule = Callable[[OperatorBuilder, fx.Node], "str | None"]

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DYNAMIC = "its weight depends on the input, so it stays float"
_UNKNOWN = "the shape of its input is not known without an example"


def rule_of(node: fx.Node) -> Rule | None:
    """Returns the rule for a node; None if there is none for its function."""
    if node.op == "call_module" and type(module_of(node)) in TYPES:
        return lower_transposed
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def _given(node: fx.Node, *names: str) -> dict[str, Any]:
    """Returns the arguments of a call by name, given the parameter names of a built-in function."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _conv(kind: Kind) -> Rule:
    def rule(builder: OperatorBuilder, node: fx.Node) -> str | None:
        given = _given(node, *_CONV)
        weight, bias = given["weight"], given.get("bias")
        if builder.constants.tensor(weight) is None:
            return _DYNAMIC
        if bias is not None and builder.constants.tensor(bias) is None:
            return "its bias depends on the input, so it stays float"
        settings = {key: given[key] for key in _CONV[3:] if key in given}
        _replace(node, builder.call(node, kind, given["input"], weight, bias, **settings))
        return None

    return rule


def _linear(builder: OperatorBuilder, node: fx.Node) -> str | None:
    given = _given(node, "input", "weight", "bias")
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    value = builder.constants.tensor(weight)
    if value is None:
        return _DYNAMIC
    if bias is not None and builder.constants.tensor(bias) is None:
        return "its bias depends on the input, so it stays float"
    if value.ndim != 2:
        return "its weight is not a matrix, so it stays float"
    _linear_call(builder, node, x, weight, bias)
    return None


def _linear_call(
    builder: OperatorBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None
) -> None:
    """Replaces `node` by a Linear; a constant that is added right after it becomes its bias."""
    last = node
    if bias is None:
        last, bias = _added(builder, node, len(builder.constants.value(weight)))
    _replace(last, builder.call(node, nn.Linear, x, weight, bias))


def _added(builder: OperatorBuilder, node: fx.Node, outputs: int) -> tuple[fx.Node, fx.Node | None]:
    """Returns the Add of a bias [outputs] after `node`, and the bias.

    Returns `node` and None if its only reader is not such an Add.
    """
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or called(user) not in ("add", "add_", "iadd") or user.kwargs or len(user.args) != 2:
        return node, None
    other = user.args[0] if user.args[1] is node else user.args[1]
    value = builder.constants.tensor(other)
    if value is None or value.numel() != outputs or value.ndim == 0 or value.shape[-1] != outputs:
        return node, None
    shape = shape_of(node)
    if value.ndim > 1 and (shape is None or value.ndim > len(shape)):
        return node, None
    assert isinstance(other, fx.Node)
    return user, other if value.ndim == 1 else builder.constants.add(user, "reshape", other, outputs)


def _matmul(builder: OperatorBuilder, node: fx.Node) -> str | None:
    a, b = (*node.args, *node.kwargs.values())[:2]
    return _product(builder, node, a, b)


def _product(builder: OperatorBuilder, node: fx.Node, a: Any, b: Any) -> str | None:
    left, right = builder.constants.tensor(a), builder.constants.tensor(b)
    if right is not None and right.ndim == 2 and isinstance(a, fx.Node):
        _linear_call(builder, node, a, builder.constants.add(node, "t", b))
        return None
    value = right if left is None else left
    if value is None:
        return ""  # a product of two activations
    x, weight = (b, a) if right is None else (a, b)
    shape = shape_of(x)
    if shape is None:
        return _UNKNOWN
    letters = _batched(shape, tuple(value.shape), weight_first=right is None)
    if isinstance(letters, str):
        return letters
    kept = [size for size, letter in zip(value.shape, letters[1], strict=True) if letter != "1"]
    weight = builder.constants.add(node, "reshape", weight, *kept)
    for axis in reversed([i for i, letter in enumerate(letters[0]) if letter == "1"]):
        with node.graph.inserting_before(node):
            x = node.graph.call_method("squeeze", (x, axis))
        x.meta = {
            "site": f"{site(node)}.squeeze",
            "value": cast(fx.Node, x.args[0]).meta["value"].squeeze(axis),
        }
    return _contract(builder, node, x, weight, *(text.replace("1", "") for text in letters))


def _batched(
    shape: tuple[int, ...], weight: tuple[int, ...], *, weight_first: bool
) -> tuple[str, str, str] | str:
    """Returns the letters of x, the weight and the result of a matmul as in einsum, or the reason if it stays float.

    The letter of an axis that is broadcast to the other operand is "1".
    """
    if len(shape) < 2 or len(weight) < 1 or (len(weight) == 1 and weight_first):
        return "one of its operands is a vector, so it stays float"
    batch = string.ascii_lowercase[: max(len(shape), len(weight)) - 2]
    in_x = batch[len(batch) - (len(shape) - 2) :]
    in_weight = batch[len(batch) - max(len(weight) - 2, 0) :] if len(weight) > 2 else ""
    sizes = dict(zip(in_x, shape, strict=False))
    marked = ""
    for letter, size in zip(in_weight, weight, strict=False):
        marked += "1" if size == 1 and letter in sizes else letter
        if sizes.get(letter, size) == 1 != size:
            in_x = in_x.replace(letter, "1")
    if weight_first:
        return f"{in_x}YZ", f"{marked}XY", f"{batch}XZ"
    if len(weight) == 1:
        return f"{in_x}XY", "Y", f"{in_x}X"
    return f"{in_x}XY", f"{marked}YZ", f"{batch}XZ"


def _einsum(builder: OperatorBuilder, node: fx.Node) -> str | None:
    if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)):
        operands = list(node.args[1])
    else:
        operands = list(node.args[1:])
    values = [builder.constants.tensor(o) for o in operands]
    if len(operands) > 2 and any(v is not None for v in values):
        inner = take_product(builder, node, operands)
        return (
            "it multiplies more than two tensors, so it stays float"
            if inner is None
            else _einsum(builder, inner)
        )
    if len(operands) != 2 or all(v is None for v in values):
        return ""
    weight = 1 if values[1] is not None else 0
    x_shape, value = shape_of(operands[1 - weight]), values[weight]
    assert value is not None
    ranks = [None if x_shape is None else len(x_shape)] * 2
    ranks[weight] = value.ndim
    letters = parse(str(node.args[0]), ranks)
    if letters is None:
        return f"its equation {node.args[0]!r} is not supported with a weight, so it stays float"
    x, w = operands[1 - weight], operands[weight]
    return _contract(builder, node, x, w, letters[1 - weight], letters[weight], letters[2])


def _tensordot(builder: OperatorBuilder, node: fx.Node) -> str | None:
    given = _given(node, "a", "b", "dims")
    a, b, dims = given["a"], given["b"], given.get("dims", 2)
    value, shape = builder.constants.tensor(b), shape_of(a)
    if value is None or shape is None:
        return "" if value is None else _UNKNOWN
    if isinstance(dims, int):
        dims = (list(range(len(shape) - dims, len(shape))), list(range(dims)))
    x = string.ascii_lowercase[: len(shape)]
    w = list(string.ascii_uppercase[: value.ndim])
    for i, j in zip(*dims, strict=True):
        w[j] = x[i]
    result = "".join(c for c in (*x, *w) if (c in x) != (c in w))
    return _contract(builder, node, a, b, x, "".join(w), result)


def _contract(
    builder: OperatorBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    x_axes: str,
    weight_axes: str,
    result: str,
) -> str | None:
    value, shape = builder.constants.value(weight), shape_of(x)
    sizes = dict(zip(x_axes, shape or (), strict=False)) | dict(zip(weight_axes, value.shape, strict=True))
    if shape is not None and any(sizes[c] != size for c, size in zip(x_axes, shape, strict=True)):
        return "its input is repeated along an axis of the weight, so it stays float"
    product = Contraction(x_axes, weight_axes, result, sizes)
    reason = why_not(product)
    if reason is not None:
        return reason and f"{reason}, so it stays float"
    if len(product.x) - len(product.groups + product.summed) > 2 and shape is None and product.groups:
        return _UNKNOWN
    _replace(node, lower(builder, node, x, weight, product))
    return None


def _embedding(builder: OperatorBuilder, node: fx.Node) -> str | None:
    """Rewrites a lookup in a table that is a parameter as an Embedding."""
    given = _given(node, "input", "weight", "padding_idx", "max_norm")
    table, rows = builder.constants.tensor(given["weight"]), given["input"]
    if table is None or given.get("max_norm") is not None:
        return _DYNAMIC if table is None else "it changes its table (max_norm), so it stays float"
    source = builder.constants.source(given["weight"])
    if source.program is not None or not isinstance(source.value, nn.Parameter):
        return "its table is computed, so it stays float"
    module = nn.Embedding(table.shape[0], table.shape[1], device="meta")
    module.padding_idx = given.get("padding_idx")
    module.weight = source.value
    _replace(node, builder.hang(node, module, rows, given["weight"]))
    return None


def _addmm(builder: OperatorBuilder, node: fx.Node) -> str | None:
    """Rewrites beta · input + alpha · a @ b as a product and, unless `input` becomes its bias, an Add."""
    given = _given(node, "input", "mat1", "mat2")
    a, b = (given.get(f"mat{i}", given.get(f"batch{i}")) for i in (1, 2))
    if builder.constants.tensor(a) is None and builder.constants.tensor(b) is None:
        return ""
    alpha, beta, added = given.get("alpha", 1), given.get("beta", 1), given["input"]
    product = torch.matmul
    weight_second = builder.constants.tensor(b) is not None
    if alpha != 1:
        a, b = (
            (a, builder.constants.add(node, "mul", b, alpha))
            if weight_second
            else (builder.constants.add(node, "mul", a, alpha), b)
        )
    graph, meta = node.graph, node.meta
    with graph.inserting_before(node):
        inner = graph.call_function(product, (a, b))
        inner.meta = {**meta, "site": site(node)}
    if beta != 1:
        added = _times(builder, node, added, beta)
    with graph.inserting_before(node):
        total = graph.call_function(operator.add, (inner, added))
    total.meta = {**meta, "site": f"{site(node)}.add"}
    _replace(node, total)
    return _product(builder, inner, a, b)


def _times(builder: OperatorBuilder, node: fx.Node, value: fx.Node, factor: float) -> fx.Node:
    if value in builder.constants:
        return builder.constants.add(node, "mul", value, factor)
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator.mul, (value, factor))
    new.meta["site"] = f"{site(node)}.mul"
    return new


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta.setdefault("value", node.meta.get("value"))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


_FUNCTIONS: dict[Any, Rule] = {
    F.conv1d: _conv(nn.Conv1d),
    F.conv2d: _conv(nn.Conv2d),
    F.conv3d: _conv(nn.Conv3d),
    F.linear: _linear,
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.addmm: _addmm,
    torch.baddbmm: _addmm,
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    torch.tensordot: _tensordot,
    F.embedding: _embedding,
    torch.embedding: _embedding,
    **dict.fromkeys(FUNCTIONS, lower_transposed),
}
_METHODS: dict[str, Rule] = {
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
}
