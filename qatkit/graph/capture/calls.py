"""Classifies a recorded call: its node in the graph, the values that it reads, and why it may be rejected."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Functions that read values out of a tensor: Python continues with them, so they can't be part of a graph.
VALUE_READS = frozenset(
    ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "tolist", "numpy", "__array__",
     "is_nonzero", "equal", "allclose", "__contains__")
)  # fmt: skip
# Functions that return a shape which depends on values.
VALUE_SHAPES = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"))
# Functions that use only shape, type and device of their inputs, not their values.
SHAPE_ONLY = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
RANDOM = frozenset(
    ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like",
     "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_",
     "log_normal_", "geometric_", "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d",
     "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "orthogonal_")
)  # fmt: skip
DROPOUTS: dict[Any, type[torch.nn.Module]] = {
    F.dropout: torch.nn.Dropout,
    F.dropout1d: torch.nn.Dropout1d,
    F.dropout2d: torch.nn.Dropout2d,
    F.dropout3d: torch.nn.Dropout3d,
    F.alpha_dropout: torch.nn.AlphaDropout,
    F.feature_alpha_dropout: torch.nn.FeatureAlphaDropout,
    torch.dropout: torch.nn.Dropout,
    torch.alpha_dropout: torch.nn.AlphaDropout,
    torch.feature_alpha_dropout: torch.nn.FeatureAlphaDropout,
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "true_divide": operator.truediv, "matmul": operator.matmul, "pow": operator.pow, "neg": operator.neg,
    "__getitem__": operator.getitem, "__invert__": operator.invert, "__and__": operator.and_,
    "__or__": operator.or_, "__xor__": operator.xor, "__pos__": operator.pos, "__mod__": operator.mod,
    "remainder": operator.mod, "__floordiv__": operator.floordiv, "floor_divide": operator.floordiv,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "__eq__": operator.eq, "__ne__": operator.ne, "__pow__": operator.pow, "__truediv__": operator.truediv,
}  # fmt: skip
_REFLECTED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul, "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv, "__rpow__": operator.pow, "__rmatmul__": operator.matmul,
    "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
}  # fmt: skip
_HERE, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)

# Advice in the error for a line that can't be recorded.
WITHOUT_VALUES = "write that line with torch functions of tensors (torch.where for a choice)"
OUT_OF_PLACE = "use the variant that returns a new tensor"
WHOLE_BATCH = "compute the whole batch at once, without branches and loops over its size"
IN_TRAINING = "draw them only in training (if self.training), or make them an input"

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def as_node(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Returns op, target, args and kwargs of the node for a call of a torch function or a Tensor method."""
    name = func.__name__
    if name in ("clamp", "clip"):
        args, kwargs = _bounds_of_one_type(args, kwargs)
    if not torch.overrides.is_tensor_method_or_property(func):
        return "call_function", func, args, kwargs
    if name in _REFLECTED and len(args) == 2:
        return "call_function", _REFLECTED[name], (args[1], args[0]), kwargs
    if name in _OPERATORS and not kwargs and len(args) <= 2:
        return "call_function", _OPERATORS[name], args, kwargs
    return "call_method", name, args, kwargs


def _bounds_of_one_type(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a clamp with both bounds as floats if one is a float.

    torch's exporter rejects an integer together with a float, as in `clamp(x, -1, 1.5)`.
    """
    given = [*args[1:], *kwargs.values()]
    if not any(type(bound) is float for bound in given):
        return args, kwargs

    def plain(bound: Any) -> Any:
        return float(bound) if type(bound) is int else bound

    return (args[0], *map(plain, args[1:])), {key: plain(bound) for key, bound in kwargs.items()}


def out_of_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Returns the out-of-place call that computes the result of an in-place call.

    Returns None if there is none, and for calls that are recorded in other ways: `copy_`, `fill_`, `zero_`, `set_`,
    `resize_` and random numbers.
    """
    name = func.__name__
    if name in ("copy_", "fill_", "zero_", "set_", "resize_") or name in RANDOM:
        return None
    if kwargs.get("inplace"):
        return "call_function", func, args, {**kwargs, "inplace": False}
    if name.startswith("__i") and name.endswith("__"):  # `x &= y`; `x += y` is recorded as add_
        plain = f"__{name[3:-2]}__"
    elif name.endswith("_") and not name.endswith("__"):
        plain = name[:-1]
    else:
        return None
    if torch.overrides.is_tensor_method_or_property(func):
        method = getattr(torch.Tensor, plain, None)
        return None if method is None else as_node(_named(plain), args, kwargs)
    function = getattr(torch, plain, None) or getattr(F, plain, None)
    return None if function is None else ("call_function", function, args, kwargs)


def values_read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments whose values Python code reads, or which determine the shape of the result."""
    if name in VALUE_READS or name in VALUE_SHAPES or (name == "where" and len(args) + len(kwargs) == 1):
        return args, kwargs
    if name in ("arange", "range", "linspace"):
        return args, kwargs
    if name == "repeat_interleave":
        alone = len(args) == 1 and "repeats" not in kwargs  # `torch.repeat_interleave(repeats)`
        return (args if alone else args[1:]), kwargs.get("repeats")
    if name == "one_hot" and (*args, *kwargs.values())[1:] in ((), (-1,)):
        return args
    if name == "__getitem__":
        return [
            part for part in (args[1] if isinstance(args[1], tuple) else args[1:]) if isinstance(part, slice)
        ]
    return ()


def _named(method: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.Tensor, method)
    if found.__name__ != method:  # the method is an alias of another one
        return _named(found.__name__)
    return found


def where() -> tuple[str, int]:
    """Returns the file and the line number of the model's code that is running; ("", 0) if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH)) and not file.startswith("<"):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def dropout_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a functional dropout by name, including the defaults of `p` and `training`."""
    named = {"training" if name == "train" else name: value for name, value in kwargs.items()}
    by_place = dict(zip(("input", "p", "training", "inplace"), args, strict=False))
    return {"p": 0.5, "training": True} | by_place | named


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call draws random numbers."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func in (F.rrelu, F.rrelu_):
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))
    return func in DROPOUTS or getattr(func, "__name__", "") in RANDOM


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


class UntraceableError(Exception):
    """Raised for a line of the model that can't be part of a graph.

    Attributes:
        reason: why it can't.
        place: the file and the number of the line; ("", 0) if they are unknown.
        module: the path of the module that runs the line; "" for the model itself, or if it is unknown.
        hint: how to rewrite the line; "" without advice.
    """

    def __init__(self, reason: str, place: tuple[str, int], module: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.place, self.module, self.hint = reason, place, module, hint
