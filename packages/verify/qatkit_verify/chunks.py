"""Runs a file with states on a batch that is cut into chunks (`qatkit_verify.stream`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.free_run import FreeRun
from qatkit_verify.stream import stream_of

if TYPE_CHECKING:
    import onnxruntime as ort

_LENGTHS = (1, 4, 1, 9, 2)  # lengths of the chunks, repeated


def in_chunks(session: ort.InferenceSession, batch: Any) -> tuple[NDArray[Any], ...]:
    """Returns the outputs after the last chunk of a batch, without the states.

    Args:
        session: a session of a file with states.
        batch: a batch of complete inputs [N, ...], which is cut into chunks.

    Raises:
        ConfigError: the file does not say how chunks follow each other, or does not run on them.
    """
    how, whole = stream_of(session), np.asarray(batch, np.float32)
    sizes = {one.name: one.shape[1] for one in session.get_inputs() if one.name in how.states}
    (name,) = (one.name for one in session.get_inputs() if one.name not in how.states)
    run = FreeRun(session, how.states)
    run.begin({state: np.zeros((len(whole), size), np.float32) for state, size in sizes.items()})
    found: dict[str, NDArray[Any]] = {}
    for chunk in chunks(whole, how.axis):
        found = run.step({name: chunk})
    return tuple(value for output, value in found.items() if output not in how.states.values())


def chunks(batch: NDArray[Any], axis: int) -> Iterator[NDArray[Any]]:
    """Yields a batch in pieces of various lengths along `axis`, including single steps."""
    steps = batch.shape[axis]
    ends = list(takewhile(lambda end: end < steps, accumulate(cycle(_LENGTHS))))
    yield from np.split(batch, ends, axis)


def kept_db(whole: NDArray[Any], found: NDArray[Any]) -> float:
    """Returns the signal-to-noise ratio of `found`, with `whole` as the exact signal, in dB from -200 to 200.

    It is 200 for equal arrays. For others it is -200 if `whole` is all zeros, or if `found` is not finite.
    """
    noise = float(((whole.astype(np.float64) - found) ** 2).sum())
    power = float((whole.astype(np.float64) ** 2).sum())
    if noise == 0:
        return 200.0
    if not power or not np.isfinite(noise):
        return -200.0
    return float(np.clip(10 * np.log10(power / noise), -200, 200))
