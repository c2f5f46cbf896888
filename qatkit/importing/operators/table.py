"""The table of operators, and what a node tells of itself."""

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
        name: in the file, or made up of its type and its output where it has none.
        op_type, domain: of its operator; the standard domain is "".
        version: of the operator set of its domain.
        attributes: by name, as Python numbers, strings, lists and NumPy arrays.
        inputs, outputs: names of its tensors; "" for those left out.
        ranks: of its inputs, None where shape inference can't tell.
        any_batch: whether its file takes one image per run, and may be given several.
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
        """Returns an attribute, or `default` where the node does not have it."""
        return self.attributes.get(name, default)

    @property
    def operator(self) -> str:
        """The operator as people write it: Conv, com.microsoft.Gelu."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


class UnsupportedError(Exception):
    """A node that has no form in PyTorch; the message says why, as a clause that follows its name."""


Function = Callable[..., Any]
# Receives the node and, by input, the constant or None; returns None where the function has to compute it.
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
    """Registers what computes an operator: called with the node and a value per input.

    Args:
        known: places of inputs that have to be numbers, whatever the values of the model's inputs: sizes, axes.
        refuses: returns why a node of the operator has no form in PyTorch; "" where it has.
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
    """Registers what builds the module of an operator with constant weights: called with the node and the constant of
    each input, or None. It returns None where the operator's function has to compute it.
    """

    def registered(made: Builder) -> Builder:
        for name in names:
            _MODULES[domain, name] = made
        return made

    return registered


def function_of(node: Node) -> Function:
    """Returns the function of a node's operator.

    Raises:
        UnsupportedError: the table has none, or it does not take the node.
    """
    key = node.domain, node.op_type
    found, refuses = _FUNCTIONS.get(key), _REFUSES.get(key)
    if found is None:
        raise UnsupportedError(f"the operator {node.operator} has no form in PyTorch here")
    if refuses is not None and (reason := refuses(node)):
        raise UnsupportedError(reason)
    return found


def known_places(operator: str) -> tuple[int, ...]:
    """Returns the places of inputs that an operator of the standard domain needs as plain numbers."""
    return _KNOWN.get(operator, ())


def module_of(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns the module of a node with constant weights; None where its function computes it."""
    build = _MODULES.get((node.domain, node.op_type))
    return None if build is None else build(node, constants)
