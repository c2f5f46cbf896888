"""Operators with weights: convolutions, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.importing.operators.padding import SAME, same_pads
from qatkit.importing.operators.table import Array, Node, UnsupportedError, Value, function, module
from qatkit.importing.operators.values import operand, tensor

_CONVOLUTIONS: Sequence[type[Any]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: Sequence[type[Any]] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUNCTIONS: Sequence[Any] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED_FUNCTIONS: Sequence[Any] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class Padded(nn.Module):
    """A convolution with padding that is asymmetric or depends on sizes.

    Args:
        inner: a convolution without padding.
        pads: the padding at the beginning of each axis, then at the end of each; a name in `SAME` if it
            depends on sizes.
    """

    one_operator = True

    def __init__(self, inner: nn.Module, pads: list[int] | str) -> None:
        super().__init__()
        self.inner, self.pads = inner, pads

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.inner
        pads = self.pads
        if isinstance(pads, str):
            pads = same_pads(pads, x.shape[2:], inner.kernel_size, inner.stride, inner.dilation)
        axes = len(pads) // 2
        flat = [size for axis in reversed(range(axes)) for size in (pads[axis], pads[axis + axes])]
        padded = F.pad(x, flat) if any(flat) else x
        result: Tensor = inner(padded)
        return result


def _settings(node: Node, axes: int) -> dict[str, Any]:
    """Returns stride, dilation and groups as arguments of torch's convolutions."""
    return {
        "stride": tuple(node.get("strides") or [1] * axes),
        "dilation": tuple(node.get("dilations") or [1] * axes),
        "groups": node.get("group", 1),
    }


def _pads(node: Node, axes: int) -> list[int] | str:
    auto = node.get("auto_pad", "NOTSET")
    if auto in SAME:
        return str(auto)
    return [0] * (2 * axes) if auto == "VALID" else list(node.get("pads") or [0] * (2 * axes))


def _with(made: Any, weight: Array, bias: Array | None) -> nn.Module:
    made.weight.data = torch.from_numpy(np.array(weight, np.float32))
    if bias is not None:
        made.bias.data = torch.from_numpy(np.array(bias, np.float32))
    return made


@module("Conv")
def convolution(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a torch convolution; None if weight or bias is computed, or there are not 1 to 3 spatial axes.

    It is in a `Padded` if the padding is asymmetric or depends on sizes.
    """
    weight = constants[1]
    bias, known = _bias(node, constants, 2)
    if weight is None or not known or not 3 <= weight.ndim <= 5:
        return None
    axes, settings = weight.ndim - 2, _settings(node, weight.ndim - 2)
    pads = _pads(node, axes)
    even = not isinstance(pads, str) and pads[:axes] == pads[axes:]
    made = _CONVOLUTIONS[axes - 1](
        weight.shape[1] * settings["groups"],
        weight.shape[0],
        tuple(weight.shape[2:]),
        padding=tuple(pads[:axes]) if even else 0,
        bias=bias is not None,
        **settings,
    )
    found = _with(made, weight, bias)
    return found if even else Padded(found, pads)


def _bias(node: Node, constants: Sequence[Array | None], place: int) -> tuple[Array | None, bool]:
    """Returns a bias and whether it is known; a bias that the node does not have (None) counts as known."""
    given = len(node.inputs) > place and bool(node.inputs[place])
    found = constants[place] if len(constants) > place else None
    return found, found is not None or not given


@function("Conv")
def computed_convolution(node: Node, x: Value, weight: Value, bias: Value = None) -> Tensor:
    """Computes a convolution with a computed weight."""
    x, w = tensor(x), tensor(weight)
    axes = w.ndim - 2
    settings, pads = _settings(node, axes), _pads(node, axes)
    if isinstance(pads, str):
        pads = same_pads(pads, x.shape[2:], w.shape[2:], settings["stride"], settings["dilation"])
    flat = [size for axis in reversed(range(axes)) for size in (pads[axis], pads[axis + axes])]
    x = F.pad(x, flat) if any(flat) else x
    found: Tensor = _FUNCTIONS[axes - 1](x, w, None if bias is None else tensor(bias), **settings)
    return found


class Cropped(nn.Module):
    """A transposed convolution whose output is cropped asymmetrically."""

    one_operator = True

    def __init__(self, inner: nn.Module, begin: Sequence[int], end: Sequence[int]) -> None:
        super().__init__()
        self.inner, self.begin, self.end = inner, tuple(begin), tuple(end)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        index = [slice(None)] * 2
        index += [
            slice(low, size - high) for low, high, size in zip(self.begin, self.end, y.shape[2:], strict=True)
        ]
        result: Tensor = y[tuple(index)]
        return result


@module("ConvTranspose")
def transposed_convolution(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a torch transposed convolution.

    None if weight or bias is computed, or there are not 1 to 3 spatial axes.

    It is in a `Cropped` if the two sides of an axis are cropped by different amounts.

    Raises:
        UnsupportedError: the node has an output_shape.
    """
    weight = constants[1]
    bias, known = _bias(node, constants, 2)
    if weight is None or not known or not 3 <= weight.ndim <= 5:
        return None
    axes, settings = weight.ndim - 2, _settings(node, weight.ndim - 2)
    pads, more = _transposed_pads(node, axes, settings, weight.shape[2:])
    both = [min(low, high) for low, high in zip(pads[:axes], pads[axes:], strict=True)]
    made = _TRANSPOSED[axes - 1](
        weight.shape[0],
        weight.shape[1] * settings["groups"],
        tuple(weight.shape[2:]),
        padding=tuple(both),
        output_padding=tuple(more),
        bias=bias is not None,
        **settings,
    )
    begin, end = (
        [side - p for side, p in zip(half, both, strict=True)] for half in (pads[:axes], pads[axes:])
    )
    found = _with(made, weight, bias)
    return Cropped(found, begin, end) if any(begin) or any(end) else found


def _transposed_pads(
    node: Node, axes: int, settings: dict[str, Any], kernel: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns the number of values to crop at the beginning and end of each axis, and to add at the end of each."""
    more = list(node.get("output_padding") or [0] * axes)
    if node.get("output_shape"):
        raise UnsupportedError("ConvTranspose with output_shape has no PyTorch equivalent")
    auto = node.get("auto_pad", "NOTSET")
    if auto not in SAME:
        return list(node.get("pads") or [0] * (2 * axes)) if auto == "NOTSET" else [0] * (2 * axes), more
    # SAME crops the output to stride times the input size.
    spans = [(k - 1) * d + 1 + o for k, d, o in zip(kernel, settings["dilation"], more, strict=True)]
    total = [max(span - stride, 0) for span, stride in zip(spans, settings["stride"], strict=True)]
    small = [size // 2 for size in total]
    large = [size - half for size, half in zip(total, small, strict=True)]
    return (small + large if auto == "SAME_UPPER" else large + small), more


@function("ConvTranspose")
def computed_transposed_convolution(node: Node, x: Value, weight: Value, bias: Value = None) -> Tensor:
    """Computes a transposed convolution with a computed weight.

    Raises:
        UnsupportedError: the node has an output_shape or asymmetric pads.
    """
    w = tensor(weight)
    axes = w.ndim - 2
    settings = _settings(node, axes)
    pads, more = _transposed_pads(node, axes, settings, w.shape[2:])
    if pads[:axes] != pads[axes:]:
        raise UnsupportedError(
            "ConvTranspose with a computed weight and asymmetric pads has no PyTorch equivalent"
        )
    apply = _TRANSPOSED_FUNCTIONS[axes - 1]
    given = None if bias is None else tensor(bias)
    found: Tensor = apply(
        tensor(x), w, given, padding=tuple(pads[:axes]), output_padding=tuple(more), **settings
    )
    return found


def _linear(weight: Array, bias: Array | None) -> nn.Module:
    """Returns a Linear with a weight [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    return _with(made, weight, bias)


@module("Gemm")
def gemm_module(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a Linear that computes alpha·A·B + beta·C for a constant B, and a constant C or none.

    None if B or C is computed, C is neither a vector nor a scalar, or A is transposed.
    """
    weight = constants[1]
    bias, known = _bias(node, constants, 2)
    if weight is None or not known or node.get("transA", 0):
        return None
    matrix = weight if node.get("transB", 0) else weight.T
    if bias is not None:
        if bias.size not in (1, matrix.shape[0]) or (bias.ndim > 1 and bias.shape[-1] != bias.size):
            return None
        bias = np.broadcast_to(bias.reshape(-1), matrix.shape[:1]) * node.get("beta", 1.0)
    return _linear(matrix * node.get("alpha", 1.0), bias)


@function("Gemm")
def gemm(node: Node, a: Value, b: Value, c: Value = None) -> Tensor:
    """Computes alpha·A·B + beta·C."""
    left, right = tensor(a), tensor(b)
    product = (left.T if node.get("transA", 0) else left) @ (right.T if node.get("transB", 0) else right)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    product = product if alpha == 1.0 else product * alpha
    if c is None:
        return product
    added = operand(c, product)
    return product + (added if beta == 1.0 else added * beta)


@module("MatMul")
def matmul_module(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a Linear for a product with a constant float matrix on the right; None for other products."""
    weight = constants[1]
    return None if weight is None or weight.ndim != 2 or weight.dtype.kind != "f" else _linear(weight.T, None)


@function("MatMul")
def matmul(node: Node, a: Value, b: Value) -> Tensor:
    """Multiplies matrices with NumPy's broadcasting."""
    like = a if isinstance(a, Tensor) else b if isinstance(b, Tensor) else None
    return torch.matmul(tensor(a, like), tensor(b, like))


def _turned_batch(node: Node) -> str:
    turned = node.get("transBatchA", 0) or node.get("transBatchB", 0)
    return "FusedMatMul with a transposed batch has no PyTorch equivalent" if turned else ""


@function("FusedMatMul", domain="com.microsoft", refuses=_turned_batch)
def fused_matmul(node: Node, a: Value, b: Value) -> Tensor:
    """Computes alpha·A·B, with A and B transposed if requested."""
    left, right = tensor(a), tensor(b)
    left = left.transpose(-1, -2) if node.get("transA", 0) else left
    right = right.transpose(-1, -2) if node.get("transB", 0) else right
    return torch.matmul(left, right) * node.get("alpha", 1.0)


@function("Einsum")
def einsum(node: Node, *values: Value) -> Tensor:
    """Computes an Einstein summation."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    return torch.einsum(node.get("equation"), *(tensor(value, like) for value in values))
