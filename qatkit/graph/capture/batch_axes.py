"""Finds the batch axis of each input: the one along which samples are independent.

Usually that is the first axis. Sequences [T, N, F], states [layers, N, hidden] and the like have it elsewhere, and a
run with another number of frames may work as well as one with another number of samples. A model of sequences or of
several inputs is therefore run twice with a small batch. Only the last sample differs between the two runs, so the
outputs for the other samples must not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from qatkit.graph.signature import batch_axes, batch_size, other_values, resized

Axes = tuple[int | None, ...]
_IMAGES = 4  # number of axes of a batch of images, whose first axis is the batch
_MOST = 12  # largest number of combinations of axes that are tried


def independent_axes(
    model: nn.Module, tensors: Sequence[Tensor], run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]]
) -> Axes | None:
    """Returns the axis of each input along which samples are independent.

    Returns None if these are the usual axes, if none are found, and for a model whose only input has four or more
    axes. Later axes of the first input are tried only if a layer of the model has `batch_first=False`. Otherwise a
    wrong axis might be found for a model that mixes the samples of a batch, since it may treat the values along
    another axis independently.

    Args:
        model: the model, whose layers are searched for `batch_first=False`.
        tensors: the tensors of the example.
        run: a function that returns the outputs of the model in inference mode.
    """
    usual = batch_axes(tensors)
    first = next((i for i, tensor in enumerate(tensors) if tensor.ndim), None)
    if (
        first is None
        or (len(tensors) == 1 and tensors[0].ndim >= _IMAGES)
        or _independent(tensors, usual, run)
    ):
        return None
    time_first = any(getattr(module, "batch_first", True) is False for module in model.modules())
    others = (axes for axes in _choices(tensors, first, 3 if time_first else 1) if axes != usual)
    found = (axes for axes in itertools.islice(others, _MOST) if _independent(tensors, axes, run))
    return next(found, None)


def _choices(tensors: Sequence[Tensor], first: int, most: int) -> Iterator[Axes]:
    """Yields candidates for the batch axes, one axis or None per input.

    For each of the first `most` axes of input `first`, every other input gets an axis of the same size, if it has one.
    """
    for axis in range(min(tensors[first].ndim, most)):
        size = tensors[first].shape[axis]
        options: list[list[int | None]] = [
            [axis] if i == first else [*(a for a, n in enumerate(tensor.shape) if n == size)] or [None]
            for i, tensor in enumerate(tensors)
        ]
        yield from itertools.product(*options)


def _independent(
    tensors: Sequence[Tensor], axes: Axes, run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]]
) -> bool:
    count = 3 if batch_size(tensors, axes) == 2 else 2  # another batch size than the example's
    given = other_values(resized(tensors, count, axes), seed=1)
    changed = tuple(
        tensor if axis is None else _with_another_last(tensor, axis)
        for tensor, axis in zip(given, axes, strict=True)
    )
    try:
        before, after = run(given), run(changed)
    except Exception:  # a forward may raise anything: it accepts no other batch along these axes
        return False
    return len(before) > 0 and all(_last_alone(*pair, count) for pair in zip(before, after, strict=True))


def _with_another_last(tensor: Tensor, axis: int) -> Tensor:
    new = tensor.clone()
    (other,) = other_values((tensor.select(axis, -1),), seed=2)
    new.select(axis, -1).copy_(other)
    return new


def _last_alone(before: Tensor, after: Tensor, count: int) -> bool:
    """Returns whether an output has an axis along which at most the last of `count` equal parts changed."""
    if before.shape != after.shape:
        return False
    if before.is_floating_point():
        scale = before[before.isfinite()].abs().amax() if before.isfinite().any() else torch.ones(())
        moved = ~torch.isclose(before, after, rtol=0, atol=float(scale) * 1e-5, equal_nan=True)
    else:
        moved = before != after
    kept = [
        (axis, size // count * (count - 1)) for axis, size in enumerate(before.shape) if size % count == 0
    ]
    return any(size and not moved.narrow(axis, 0, size).any() for axis, size in kept)
