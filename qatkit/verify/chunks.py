"""A file with states, run on a batch that is cut into chunks (`qatkit.records.stream`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.records.stream import METADATA_KEY, Stream
from qatkit_verify.free_run import FreeRun

if TYPE_CHECKING:
    import onnxruntime as ort

_LENGTHS = (1, 4, 1, 9, 2)  # of the chunks, again and again


def stream_of(session: ort.InferenceSession) -> Stream:
    """Returns how the chunks of a file with states follow each other."""
    return Stream.from_text(session.get_modelmeta().custom_metadata_map[METADATA_KEY])


def in_chunks(session: ort.InferenceSession, batch: Any) -> tuple[NDArray[Any], ...]:
    """Returns the outputs behind the last chunk of a batch, but for the states.

    Args:
        session: of a file with states.
        batch: what the whole file takes.
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
    """Yields a batch in pieces of various lengths, single steps among them."""
    steps = batch.shape[axis]
    ends = list(takewhile(lambda end: end < steps, accumulate(cycle(_LENGTHS))))
    yield from np.split(batch, ends, axis)


def kept_db(whole: NDArray[Any], found: NDArray[Any]) -> float:
    """Returns how far values are from the exact ones as a signal-to-noise ratio in dB, at most 200."""
    noise = float(((whole.astype(np.float64) - found) ** 2).sum())
    power = float((whole.astype(np.float64) ** 2).sum())
    return min(200.0, 10 * float(np.log10(power / noise))) if noise and power else 200.0
