"""Holds the real and imaginary parts of complex nodes, and adds the nodes that compute with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

REAL_TYPES: dict[Any, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class Pair(NamedTuple):
    """The real and the imaginary part of complex numbers, each a node, or a number if all its values are equal."""

    re: Any
    im: Any


class PairWriter:
    """A writer that inserts nodes of real numbers.

    Attributes:
        graph: the graph that gets the nodes.
        pairs: the pair of each complex node; for a node with several results (such as a chunk), two nodes
            that return their real and their imaginary parts.
        place: the node that is being rewritten; new nodes get its module and line.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.pairs: dict[fx.Node, Pair] = {}
        self.place: fx.Node | None = None

    def marked(self, new: fx.Node) -> fx.Node:
        """Marks `new` with the module and the line of the node that is being rewritten; returns it."""
        assert self.place is not None
        known = self.place.meta
        new.meta |= {key: known[key] for key in ("nn_module_stack", "where") if key in known}
        return new

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Returns a node that calls a function."""
        return self.marked(self.graph.call_function(function, args, kwargs))

    def like(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Returns a node that calls what `node` calls, with other arguments."""
        return self.marked(self.graph.create_node(node.op, node.target, args, kwargs))

    def by_part(self, node: fx.Node) -> Pair:
        """Returns two calls of `node`'s function: on the real and on the imaginary parts of its arguments."""
        re, im = (self.like(node, self._of(node.args, i), self._of(node.kwargs, i)) for i in (0, 1))
        return Pair(re, im)

    def _of(self, value: Any, which: int) -> Any:
        if isinstance(value, fx.Node):
            return self.nodes(value)[which] if value in self.pairs else value
        if isinstance(value, (tuple, list)):
            return type(value)(self._of(part, which) for part in value)
        if isinstance(value, dict):
            return {key: self._of(part, which) for key, part in value.items()}
        return REAL_TYPES.get(value, value) if isinstance(value, torch.dtype) else value

    def parts(self, value: Any) -> Pair:
        """Returns the parts of an argument; the imaginary part of real numbers is 0."""
        if isinstance(value, complex):
            return Pair(value.real, value.imag)
        return self.pairs.get(value, Pair(value, 0.0)) if isinstance(value, fx.Node) else Pair(value, 0.0)

    def nodes(self, value: Any) -> tuple[fx.Node, fx.Node]:
        """Returns both parts of a value as nodes, also where a part is a number."""
        re, im = self.parts(value)
        if not isinstance(re, fx.Node):
            return self.call(torch.full_like, im, re), im
        return re, im if isinstance(im, fx.Node) else self.call(torch.full_like, re, im)

    def is_complex(self, value: Any) -> bool:
        """Returns whether an argument is a complex number or a node with complex values."""
        return isinstance(value, complex) or (isinstance(value, fx.Node) and value in self.pairs)
