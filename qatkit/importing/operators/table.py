"""The table of ONNX operators with their implementations in PyTorch, and the description of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

Array = np.ndarray[Any, Any]
Value = Tensor | Array | None


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph.

    Attributes:
        name: the name in the file; if it has none, its operator and its output.
        op_type, domain: the operator and its domain; the standard domain is "".
        version: the opset of the domain.
        attributes: attributes by name, as Python numbers, strings, lists and NumPy arrays.
        inputs, outputs: names of its tensors; "" for omitted tensors.
        ranks: the ranks of its inputs; None if shape inference does not know them.
        any_batch: whether the module accepts several images per run although the file accepts one.
    """

    name: str
    op_type: str
    domain: str
    version: int
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ranks: tuple[int | None, ...] = ()
    any_batch: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute, or `default` if the node does not have it."""
        return self.attributes.get(name, default)

    @property
    def operator(self) -> str:
        """The operator, with its domain if it is not the standard one: Conv, com.microsoft.Gelu."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


class UnsupportedError(Exception):
    """Raised for a node without a PyTorch equivalent; the message is a clause that follows the node's name."""


Function = Callable[..., Any]
# Receives the node and the constant of each input (None: computed); returns None if the function must compute the node.
Builder = Callable[[Node, Sequence[Array | None]], nn.Module | None]

_FUNCTIONS: dict[tuple[str, str], Function] = {}
_KNOWN: dict[str, tuple[int, ...]] = {}
_REFUSES: dict[tuple[str, str], Callable[[Node], str]] = {}
_MODULES: dict[tuple[str, str], Builder] = {}


def function(
    *names: str,
    domain: str = "",
    known: tuple[int, ...] = (),
    refuses: Callable[[Node], str] | None = None,
) -> Callable[[Function], Function]:
    """Registers a function that computes an operator from the node and a value per input.

    Args:
        names: the operators.
        domain: their domain.
        known: indices of inputs, such as sizes and axes, that must not depend on values of the model's inputs.
        refuses: a function that returns why a node of the operator has no PyTorch equivalent, or "" if it has
            one.
    """

    def registered(made: Function) -> Function:
        for name in names:
            _FUNCTIONS[domain, name] = made
            if known:
                _KNOWN[name] = known
            if refuses is not None:
                _REFUSES[domain, name] = refuses
        return made

    return registered


def module(*names: str, domain: str = "") -> Callable[[Builder], Builder]:
    """Registers a function that builds the module of an operator with constant weights.

    The function is called with the node and the constant of each input (None: computed). It returns None if the
    function registered by `function` must compute the node.
    """

    def registered(made: Builder) -> Builder:
        for name in names:
            _MODULES[domain, name] = made
        return made

    return registered


def function_of(node: Node) -> Function:
    """Returns the function of a node's operator.

    Raises:
        UnsupportedError: the table has no such function, or the function does not support the node.
    """
    key = node.domain, node.op_type
    found, refuses = _FUNCTIONS.get(key), _REFUSES.get(key)
    if found is None:
        raise UnsupportedError(f"the operator {node.operator} has no PyTorch equivalent")
    if refuses is not None and (reason := refuses(node)):
        raise UnsupportedError(reason)
    return found


def known_places(operator: str) -> tuple[int, ...]:
    """Returns `known` (see `function`) of an operator of the standard domain; () if it has none."""
    return _KNOWN.get(operator, ())


def module_of(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns the module of a node with constant weights; None if its function must compute the node.

    Raises:
        UnsupportedError: the operator's builder does not support the node.
    """
    build = _MODULES.get((node.domain, node.op_type))
    return None if build is None else build(node, constants)
