"""Elementwise operators: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.importing.operators.table import Array, Node, Value, function, module
from qatkit.importing.operators.values import TYPES, operand, sizes_of, tensor

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish,
    "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign,
    "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "And": lambda a, b: a & b,
    "Or": lambda a, b: a | b,
    "Xor": lambda a, b: a ^ b,
    "BitwiseAnd": lambda a, b: a & b,
    "BitwiseOr": lambda a, b: a | b,
    "BitwiseXor": lambda a, b: a ^ b,
}

# Operators that compute each value separately, for tensors of any size.
SINGLE_VALUES = (
    *_UNARY, *_BINARY, "Div", "Pow", "Mod", "BitShift", "Max", "Min", "Sum", "Mean", "Where", "Clip", "LeakyRelu",
    "PRelu", "Elu", "Celu", "Selu", "HardSigmoid", "ThresholdedRelu", "Shrink", "Gelu", "Swish", "Cast", "CastLike",
    "IsInf",
)  # fmt: skip


def _unary(apply: Callable[[Tensor], Tensor], node: Node, x: Value) -> Tensor:
    return apply(tensor(x))


def _binary(apply: Callable[[Any, Any], Tensor], node: Node, a: Value, b: Value) -> Tensor:
    return apply(*_pair(a, b))


def _pair(a: Value, b: Value) -> tuple[Any, Any]:
    """Returns two operands, at least one of them a tensor.

    The other may be a Python number, for an array with one value that does not change the shape of the result.
    """
    if isinstance(a, Tensor):
        return a, operand(b, a)
    second = tensor(b)
    return operand(a, second), second


for _name, _apply in _UNARY.items():
    function(_name)(functools.partial(_unary, _apply))
for _name, _both in _BINARY.items():
    function(_name)(functools.partial(_binary, _both))


@function("Div")
def divide(node: Node, a: Value, b: Value) -> Tensor:
    """Divides; a quotient of integers is rounded towards zero."""
    first, second = _pair(a, b)
    whole = tensor(a).dtype if not isinstance(a, Tensor) else a.dtype
    if whole.is_floating_point:
        return first / second
    return torch.div(first, second, rounding_mode="trunc")


@function("Pow")
def power(node: Node, a: Value, b: Value) -> Tensor:
    """Returns a power; the result has the type of the first operand."""
    first, second = _pair(a, b)
    if isinstance(second, float) and second == 0.5:
        return torch.sqrt(first)
    if isinstance(second, float) and second.is_integer():
        second = int(second)
    kind = tensor(a).dtype if not isinstance(a, Tensor) else a.dtype
    return torch.pow(first, second).to(kind)


@function("Mod")
def remainder(node: Node, a: Value, b: Value) -> Tensor:
    """Returns the remainder; with `fmod=1` it has the sign of the dividend, otherwise that of the divisor."""
    first, second = _pair(a, b)
    return (torch.fmod if node.get("fmod", 0) else torch.remainder)(first, second)


@function("BitShift")
def shifted(node: Node, a: Value, b: Value) -> Tensor:
    """Shifts bits to the left or to the right."""
    first, second = _pair(a, b)
    left = node.get("direction") == "LEFT"
    return torch.bitwise_left_shift(first, second) if left else torch.bitwise_right_shift(first, second)


def _several(node: Node, values: tuple[Value, ...], apply: Callable[[Any, Any], Tensor]) -> Tensor:
    total: Any = values[0]
    if len(values) == 1:
        return tensor(total)
    for value in values[1:]:
        total = apply(*_pair(total, value))
    return tensor(total)


@function("Max")
def maximum(node: Node, *values: Value) -> Tensor:
    """Returns the elementwise maximum of several tensors."""
    return _several(node, values, _extreme(torch.maximum, "min"))


@function("Min")
def minimum(node: Node, *values: Value) -> Tensor:
    """Returns the elementwise minimum of several tensors."""
    return _several(node, values, _extreme(torch.minimum, "max"))


def _extreme(of_two: Callable[[Tensor, Tensor], Tensor], bound: str) -> Callable[[Any, Any], Tensor]:
    def apply(a: Any, b: Any) -> Tensor:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return of_two(a, b)
        x, number = (a, b) if isinstance(a, Tensor) else (b, a)
        return torch.clamp(x, **{bound: number})

    return apply


@function("Sum")
def total(node: Node, *values: Value) -> Tensor:
    """Returns the elementwise sum of several tensors."""
    return _several(node, values, lambda a, b: a + b)


@function("Mean")
def mean(node: Node, *values: Value) -> Tensor:
    """Returns the elementwise mean of several tensors."""
    return total(node, *values) / len(values)


@function("Where")
def where(node: Node, condition: Value, a: Value, b: Value) -> Tensor:
    """Returns the elements of `a` where the condition is true, and those of `b` elsewhere."""
    like = next((v for v in (condition, a, b) if isinstance(v, Tensor)), None)
    return torch.where(tensor(condition, like).bool(), tensor(a, like), tensor(b, like))


@function("Clip")
def clip(node: Node, x: Value, low: Value = None, high: Value = None) -> Tensor:
    """Clips; bounds are attributes before opset 11, and infinite bounds have no effect."""
    x = tensor(x)
    bounds = [node.get("min") if low is None else low, node.get("max") if high is None else high]
    known: list[Any] = [
        None if bound is None else operand(np.asarray(bound) if not isinstance(bound, Tensor) else bound, x)
        for bound in bounds
    ]
    known = [None if isinstance(b, float) and math.isinf(b) else b for b in known]
    if any(isinstance(b, Tensor) for b in known):
        for bound, name, of_two in zip(known, ("min", "max"), (torch.maximum, torch.minimum), strict=True):
            if isinstance(bound, Tensor):
                x = of_two(x, bound)
            elif bound is not None:
                x = torch.clamp(x, **{name: bound})
        return x
    if known == [0.0, 6.0]:
        return F.relu6(x)
    if known[0] == 0.0 and known[1] is None:
        return F.relu(x)
    if known == [None, None]:
        return x
    return torch.clamp(x, *known)


@function("LeakyRelu")
def leaky_relu(node: Node, x: Value) -> Tensor:
    """Returns x, or alpha·x below zero."""
    return F.leaky_relu(tensor(x), node.get("alpha", 0.01))


@module("PRelu")
def prelu_module(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns `nn.PReLU` with one slope or one per channel; None for computed slopes or another shape."""
    slope = constants[1]
    if slope is not None and slope.ndim == node.ranks[0] and slope.shape[0] == 1:
        slope = slope[0]  # the same for all samples
    channels = slope is not None and (slope.size == 1 or slope.shape == (slope.size, *[1] * (slope.ndim - 1)))
    if slope is None or not channels or ((node.ranks[0] or 0) != slope.ndim + 1 and slope.size > 1):
        return None
    made = nn.PReLU(slope.size)
    made.weight.data = torch.from_numpy(slope.astype(np.float32).reshape(-1).copy())
    return made


@function("PRelu")
def prelu(node: Node, x: Value, slope: Value) -> Tensor:
    """Applies PReLU with slopes of any shape that broadcasts."""
    x = tensor(x)
    return torch.where(x < 0, x * operand(slope, x), x)


@function("Elu")
def elu(node: Node, x: Value) -> Tensor:
    """Applies the exponential linear unit."""
    return F.elu(tensor(x), node.get("alpha", 1.0))


@function("Celu")
def celu(node: Node, x: Value) -> Tensor:
    """Applies the continuously differentiable exponential linear unit."""
    return F.celu(tensor(x), node.get("alpha", 1.0))


@function("Selu")
def selu(node: Node, x: Value) -> Tensor:
    """Applies the scaled exponential linear unit with the constants of the node."""
    x = tensor(x)
    alpha, gamma = node.get("alpha", 1.6732632423543772), node.get("gamma", 1.0507009873554805)
    return gamma * (torch.clamp(x, min=0) + alpha * (torch.exp(torch.clamp(x, max=0)) - 1))


@function("HardSigmoid")
def hard_sigmoid(node: Node, x: Value) -> Tensor:
    """Computes clamp(alpha·x + beta, 0, 1), with PyTorch's hardsigmoid if alpha and beta match it."""
    x, alpha, beta = tensor(x), node.get("alpha", 0.2), node.get("beta", 0.5)
    if math.isclose(alpha, 1 / 6, abs_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


@function("ThresholdedRelu")
def thresholded_relu(node: Node, x: Value) -> Tensor:
    """Returns x where it is above alpha, otherwise zero."""
    x = tensor(x)
    return torch.where(x > node.get("alpha", 1.0), x, torch.zeros_like(x))


@function("Shrink")
def shrink(node: Node, x: Value) -> Tensor:
    """Sets values nearer to zero than lambd to zero and moves others towards zero by bias."""
    x, lambd, bias = tensor(x), node.get("lambd", 0.5), node.get("bias", 0.0)
    zeros = torch.zeros_like(x)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, zeros))


@function("Gelu")
@function("Gelu", domain="com.microsoft")
def gelu(node: Node, x: Value) -> Tensor:
    """Computes GELU by the error function or by its tanh approximation."""
    return F.gelu(tensor(x), approximate=node.get("approximate", "none"))


@function("FastGelu", domain="com.microsoft")
def fast_gelu(node: Node, x: Value, bias: Value = None) -> Tensor:
    """Computes GELU of x plus a bias by the tanh approximation."""
    x = tensor(x)
    return F.gelu(x if bias is None else x + operand(bias, x), approximate="tanh")


@function("BiasGelu", domain="com.microsoft")
def bias_gelu(node: Node, x: Value, bias: Value) -> Tensor:
    """Computes GELU of x plus a bias."""
    x = tensor(x)
    return F.gelu(x + operand(bias, x))


@function("QuickGelu", domain="com.microsoft")
@function("Swish")
def swish(node: Node, x: Value) -> Tensor:
    """Computes x·sigmoid(alpha·x), which is SiLU if alpha is 1."""
    x, alpha = tensor(x), node.get("alpha", 1.702 if node.domain else 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _unknown_type(node: Node) -> str:
    kind = node.get("to")
    return "" if kind in TYPES else f"Cast to ONNX type {kind} has no PyTorch equivalent"


@function("Cast", refuses=_unknown_type)
def cast(node: Node, x: Value) -> Tensor:
    """Casts to another type; all float types become float32."""
    x, kind = tensor(x), TYPES[node.get("to")]
    return x if x.dtype == kind else x.to(kind)


@function("CastLike")
def cast_like(node: Node, x: Value, other: Value) -> Tensor:
    """Casts to the type of another tensor."""
    return tensor(x).to(tensor(other).dtype)


@function("IsInf")
def is_infinite(node: Node, x: Value) -> Tensor:
    """Detects infinities of either sign, or of one of them."""
    x = tensor(x)
    found = torch.isposinf(x) if node.get("detect_positive", 1) else torch.zeros_like(x, dtype=torch.bool)
    return found | torch.isneginf(x) if node.get("detect_negative", 1) else found


def drops(node: Node, constants: Sequence[Array | None]) -> bool:
    """Returns whether a Dropout may drop values: its training mode is on or computed, and its ratio is not 0."""
    if len(node.inputs) < 3 or not node.inputs[2]:
        return False
    ratio, training = constants[1], constants[2]
    idle = ratio is not None and not ratio.any()
    return not idle and (training is None or bool(training.any()))


@function("Dropout")
def dropout(node: Node, x: Value, *settings: Value) -> tuple[Value, Array]:
    """Returns the input and a mask of ones, as Dropout does in inference mode."""
    return x, np.ones(sizes_of(x), np.bool_)


@function("DequantizeLinear")
def dequantize(node: Node, x: Value, scale: Value, zero_point: Value = None) -> Tensor:
    """Computes (x - zero_point)·scale with scales per tensor, per index of an axis, or per block along the axis."""
    integers, factors = tensor(x).float(), tensor(scale)
    zeros = torch.zeros_like(factors) if zero_point is None else tensor(zero_point).float()
    axis, block = node.get("axis", 1) % max(integers.ndim, 1), node.get("block_size", 0)
    if block:
        size = integers.shape[axis]
        factors, zeros = (v.repeat_interleave(block, axis).narrow(axis, 0, size) for v in (factors, zeros))
    elif factors.ndim == 1:
        view = [-1 if i == axis else 1 for i in range(integers.ndim)]
        factors, zeros = factors.reshape(view), zeros.reshape(view)
    return (integers - zeros) * factors
