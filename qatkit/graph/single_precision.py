"""Turns a model of another floating-point type (half, bfloat16, double) into one of float32.

    model.half(), and x.to(torch.float16), x.half(), torch.zeros(..., dtype=torch.float16) in its code
    → a float32 copy whose forward treats each of these types as float32

Converting only the parameters would not be enough: a model that casts its inputs would combine float32 weights with
half-precision inputs. A result that still has another type (from a NumPy array of doubles, say) is converted to float32
too.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qatkit.graph.trace import copy_of

_CASTS: dict[Any, torch.dtype] = {
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}
_SHORT = (torch.float16, torch.bfloat16)
_OLD_NAMES = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64}


def in_single_precision(model: nn.Module) -> tuple[nn.Module, list[torch.dtype]]:
    """Returns a float32 copy of `model`, and the other floating-point types that it had.

    If there are none, `model` itself is returned. A model in which only buffers are doubles (tables that were computed
    exactly) counts as a float32 model.
    """
    found = {one.dtype for one in model.parameters() if one.is_floating_point()}
    found |= {one.dtype for one in model.buffers() if one.dtype in _SHORT}
    found -= {torch.float32}
    if not found:
        return model, []
    model = copy_of(model).float()
    for module in model.modules():
        held = {
            name: one for name, one in vars(module).items() if isinstance(one, Tensor) and one.dtype in found
        }
        vars(module).update({name: one.float() for name, one in held.items()})
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Single(found):
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return model, sorted(found, key=str)


class _Single(TorchFunctionMode):
    """A mode that treats the given types as float32 in every call."""

    def __init__(self, types: Set[torch.dtype]) -> None:
        super().__init__()
        self.types = types

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _CASTS.get(func) in self.types:
            func = Tensor.float
        name = getattr(func, "__name__", "")
        if name == "type" and len(args) > 1 and isinstance(args[1], str):
            named = args[1].rpartition(".")[2].removesuffix("Tensor")
            args = (args[0], torch.float32 if _OLD_NAMES.get(named) in self.types else args[1])
        return self._single(func(*self._plain(args), **self._plain(kwargs or {})))

    def _single(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return result.float() if result.dtype in self.types else result
        if type(result) in (tuple, list):
            return type(result)(map(self._single, result))
        return result

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float32 if value in self.types else value
        if isinstance(value, dict):
            return {key: self._plain(part) for key, part in value.items()}
        return tuple(map(self._plain, value)) if type(value) is tuple else value
