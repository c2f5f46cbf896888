"""Replaces sizes with numbers where a model computes them as scalar tensors from buffers and numbers only.

Examples are the padding of a convolution in an audio codec and the end of a slice. They are the same in every run, so
the graph holds the numbers. torch's exporter would treat a size that comes from a tensor as unknown, and reject
operators that need to know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The positions of the arguments that are sizes, by function of torch.
_ALL, _REST, _SECOND = slice(None), slice(1, None), slice(1, 2)
_SIZES = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "arange"), _ALL),
    **dict.fromkeys(("view", "reshape", "expand", "repeat", "tile", "unflatten"), _REST),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), _REST),
    **dict.fromkeys(("pad", "interpolate", "new_full", "split", "roll", "repeat_interleave"), _SECOND),
    "full": slice(0, 1),
    "narrow": slice(2, 4),
}
_NAMED = ("size", "shape", "sizes", "pad", "start", "end", "step", "length", "repeats", "shifts", "split_size",
          "split_size_or_sections")  # fmt: skip


def with_numbers(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: Callable[[Tensor], bool]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, with numbers in place of sizes that are tensors.

    Args:
        name: the name of the function.
        args, kwargs: the arguments of the call.
        known: a function that returns whether the values of a tensor are the same in every run.
    """

    def number(value: Any) -> Any:
        if isinstance(value, Tensor):
            whole = value.ndim == 0 and value.dtype != torch.bool
            return value.item() if whole and known(value) else value
        if isinstance(value, slice):
            return slice(number(value.start), number(value.stop), number(value.step))
        return type(value)(map(number, value)) if type(value) in (list, tuple) else value

    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, slice) for part in index):
            args = (args[0], tuple(number(part) if isinstance(part, slice) else part for part in index))
        return args, kwargs
    if name not in _SIZES:
        return args, kwargs
    places = range(len(args))[_SIZES[name]]
    return (
        tuple(number(value) if i in places else value for i, value in enumerate(args)),
        {key: number(value) if key in _NAMED else value for key, value in kwargs.items()},
    )
