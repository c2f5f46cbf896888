"""Removes unnecessary changes of shape around Linears, which read [rows, channels].

    Linear → reshape → GELU → flatten → Linear   →  Linear → GELU → Linear
    index_select → reshape → flatten → Linear    →  index_select → flatten → Linear

A change of shape that keeps the last axis also keeps the rows and their order.
"""

from __future__ import annotations

from torch import Tensor, fx

from qatkit.graph.nodes import called, op_class

_RESHAPES = frozenset({"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"})
_POINTWISE = frozenset({"gelu", "silu", "relu", "relu6", "leaky_relu", "sigmoid"})


def rows_of(x: fx.Node) -> fx.Node:
    """Returns the earliest node that has the same rows as `x` [..., channels], before needless changes of shape.

    If `x` is a pointwise operator with a single reader, changes of shape before it are skipped too: it is changed in
    place to read the node before them.
    """
    x = _before_reshapes(x)
    if op_class(x) in _POINTWISE and len(x.users) == 1:
        inside = x.all_input_nodes[0]
        x.replace_input_with(inside, _before_reshapes(inside))
    return x


def _before_reshapes(x: fx.Node) -> fx.Node:
    while op_class(x) == "shape" and called(x) in _RESHAPES:
        before = x.all_input_nodes[0]
        values = [node.meta.get("value") for node in (x, before)]
        if any(not isinstance(v, Tensor) or not v.ndim for v in values):
            return x
        if values[0].shape[-1] != values[1].shape[-1]:  # type: ignore[union-attr]
            return x
        x = before
    return x
