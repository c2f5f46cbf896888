"""Golden vectors: a few test images as they were decoded, and what the file answers for them here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qatkit.data import DataModule
from qatkit_verify.bundle.golden import Golden, tolerances
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.session import fixed_batch, in_its_batches, integer_io, open_session


def golden_of(
    path: Path,
    data: DataModule,
    images: int,
    *,
    threads: int,
    options: Mapping[str, str],
    step: float | None = None,
) -> Golden:
    """Runs a file on `images` test images, without ONNX Runtime's optimizations and with all.

    Args:
        path: the INT8 file.
        data: whose test images; a seeded choice, balanced over the classes.
        images: how many.
        threads, options: of ONNX Runtime, as in verification.
        step: what a quantization step of the first float output is worth; None: a 255th of its range.
    """
    pixels, batch = data.golden_images(images)
    sessions = {
        name: open_session(path, threads=threads, optimize=name == "on", options=options)
        for name in ("off", "on")
    }
    inputs = feeds(sessions["on"], batch.numpy(), integer_io(sessions["on"]))
    names = [one.name for one in sessions["on"].get_outputs()]
    found = {
        name: dict(zip(names, _outputs(session, inputs), strict=True)) for name, session in sessions.items()
    }
    steps = {name: _step(found["on"][name], step if name == names[0] else None) for name in names}
    own, other = tolerances(found["off"], found["on"], steps)
    return Golden(tuple(pixels), inputs, found["off"], found["on"], steps, own, other)


def _outputs(session: Any, inputs: Mapping[str, Array]) -> Sequence[Array]:
    # Row by row, as most who check it ask: of a file that quantizes as it goes, the batch would decide.
    return in_its_batches(lambda given: session.run(None, dict(given)), inputs, fixed_batch(session) or 1)


def _step(values: Array, known: float | None) -> float:
    if values.dtype.kind != "f":
        return 1.0
    return known or float(np.ptp(values)) / 255 or 1.0
