"""Sizes that record how they are computed, so that a graph can compute them for inputs of other sizes.

    h, w = x.shape[2:]            h is the number 64, and size(x, 2)
    F.interpolate(y, (2 * h, w))  records (mul(size(x, 2), 2), size(x, 3))

In every other respect they are Python's own numbers. A comparison or a loop uses the value in the run. Functions
without support for traced sizes (`int(h * 0.5)`) return plain numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

Expression = tuple[Any, ...]  # (function, *arguments: numbers or expressions), or ("size", node, axis)


class TracedSize(int):
    """An integer that is computed from sizes of tensors.

    Attributes:
        expression: the expression that computes it from sizes of tensors.
    """

    expression: Expression

    def __new__(cls, value: int, expression: Expression) -> TracedSize:
        made = super().__new__(cls, value)
        made.expression = expression
        return made

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Any:
        return _applied(operator.neg, self)

    def __pos__(self) -> TracedSize:
        return self

    def __truediv__(self, other: Any) -> Any:
        return Quotient.of(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return Quotient.of(other, self)


class Quotient(float):
    """The quotient of a size and an integer, in either order; rounded up or down, it is a size again.

    Attributes:
        parts: the dividend and the divisor.
    """

    parts: tuple[Any, Any]

    @classmethod
    def of(cls, above: Any, below: Any) -> Any:
        """Returns above / below, which is a Quotient if both are integers."""
        value = _plain(above) / _plain(below)
        if type(value) is not float or not (_whole(above) and _whole(below)):
            return value
        made = cls(value)
        made.parts = (above, below)
        return made

    @property
    def expression(self) -> Expression:
        """The expression of the division."""
        return operator.truediv, *(getattr(part, "expression", part) for part in self.parts)

    def __ceil__(self) -> Any:
        above, below = self.parts
        return -((-above) // below)

    def __floor__(self) -> Any:
        above, below = self.parts
        return above // below

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, TracedSize) else value


def _applied(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `function` on the plain numbers, as a traced size if it and all numbers are integers.

    Returns NotImplemented on a TypeError, so that Python tries the other operand.
    """
    try:
        value = function(*map(_plain, args))
    except TypeError:
        return NotImplemented
    if type(value) is not int or not all(map(_whole, args)):
        return value
    return TracedSize(value, (function, *(getattr(arg, "expression", arg) for arg in args)))


def _operator(function: Callable[..., Any], *, swapped: bool) -> Callable[[TracedSize, Any], Any]:
    def method(self: TracedSize, other: Any) -> Any:
        return _applied(function, other, self) if swapped else _applied(function, self, other)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(TracedSize, f"__{_name}__", _operator(_function, swapped=False))
    setattr(TracedSize, f"__r{_name}__", _operator(_function, swapped=True))


def traced(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], node: Callable[[Tensor], fx.Node], result: Any
) -> Any:
    """Returns the result of `tensor.shape`, `.size()`, `.size(axis)` or `.numel()`, with each size traced.

    Args:
        name: name of the called method or attribute.
        args, kwargs: arguments of the call, the tensor first.
        node: a function that returns the node of a tensor.
        result: the plain result of the call.
    """
    tensor = args[0]
    with torch._C.DisableTorchFunction():
        shape = tensor.shape
    source = node(tensor)
    sizes = [TracedSize(size, ("size", source, axis)) for axis, size in enumerate(shape)]
    if isinstance(result, torch.Size):
        return torch.Size(sizes)
    if name == "numel":
        product: Any = 1
        for size in sizes:
            product = product * size
        return product
    return sizes[args[1] if len(args) > 1 else kwargs["dim"]]


def emitted(
    value: TracedSize | Quotient, create: Callable[..., fx.Node], known: dict[Expression, fx.Node]
) -> fx.Node:
    """Returns the node that computes a traced number; adds it to the end of the graph if there is none.

    Args:
        value: the traced number.
        create: a function that adds a node: (op, target, args, kwargs) → node.
        known: nodes of expressions that were added before.
    """

    def of(expression: Any) -> Any:
        if not isinstance(expression, tuple):
            return expression
        if expression not in known:
            function, *args = expression
            if function == "size":
                known[expression] = create("call_method", "size", tuple(args), {})
            else:
                known[expression] = create("call_function", function, tuple(map(of, args)), {})
        return known[expression]

    return of(value.expression)  # type: ignore[no-any-return]
