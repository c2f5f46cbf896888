"""Rewrites calls with traced sizes where torch's exporter accepts only constants: points of a grid, windows of a pool.

The points of a grid are computed from a range of integers. A pool with a window as large as its input becomes an
adaptive pool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.graph.capture.traced_sizes import TracedSize

_POOL = re.compile("(avg|max)_pool([123])d")


def for_any_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns a function that computes the same as `func` for any size; None if there is none or sizes are fixed."""
    if func is torch.linspace:
        steps = kwargs.get("steps", args[2] if len(args) > 2 else None)
        ends = [args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("start", "end"))]
        plain = all(isinstance(end, (int, float)) for end in ends) and "out" not in kwargs
        return _linspace if plain and isinstance(steps, TracedSize) else None
    if func is F.affine_grid:
        sizes = kwargs.get("size", args[1] if len(args) > 1 else ())
        return _affine_grid if any(isinstance(size, TracedSize) for size in sizes[2:]) else None
    pool = _POOL.fullmatch(getattr(func, "__name__", ""))
    return None if pool is None else _over_everything(pool[1], int(pool[2]), args, kwargs)


def _over_everything(
    kind: str, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Tensor] | None:
    names = ("input", "kernel_size", "stride", "padding", *(("dilation",) if kind == "max" else ()))
    given = dict(zip(names, args, strict=False)) | kwargs
    x, window = given["input"], given["kernel_size"]
    window = tuple(window) if isinstance(window, (tuple, list)) else (window,) * rank
    traced = any(isinstance(size, TracedSize) for size in window)
    plain = (
        len(args) <= len(names)
        and not any(_numbers(given.get("padding") or 0))
        and all(step == 1 for step in _numbers(given.get("dilation", 1)))
        and not given.get("return_indices")
        and given.get("divisor_override") is None
    )
    if not (traced and plain) or tuple(x.shape[-rank:]) != window:
        return None
    pool = getattr(F, f"adaptive_{kind}_pool{rank}d")
    return lambda *_, **__: pool(x, 1)


def _numbers(value: Any) -> Sequence[int]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _linspace(
    start: float, end: float, steps: int, *, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    made = torch.arange(steps, dtype=torch.get_default_dtype(), **more) * (end - start)
    points = made / (steps - 1) + start if steps > 1 else made + start
    return points if dtype is None else points.to(dtype)


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Returns the points of an image or a volume, transformed by matrices, as `F.affine_grid` does.

    Args:
        theta: the matrices, [N, axes, axes + 1].
        size: the size of the output, [N, C, *sizes].
        align_corners: whether the points -1 and 1 are the centers of the outermost pixels.

    Returns:
        [N, *sizes, axes]
    """
    sizes, axes = size[2:], len(size) - 2
    kind: dict[str, Any] = {"dtype": theta.dtype, "device": theta.device}
    columns = []
    for axis, count in enumerate(sizes):
        if align_corners:
            points = _linspace(-1.0, 1.0, count, **kind)
        else:
            points = (2 * torch.arange(count, **kind) + 1) / count - 1
        columns.append(points.reshape([-1 if i == axis else 1 for i in range(axes)]).expand(*sizes))
    columns = [*reversed(columns), torch.ones(tuple(sizes), **kind)]
    places = torch.stack(columns, -1).reshape(-1, axes + 1)
    return torch.matmul(places, theta.transpose(1, 2)).reshape(-1, *sizes, axes)
