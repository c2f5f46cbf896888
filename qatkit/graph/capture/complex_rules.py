"""Rules that write torch's functions of complex numbers as functions of their real and imaginary parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx

from qatkit.graph.capture import complex_arithmetic as arithmetic
from qatkit.graph.capture.complex_arithmetic import Found, Rule, length, negative, operands, turned
from qatkit.graph.capture.complex_writer import Pair, PairWriter

# Functions that act on each part in the same way as on real numbers.
_BY_PART = (
    "T", "alias", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "chunk", "clone", "contiguous", "cumsum",
    "detach", "diag", "diagonal", "diff", "expand", "expand_as", "flatten", "flip", "fliplr", "flipud", "gather",
    "getitem", "index_select", "mT", "mean", "moveaxis", "movedim", "narrow", "neg", "negative", "permute", "pos",
    "positive", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as", "resolve_neg", "roll", "rot90",
    "select", "split", "split_with_sizes", "squeeze", "sum", "swapaxes", "swapdims", "t", "take_along_dim",
    "tensor_split", "tile", "transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
)  # fmt: skip


_COMPLEX_METHODS = {"cfloat": torch.float32, "cdouble": torch.float64, "chalf": torch.float16}


def rule_of(node: fx.Node) -> Rule | None:
    """Returns the rule that rewrites `node` with real numbers; None if there is none."""
    if node.op not in ("call_function", "call_method"):
        return None
    return _RULES.get(str(node.args[1]) if node.target is getattr else _name(node))


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _by_part(w: PairWriter, node: fx.Node) -> Found:
    return w.by_part(node)


def _joined(w: PairWriter, node: fx.Node) -> Found:
    """Rewrites cat and stack of complex and real tensors."""
    if not isinstance(node.args[0], (list, tuple)):
        return None
    pieces = zip(*(w.nodes(one) for one in node.args[0]), strict=True)
    re, im = (w.like(node, (list(parts), *node.args[1:]), dict(node.kwargs)) for parts in pieces)
    return Pair(re, im)


def _chosen(w: PairWriter, node: fx.Node) -> Found:
    """Rewrites `torch.where(mask, z, w)`, `z.where(mask, w)` and `z.masked_fill(mask, w)`."""
    given = operands(node, 3)
    if given is None:
        return None
    first = 1 if node.target is torch.where else 0
    both: list[fx.Node] = []
    for which in (0, 1):
        args = list(given)
        z = given[first]
        args[first] = w.nodes(z)[which] if isinstance(z, fx.Node) else w.parts(z)[which]
        args[2] = w.parts(given[2])[which]
        both.append(w.like(node, tuple(args), {}))
    return Pair(*both)


def _typed(w: PairWriter, node: fx.Node) -> Found:
    """Rewrites a call that may change the type or the device."""
    kind = _COMPLEX_METHODS.get(_name(node))
    if kind is not None:
        return Pair(*(_method(w, "to", part, kind) for part in w.nodes(node.args[0])))
    re, im = w.by_part(node)
    if not node.meta.get("complex"):
        return cast(fx.Node, re)
    return Pair(re, im if w.is_complex(node.args[0]) else 0.0)


def _made(w: PairWriter, node: fx.Node) -> Found:
    """Rewrites calls that make complex tensors of zeros or ones."""
    return Pair(w.by_part(node).re, 0.0) if node.meta.get("complex") else None


def _from_pairs(w: PairWriter, node: fx.Node) -> Found:
    return Pair(*(w.call(operator.getitem, node.args[0], (Ellipsis, i)) for i in (0, 1)))


def _complex(w: PairWriter, node: fx.Node) -> Found:
    given = operands(node, 2)
    return None if given is None else Pair(*given)


def _polar(w: PairWriter, node: fx.Node) -> Found:
    given = operands(node, 2)
    return None if given is None else turned(w, *given)


def _method(w: PairWriter, method: str, *args: Any) -> fx.Node:
    return w.marked(w.graph.call_method(method, args))


def _real(w: PairWriter, node: fx.Node) -> Found:
    return w.nodes(node.args[0])[0]


def _imaginary(w: PairWriter, node: fx.Node) -> Found:
    return w.nodes(node.args[0])[1]


def _to_pairs(w: PairWriter, node: fx.Node) -> Found:
    return w.call(torch.stack, list(w.nodes(node.args[0])), -1)


def _absolute(w: PairWriter, node: fx.Node) -> Found:
    return length(w, node.args[0])


def _angle(w: PairWriter, node: fx.Node) -> Found:
    re, im = w.nodes(node.args[0])
    return w.call(torch.atan2, im, re)


def _conjugate(w: PairWriter, node: fx.Node) -> Found:
    re, im = w.parts(node.args[0])
    return Pair(re, negative(w, im))


def _adjoint(w: PairWriter, node: fx.Node) -> Found:
    re, im = (_method(w, "transpose", part, -2, -1) for part in w.nodes(node.args[0]))
    return Pair(re, negative(w, im))


def _same(w: PairWriter, node: fx.Node) -> Found:
    return w.parts(node.args[0])


def _by_name(rule: Rule, *names: str) -> Iterable[tuple[str, Rule]]:
    return ((name, rule) for name in names)


_RULES: dict[str, Rule] = dict(
    (
        *_by_name(_by_part, *_BY_PART),
        *_by_name(_joined, "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
        *_by_name(_chosen, "where", "masked_fill"),
        *_by_name(_typed, "to", "type", "type_as", "cfloat", "cdouble", "chalf", "float", "double", "half", "cpu"),
        *_by_name(_made, "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones"),
        *_by_name(_from_pairs, "view_as_complex"),
        *_by_name(_complex, "complex"),
        *_by_name(_polar, "polar"),
        *_by_name(_real, "real"),
        *_by_name(_imaginary, "imag"),
        *_by_name(_to_pairs, "view_as_real"),
        *_by_name(_absolute, "abs", "absolute"),
        *_by_name(_angle, "angle"),
        *_by_name(_conjugate, "conj", "conj_physical"),
        *_by_name(_adjoint, "mH", "H", "adjoint"),
        *_by_name(_same, "resolve_conj"),
        *_by_name(arithmetic.sum_of(operator.add), "add"),
        *_by_name(arithmetic.sum_of(operator.sub), "sub", "subtract"),
        *_by_name(arithmetic.multiplied, "mul", "multiply"),
        *_by_name(arithmetic.matrices, "matmul", "bmm", "mm", "mv", "dot", "outer", "ger", "inner", "kron"),
        *_by_name(arithmetic.einsum, "einsum"),
        *_by_name(arithmetic.divided, "truediv", "div", "divide", "true_divide"),
        *_by_name(arithmetic.inverse, "reciprocal"),
        *_by_name(arithmetic.sign, "sgn"),
        *_by_name(arithmetic.exponential, "exp"),
        *_by_name(arithmetic.logarithm, "log"),
        *_by_name(arithmetic.power, "pow"),
        *_by_name(arithmetic.squared, "square"),
        *_by_name(arithmetic.root, "sqrt"),
    )
)  # fmt: skip
