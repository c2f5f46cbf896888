"""Comparison of files and models at sizes other than the example's (images, lengths, numbers of streams)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.capture.axis_sizes import FreeAxis
from zoo.compare import File, arrays, difference, leaves, snr
from zoo.entry import Entry, call

_SAMPLES = 8
_SIZES = 2  # in addition to the example's
_STEPS = (3, 5, -1, 7, -2, 1, 2, 32, 96, -32, 16, 8)
# An INT8 file computes something else if its SNR against the converted module is below _SAME_FILE, and is lower than at
# the example's size by more than _NEARER (dB).
_SAME_FILE, _NEARER = 20.0, 10.0


def at_other_sizes(
    entry: Entry,
    model: nn.Module,
    converted: fx.GraphModule,
    paths: tuple[Path, Path],
    free: tuple[FreeAxis, ...],
    *,
    rounding: Callable[[nn.Module, Any], float],
    near: float | None,
) -> dict[str, Any]:
    """Returns the names of the free axes, the number of other sizes that were compared, and what was wrong there.

    Args:
        entry: the model's entry, which makes the inputs.
        model: the float model.
        converted: the converted module.
        paths: the float file, which is compared with the model, and the INT8 file, which is compared with the converted
            module.
        free: the axes that may have any size in both files.
        rounding: returns the relative difference that rounding may cause in the model's outputs for a batch.
        near: the SNR of the INT8 file against the converted module at the example's size (dB).
    """
    found: dict[str, Any] = {"free_axes": [axis.name for axis in free], "sizes": 0, "wrong": []}
    if not free:
        return found
    files = File(paths[0], optimize=True), File(paths[1], optimize=False)
    for batch in _batches(entry, free):
        with torch.no_grad():
            try:
                exact = arrays(call(model, batch))
            except Exception:
                continue
            simulated = arrays(converted(*leaves(batch)))
        exact = exact[: len(simulated)]  # without auxiliary heads
        of_float, of_int8 = (file(batch) for file in files)
        at = ", ".join(str(list(one.shape)) for one in leaves(batch))
        if (line := difference(exact, of_float)) and (
            line := difference(exact, of_float, rounding(model, batch))
        ):
            found["wrong"].append(f"float file at {at}: {line}")
        distance = snr(simulated, of_int8)
        # Random weights can amplify rounding by any factor; the file is then as close to float as the module is.
        worse = (snr(exact, of_int8) or 0.0) < (snr(exact, simulated) or 0.0) - 1.0
        if distance is not None and distance < min(_SAME_FILE, (near or 0.0) - _NEARER) and worse:
            found["wrong"].append(f"file at {at}, against the converted module: {distance:.1f} dB")
        found["sizes"] += 1
        if found["sizes"] == _SIZES:
            break
    return found


def _batches(entry: Entry, free: tuple[FreeAxis, ...]) -> Iterator[Any]:
    """Yields inputs whose free axes have other sizes, each changed by a different amount; values are repeated."""
    for number, steps in enumerate(_STEPS):
        sizes: dict[tuple[int, int], int] = {}
        for place, axis in enumerate(free):
            size = axis.size + axis.step * (steps + (place if steps > 0 else 0))
            if size <= 0 or size == axis.size:
                break
            sizes |= dict.fromkeys(axis.places, size)
        else:
            yield _resized(entry.batch(_SAMPLES, 300 + number), sizes)


def _resized(batch: Any, sizes: Mapping[tuple[int, int], int]) -> Any:
    """Returns the batch with other sizes, given by the index of a tensor in `leaves` and its axis."""
    count = iter(range(len(leaves(batch))))

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            i = next(count)
            for axis in range(value.ndim):
                if (size := sizes.get((i, axis))) is not None:
                    value = value.index_select(axis, torch.arange(size) % value.shape[axis])
            return value
        if isinstance(value, Mapping):
            return {key: one(part) for key, part in value.items()}
        return type(value)(map(one, value)) if isinstance(value, (tuple, list)) else value

    return one(batch)
