"""Rules that rewrite complex arithmetic as arithmetic on real and imaginary parts.

They cover sums, products, quotients, powers and functions such as exp. A rule adds nodes that compute the
result of a call, and returns them: a pair if the result is complex, else one node. It returns None if it does
not support the call.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from qatkit.graph.capture.complex_writer import Pair, PairWriter

Found = Pair | fx.Node | None  # None: the rule does not support this call
Rule = Callable[[PairWriter, fx.Node], Found]

_POWERS = 8  # the largest exponent for which a power is written as products


def operands(node: fx.Node, count: int) -> list[Any] | None:
    """Returns the arguments of a call; None if it has keywords or not exactly `count` arguments."""
    return list(node.args) if len(node.args) == count and not node.kwargs else None


def turned(w: PairWriter, length: Any, angle: fx.Node) -> Pair:
    """Returns the complex numbers with these absolute values and angles (in radians)."""
    return Pair(*(_times(w, length, w.call(turn, angle)) for turn in (torch.cos, torch.sin)))


def length(w: PairWriter, z: Any) -> fx.Node:
    """Returns the absolute value of `z`."""
    both = w.call(torch.stack, list(w.nodes(z)), -1)
    return w.call(torch.linalg.vector_norm, both, dim=-1)  # its gradient at 0 is 0


def negative(w: PairWriter, part: Any) -> Any:
    """Returns a real or imaginary part with the opposite sign."""
    return w.call(operator.neg, part) if isinstance(part, fx.Node) else -part


def _times(w: PairWriter, a: Any, b: Any) -> Any:
    """Returns the product of two parts; no node is added where one of them is the number 0 or 1."""
    for one, other in ((a, b), (b, a)):
        if not isinstance(one, fx.Node) and one in (0, 1):
            return other if one == 1 else 0.0
    return w.call(operator.mul, a, b) if isinstance(a, fx.Node) or isinstance(b, fx.Node) else a * b


def _plus(w: PairWriter, a: Any, b: Any, function: Any = operator.add) -> Any:
    """Returns the sum (or difference) of two parts of one shape; no node is added where one of them is 0."""
    if not isinstance(b, fx.Node) and b == 0:
        return a
    if not isinstance(a, fx.Node) and a == 0:
        return b if function is operator.add else negative(w, b)
    return w.call(function, a, b) if isinstance(a, fx.Node) or isinstance(b, fx.Node) else function(a, b)


def sum_of(function: Any) -> Rule:
    """Returns the rule for a sum (`operator.add`) or a difference (`operator.sub`)."""

    def rule(w: PairWriter, node: fx.Node) -> Found:
        given = operands(node, 2)
        if given is None:
            return None
        made = []
        for a, b in zip(*map(w.parts, given), strict=True):
            without = [one for one, part in zip(given, (a, b), strict=True) if not isinstance(part, fx.Node)]
            having = [one for one, part in zip(given, (a, b), strict=True) if isinstance(part, fx.Node)]
            shaped = w.parts(without[0]) if len(without) == 1 else ()
            other = next((part for part in shaped if isinstance(part, fx.Node)), None)
            if other is not None and having[0].meta.get("shape") != node.meta.get("shape"):
                # The part that exists is smaller than the result: zeros of the other operand's shape broadcast it.
                zeros = w.call(torch.zeros_like, other)
                whole = (part if isinstance(part, fx.Node) else zeros for part in (a, b))
                made.append(w.call(function, *whole))
            else:
                made.append(_plus(w, a, b, function))
        return Pair(*made)

    return rule


def _product(w: PairWriter, given: Sequence[Any], call: Callable[[list[Any]], Any]) -> Pair:
    """Returns the result of a function that is linear in each operand.

    It is called for every combination of the operands' parts, and the results are added up with i·i = -1.

    Args:
        w: the writer of the new nodes.
        given: the operands.
        call: the function for real operands.
    """
    turning = [place for place, one in enumerate(given) if w.is_complex(one)]
    sums: list[Any] = [0.0, 0.0]
    for choice in itertools.product((0, 1), repeat=len(turning)):
        chosen = list(given)
        for place, which in zip(turning, choice, strict=True):
            chosen[place] = w.parts(given[place])[which]
        if any(not isinstance(chosen[place], fx.Node) and chosen[place] == 0 for place in turning):
            continue
        power = sum(choice)
        sign = operator.sub if power % 4 > 1 else operator.add
        sums[power % 2] = _plus(w, sums[power % 2], call(chosen), sign)
    return Pair(*sums)


def multiplied(w: PairWriter, node: fx.Node) -> Found:
    """Returns the elementwise product."""
    given = operands(node, 2)
    return None if given is None else _product(w, given, lambda parts: _times(w, *parts))


def matrices(w: PairWriter, node: fx.Node) -> Found:
    """Returns the product of matrices or vectors."""
    given = operands(node, 2)
    return None if given is None else _product(w, given, lambda parts: w.like(node, tuple(parts), {}))


def einsum(w: PairWriter, node: fx.Node) -> Found:
    """Returns the einsum of any number of operands."""
    equation, *given = node.args
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    if not isinstance(equation, str) or node.kwargs:
        return None
    return _product(w, given, lambda parts: w.like(node, (equation, *parts), {}))


def _square(w: PairWriter, z: Any) -> Any:
    """Returns the squared absolute value."""
    return _plus(w, *(_times(w, part, part) for part in w.parts(z)))


def divided(w: PairWriter, node: fx.Node) -> Found:
    """Returns the quotient: z · conj(divisor) / |divisor|²."""
    given = operands(node, 2)
    if given is None:
        return None
    z, by = given
    if isinstance(by, complex):
        return _pair_product(w, w.parts(z), w.parts(1 / by))
    if not w.is_complex(by):
        return _over(w, w.parts(z), by)
    re, im = _pair_product(w, w.parts(z), Pair(w.parts(by).re, negative(w, w.parts(by).im)))
    return _over(w, Pair(re, im), _square(w, by))


def _over(w: PairWriter, z: Pair, size: Any) -> Pair:
    """Returns complex numbers divided by real ones."""
    return Pair(*(w.call(operator.truediv, p, size) if isinstance(p, fx.Node) or p else p for p in z))


def _pair_product(w: PairWriter, a: Pair, b: Pair) -> Pair:
    re = _plus(w, _times(w, a.re, b.re), _times(w, a.im, b.im), operator.sub)
    return Pair(re, _plus(w, _times(w, a.re, b.im), _times(w, a.im, b.re)))


def inverse(w: PairWriter, node: fx.Node) -> Found:
    """Returns the reciprocal."""
    re, im = w.parts(node.args[0])
    return _over(w, Pair(re, negative(w, im)), _square(w, node.args[0]))


def sign(w: PairWriter, node: fx.Node) -> Found:
    """Returns each number divided by its absolute value; 0 for 0."""
    size = w.call(torch.clamp, length(w, node.args[0]), min=torch.finfo(torch.float32).tiny)
    return _over(w, w.parts(node.args[0]), size)


def exponential(w: PairWriter, node: fx.Node) -> Found:
    """Returns the exponential: its absolute value is exp(re), its angle is im."""
    re, im = w.parts(node.args[0])
    if not isinstance(im, fx.Node):
        return None
    return turned(w, w.call(torch.exp, re) if isinstance(re, fx.Node) else math.exp(re), im)


def logarithm(w: PairWriter, node: fx.Node) -> Found:
    """Returns the natural logarithm: its real part is log|z|, its imaginary part is the angle of z."""
    re, im = w.nodes(node.args[0])
    return Pair(w.call(torch.log, length(w, node.args[0])), w.call(torch.atan2, im, re))


def power(w: PairWriter, node: fx.Node) -> Found:
    """Returns the power.

    It is a product for integer exponents from 1 to 8. Otherwise the absolute value is raised to the exponent, and
    the angle is multiplied by the exponent. Returns None for an exponent that is a tensor or complex.
    """
    given = operands(node, 2)
    if given is None or not isinstance(given[1], (int, float)):
        return None
    z, power = given
    found = w.parts(z)
    if isinstance(power, int) and 1 <= power <= _POWERS:
        for _ in range(power - 1):
            found = _pair_product(w, found, w.parts(z))
        return found
    return _rooted(w, z, power)


def _rooted(w: PairWriter, z: Any, power: float) -> Pair:
    re, im = w.nodes(z)
    angle = w.call(operator.mul, w.call(torch.atan2, im, re), power)
    return turned(w, w.call(torch.pow, length(w, z), power), angle)


def squared(w: PairWriter, node: fx.Node) -> Found:
    """Returns the square."""
    z = w.parts(node.args[0])
    return _pair_product(w, z, z)


def root(w: PairWriter, node: fx.Node) -> Found:
    """Returns the square root."""
    return _rooted(w, node.args[0], 0.5)
