"""Rewrites a product that sums over axes of a constant operand as a Linear or a grouped convolution.

Axes are letters, as in einsum. Products are summed over the axes C. Both operands and the result have the axes G (a
weight per head). The axes F belong only to x, and the axes M only to the weight:

    no G     x → […F, C] → Linear with [M, C] → […F, M] → the axes of the result
    some G   x → [F0, G·C, F1…] → Conv1d in |G| groups with [G·M, C, 1] → [F0, G·M, F1…] → the axes of the result
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from qatkit.graph.nodes import site
from qatkit.graph.weights.operator import OperatorBuilder


@dataclass(frozen=True)
class Contraction:
    """A product of two operands, described by the letters of its axes.

    Attributes:
        x, weight, result: the letters of the axes of each; none has a letter twice.
        sizes: the size of each letter; the batch has the size of the example. If the shape of x is not known, only
            letters of the weight have a size.
    """

    x: str
    weight: str
    result: str
    sizes: Mapping[str, int]

    @property
    def summed(self) -> str:
        """The axes that are summed over, in the order of the weight's axes."""
        return "".join(c for c in self.weight if c in self.x and c not in self.result)

    @property
    def groups(self) -> str:
        """The axes that both operands and the result have."""
        return "".join(c for c in self.weight if c in self.x and c in self.result)

    def size(self, letters: str) -> int:
        """Returns the number of values along these axes."""
        return math.prod(self.sizes[c] for c in letters)


def parse(equation: str, ranks: Sequence[int | None]) -> tuple[str, str, str] | None:
    """Returns the letters of both operands and of the result of an einsum.

    Returns None if there are not two operands, if the operands or the result have a letter twice or no letter, or if
    the number of axes that an ellipsis needs is not known.

    Args:
        equation: the equation, as in torch.einsum.
        ranks: the number of axes of each operand, needed for an ellipsis; None if it is not known.
    """
    text = equation.replace(" ", "")
    if "->" not in text:
        operands = text.replace(",", "").replace(".", "")
        text += (
            "->" + "..." * ("..." in text) + "".join(sorted(c for c in operands if operands.count(c) == 1))
        )
    left, _, result = text.partition("->")
    parts = left.split(",")
    if len(parts) != 2:
        return None
    spare = [c for c in string.ascii_letters if c not in text]
    longest = 0
    for i, part in enumerate(parts):
        if "..." in part:
            rank = ranks[i]
            if rank is None:
                return None
            extra = rank - (len(part) - 3)
            longest = max(longest, extra)
            parts[i] = part.replace("...", "".join(reversed(spare[:extra])))
    result = result.replace("...", "".join(reversed(spare[:longest])))
    if not all(re.fullmatch(r"[A-Za-z]+", p) and len(set(p)) == len(p) for p in (*parts, result)):
        return None
    return parts[0], parts[1], result


def why_not(product: Contraction) -> str | None:
    """Returns why a product can't be rewritten; None if it can, "" if it sums over no axis of both operands."""
    alone = [c for c in product.weight if c not in product.x and c not in product.result]
    lost = [c for c in product.x if c not in product.weight and c not in product.result]
    if not product.summed:
        return ""
    if alone or lost:
        return "it also sums over an axis that only one operand has"
    if not [c for c in product.x if c not in product.weight]:
        return "every axis of its input is also an axis of the weight"
    return None


def lower(
    builder: OperatorBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, product: Contraction
) -> fx.Node:
    """Inserts the nodes of the rewritten `product` before `node`; returns the node of the result."""
    free = "".join(c for c in product.x if c not in product.weight)
    made = "".join(c for c in product.weight if c not in product.x)
    lowered = _in_groups if product.groups else _linear
    return lowered(builder, _Shaper(node, product), x, weight, free, made)


def _linear(
    builder: OperatorBuilder, shaper: _Shaper, x: fx.Node, weight: fx.Node, free: str, made: str
) -> fx.Node:
    product, summed = shaper.product, shaper.product.summed
    weight = _weight(builder, shaper.node, weight, product, made, "")
    flat = shaper.join(shaper.turn(x, product.x, free + summed), -len(summed), -1)
    y = shaper.split(builder.call(shaper.node, nn.Linear, flat, weight), -1, made)
    return shaper.turn(y, free + made, product.result)


def _in_groups(
    builder: OperatorBuilder, shaper: _Shaper, x: fx.Node, weight: fx.Node, free: str, made: str
) -> fx.Node:
    product, summed, groups = shaper.product, shaper.product.summed, shaper.product.groups
    weight = _weight(builder, shaper.node, weight, product, made, groups)
    first, rest = free[:1], free[1:]
    turned = shaper.turn(x, product.x, first + groups + summed + rest)
    flat = shaper.join(turned, 1, len(groups + summed))
    flat = flat if rest else shaper.call("unsqueeze", flat, -1)
    if len(rest) > 1:  # join them to one axis: few runtimes have kernels for convolutions over more axes
        flat = shaper.join(flat, 2, -1)
    y = builder.call(shaper.node, nn.Conv1d, flat, weight, groups=product.size(groups))
    y = y if rest else shaper.call("squeeze", y, -1)
    y = shaper.split(y, -1, rest) if len(rest) > 1 else y
    y = shaper.split(y, 1, groups + made)
    return shaper.turn(y, first + groups + made + rest, product.result)


def _weight(
    builder: OperatorBuilder, node: fx.Node, weight: fx.Node, product: Contraction, made: str, groups: str
) -> fx.Node:
    """Returns the constant as [M, C] for a Linear, or [G·M, C, 1] for a Conv1d."""
    order = [product.weight.index(c) for c in groups + made + product.summed]
    shape = [product.size(groups + made), product.size(product.summed)] + [1] * bool(groups)
    if order != sorted(order):
        weight = builder.constants.add(node, "permute", weight, *order)
    value = builder.constants.tensor(weight)
    if value is not None and list(value.shape) != shape:
        weight = builder.constants.add(node, "reshape", weight, *shape)
    return weight


class _Shaper:
    """Inserts operators before one node to move axes; operators without effect are left out."""

    def __init__(self, node: fx.Node, product: Contraction) -> None:
        self.node, self.product = node, product
        self.calls = Counter[str]()

    def call(self, method: str, *args: object) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_method(method, args)  # type: ignore[arg-type]
        before = self.calls[method]
        self.calls[method] += 1
        # The name is next to the operator's, not below it, since convert removes the operator's children. Each
        # node has a name and a range of its own.
        new.meta["site"] = f"{site(self.node)}_{method}" + (f"_{before}" if before else "")
        return new

    def turn(self, x: fx.Node, letters: str, wanted: str) -> fx.Node:
        if letters == wanted:
            return x
        return self.call("permute", x, *(letters.index(c) for c in wanted))

    def join(self, x: fx.Node, first: int, last: int) -> fx.Node:
        """Joins the axes of `x` from `first` to `last` into one."""
        return x if first == last else self.call("flatten", x, first, last)

    def split(self, y: fx.Node, axis: int, letters: str) -> fx.Node:
        """Splits `axis` of `y` into the axes `letters`, from which it was joined; removes it if there are none."""
        if not letters:
            return self.call("squeeze", y, axis)
        if len(letters) == 1:
            return y
        return self.call("unflatten", y, axis, tuple(self.product.sizes[c] for c in letters))
