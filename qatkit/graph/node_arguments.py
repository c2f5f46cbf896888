"""Arguments, shapes and parameters of a graph's nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx

# In a node's meta: which axis of its output is as long as the batch, where that need not be the first; and all axes
# that are of another size where inputs are (`qatkit.graph.capture.free_axes`).
BATCH_AXIS = "batch_axis"
VARYING_AXES = "varying_axes"


def has_free_axes(node: fx.Node) -> bool:
    """Returns whether the graph accepts inputs of other sizes than the example's, in addition to its batch."""
    return bool(getattr(node.graph.owning_module, "meta", {}).get("free_axes"))


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Returns the shape from the example; None for anything but a tensor, or without an example."""
    value = node.meta.get("value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def arguments(node: fx.Node, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a Python function by name, with defaults."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def known(value: Any) -> Any:
    """Returns a computed size as the number or list that the example gave; anything else is returned unchanged."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return value if found is None or isinstance(found, Tensor) else found


def parameter_of(node: Any) -> Any:
    """Returns the parameter that a get_attr node names; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    return getattr(cast(fx.GraphModule, node.graph.owning_module).get_submodule(owner), name)
