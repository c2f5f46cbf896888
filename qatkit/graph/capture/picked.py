"""Records values picked by a computed mask: `x[mask]`, whose size is unknown before the values are known.

Elementwise operations on them can be applied to all of `x`, and the results are put back where the mask is true:

    x[mask] *= 2              →  x = where(mask, x · 2, x)
    x[mask] = y[mask].abs()   →  x = where(mask, |y|, x)

In the graph, the node of a picked tensor is therefore the node of the whole tensor. Any other use of a picked tensor
is rejected, with the line where it was picked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from qatkit.graph.capture.calls import UntraceableError, as_node, out_of_place, tensors_in

if TYPE_CHECKING:
    from qatkit.graph.capture.recorder import Recorder

_BY_ELEMENT = frozenset(
    ("abs", "add", "bfloat16", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "cos",
     "detach", "div", "elu", "exp", "expm1", "float", "floor", "gelu", "half", "hardsigmoid", "hardswish", "hardtanh",
     "leaky_relu", "log", "log1p", "log2", "logsigmoid", "logit", "maximum", "minimum", "mish", "mul", "multiply",
     "neg", "pow", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin",
     "softplus", "sqrt", "square", "sub", "subtract", "tanh", "to", "true_divide", "trunc", "type",
     "__pow__", "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__truediv__")
)  # fmt: skip


@dataclass
class _Picked:
    """The source of a picked tensor.

    Attributes:
        whole: the node of the whole tensor.
        mask: the node of the mask.
        behind: number of axes of the whole tensor after those of the mask.
        error: the error to raise if the picked tensor is used otherwise.
    """

    whole: fx.Node
    mask: fx.Node
    behind: int
    error: UntraceableError


class PickedValues:
    """The picked tensors of one run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.found = WeakTensorKeyDictionary()

    def concerns(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a call picks values by a mask that depends on inputs, or computes with picked values."""
        if name == "__getitem__" and self._mask(*args) is not None:
            return True
        if name == "__setitem__" or not self.found:
            return False
        return any(tensor in self.found for tensor in tensors_in((args, kwargs)))

    def _mask(self, source: Tensor, index: Any) -> Tensor | None:
        """Returns the mask of `source[index]` if it depends on the inputs, else None."""
        mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or source in self.found or not mask.ndim:
            return None
        return mask if self.recorder.node_of(mask) in self.recorder.depends else None

    def _pick(self, source: Tensor, mask: Tensor) -> Tensor:
        recorder = self.recorder
        node = recorder.node_of(mask)
        with torch._C.DisableTorchFunction():
            result = source[mask]
        reason = "the shape of the result depends on values of a tensor (masked_select)"
        self.found[result] = _Picked(
            recorder.node_of(source), node, source.ndim - mask.ndim, recorder.refuse(reason)
        )
        return result

    def check(self, tensor: Tensor) -> None:
        """Raises an UntraceableError if `tensor` is a picked one."""
        if tensor in self.found:
            raise self.found[tensor].error

    def value(self, tensor: Any, mask: Tensor, behind: int) -> fx.Node | None:
        """Returns the node of the whole tensor that `tensor` was picked from; None if it was not picked.

        Raises:
            UntraceableError: `tensor` was picked by a mask other than `mask`, or the number of axes after its mask is
                not `behind`.
        """
        if not isinstance(tensor, Tensor) or tensor not in self.found:
            return None
        one: _Picked = self.found[tensor]
        if one.behind != behind or not _same(one.mask, self.recorder.node_of(mask)):
            raise one.error
        return one.whole

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call that picks values; a call on picked tensors is recorded as a call on the whole tensors.

        Raises:
            UntraceableError: the call on picked tensors is not elementwise, or another argument was picked by another
                mask or may not broadcast to the whole tensor.
        """
        if func.__name__ == "__getitem__" and (mask := self._mask(*args)) is not None:
            return self._pick(args[0], mask)
        given = list(tensors_in((args, kwargs)))
        first: _Picked = next(self.found[tensor] for tensor in given if tensor in self.found)
        name = func.__name__
        if name == "__get__":  # its size is that of this run, so nothing may depend on it
            raise first.error
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if name.removesuffix("_") not in _BY_ELEMENT or "out" in kwargs:
            raise first.error
        nodes = fx.node.map_aggregate((args, kwargs), lambda value: self._whole(value, first))
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        call = out_of_place(func, *nodes) if in_place else as_node(func, *nodes)
        if call is None:
            raise first.error
        node = self.recorder.emit(*call)
        self.found[result] = _Picked(node, first.mask, first.behind, first.error)
        return result

    def _whole(self, value: Any, first: _Picked) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value in self.found:
            one: _Picked = self.found[value]
            if one.behind != first.behind or not _same(one.mask, first.mask):
                raise first.error
            return one.whole
        if value.numel() > 1 and value.ndim > first.behind:
            raise first.error
        return self.recorder.node_of(value)


def _same(one: Any, other: Any) -> bool:
    """Returns whether two nodes compute the same: `x[x < 0] = -x[x < 0]` computes its mask twice."""
    if one is other:
        return True
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return (
            (one.op, one.target) == (other.op, other.target)
            and one.op in ("call_function", "call_method")
            and _same(one.args, other.args)
            and _same(one.kwargs, other.kwargs)
        )
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return not isinstance(one, fx.Node) and type(one) is type(other) and bool(one == other)
