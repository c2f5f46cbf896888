"""Splits an einsum of several operands, one of which is a weight: the product with the weight is computed first.

    einsum("bi,ijk,bj->bk", x, w, y)   →  t = einsum("bi,ijk->bjk", x, w), einsum("bjk,bj->bk", t, y)

Before that, constants are multiplied with each other. The weight is multiplied first with the operand with which it
shares the largest axes that are summed over.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from qatkit.graph.node_arguments import shape_of
from qatkit.graph.nodes import site
from qatkit.graph.weights.operator import OperatorBuilder


def take_product(builder: OperatorBuilder, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Inserts the product with the weight before `node`, which then multiplies the result with the other operands.

    Returns the new node; None if the einsum can't be split in this way.
    """
    text = str(node.args[0]).replace(" ", "")
    left, arrow, result = text.partition("->")
    parts = left.split(",")
    if not arrow or "." in text or len(parts) != len(operands):
        return None
    pairs = _with_one_constant(builder, node, list(zip(parts, operands, strict=True)), result)
    weight = next(pair for pair in pairs if pair[1] in builder.constants)
    others = [pair for pair in pairs if pair is not weight]

    def summed(pair: tuple[str, fx.Node]) -> int:
        kept = result + "".join(p for p, _ in others if p is not pair[0])
        shape = dict(zip(pair[0], shape_of(pair[1]) or (), strict=False))
        return math.prod(shape.get(c, 1) for c in set(pair[0]) & set(weight[0]) - set(kept))

    x = max(others, key=summed)
    rest = [pair for pair in others if pair is not x]
    if summed(x) == 1 or shape_of(x[1]) is None:
        return None
    inner = _kept(x[0] + weight[0], result + "".join(p for p, _ in rest))
    with node.graph.inserting_before(node):
        new = node.graph.call_function(torch.einsum, (f"{x[0]},{weight[0]}->{inner}", x[1], weight[1]))
    sizes = dict(zip(x[0], shape_of(x[1]) or (), strict=True))
    sizes |= dict(zip(weight[0], builder.constants.value(weight[1]).shape, strict=True))
    value = torch.empty([sizes[c] for c in inner], device="meta")
    new.meta |= {"site": f"{site(node)}.product", "value": value}
    equation = ",".join([inner, *(p for p, _ in rest)]) + "->" + result
    node.args, node.kwargs = (equation, new, *(operand for _, operand in rest)), {}
    return new


def _with_one_constant(
    builder: OperatorBuilder, node: fx.Node, pairs: list[tuple[str, fx.Node]], result: str
) -> list[tuple[str, fx.Node]]:
    """Replaces the constants among the operands by their product."""
    while len(found := [pair for pair in pairs if pair[1] in builder.constants]) > 1:
        (one, a), (other, b) = found[:2]
        pairs = [pair for pair in pairs if pair not in found[:2]]
        kept = _kept(one + other, result + "".join(p for p, _ in pairs))
        product = builder.constants.add(node, _einsum, f"{one},{other}->{kept}", a, b)
        pairs.append((kept, product))
    return pairs


def _einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, *operands)


def _kept(letters: str, wanted: str) -> str:
    """Returns the letters of `letters` that are in `wanted`, without duplicates."""
    return "".join(c for c in dict.fromkeys(letters) if c in wanted)
