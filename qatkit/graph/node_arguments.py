"""Arguments, shapes and parameters of a graph's nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx

# Keys in a node's meta: the axis of its output that is the batch, if it may not be the first, and all axes whose size
# depends on free axes of the inputs (`qatkit.graph.capture.free_axes`).
BATCH_AXIS = "batch_axis"
VARYING_AXES = "varying_axes"


def has_free_axes(node: fx.Node) -> bool:
    """Returns whether the graph of a node accepts other sizes than the example's along axes other than the batch."""
    return bool(getattr(node.graph.owning_module, "meta", {}).get("free_axes"))


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Returns the shape of a node's tensor for the example; None if it has no tensor or was not propagated."""
    value = node.meta.get("value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def arguments(node: fx.Node, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments with which a node calls a Python function, by name and including defaults."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def known(value: Any) -> Any:
    """Returns the value of a computed size (a number or list) for the example; returns anything else unchanged."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return value if found is None or isinstance(found, Tensor) else found


def parameter_of(node: Any) -> Any:
    """Returns the parameter or buffer that a get_attr node reads; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    return getattr(cast(fx.GraphModule, node.graph.owning_module).get_submodule(owner), name)
