"""Operators that order values and, as in ONNX, put the one with the lower index first if values are equal.

torch leaves the order of equal values open, and quantized values are often equal. If a converted module ordered them
differently from the file, everything that is looked up by their indices would differ and hide real errors.

Source: ONNX operators, TopK ("the element with the lower index will appear first").
"""

# ruff: noqa: A002 - arguments have the names that they have in torch

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.return_types import kthvalue as ValueAndPlace
from torch.return_types import median as MedianAndPlace
from torch.return_types import sort as SortedValues
from torch.return_types import topk as LargestValues


def order_as_onnx(node: fx.Node) -> None:
    """Replaces the operator of `node` if it orders values and leaves the order of equal values open."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    function = _FUNCTIONS.get(str(name))
    if function is None or (node.op == "call_function" and node.target is not getattr(torch, str(name))):
        return
    if function is _median and len(node.args) + len(node.kwargs) == 1:
        return  # the median of all values returns no index
    node.op, node.target = "call_function", function


def _sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> SortedValues:
    return torch.sort(input, dim=dim, descending=descending, stable=True)


def _argsort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    return torch.argsort(input, dim=dim, descending=descending, stable=True)


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> LargestValues:
    if torch.compiler.is_exporting():
        return torch.topk(input, k, dim, largest, True)
    values, places = torch.sort(input, dim=dim, descending=largest, stable=True)
    return LargestValues((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


def _kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> ValueAndPlace:
    if torch.compiler.is_exporting():
        return torch.kthvalue(input, k, dim, keepdim)
    return ValueAndPlace(_kth(input, k, dim, keepdim))


def _median(input: Tensor, dim: int, keepdim: bool = False) -> MedianAndPlace:
    if torch.compiler.is_exporting():
        return torch.median(input, dim, keepdim)
    return MedianAndPlace(_kth(input, (input.shape[dim] + 1) // 2, dim, keepdim))


def _kth(x: Tensor, k: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    values, places = (one.narrow(dim, k - 1, 1) for one in torch.sort(x, dim=dim, stable=True))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
    "kthvalue": _kthvalue,
    "median": _median,
}
