"""The golden vectors of a bundle: a few test samples, and the outputs of the exported file for them.

images, recordings   stored decoded, and also as inputs of the file, all in one batch
arrays               stored as the feeds of each `InferenceSession.run`, since sizes may differ between samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qatkit.data import DataModule
from qatkit.data.preprocessing import decoded
from qatkit.data.recordings import in_unit
from qatkit_verify.bundle.golden import Golden, run_named, tolerances
from qatkit_verify.bundle.ports import Port
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.session import fixed_batch, in_its_batches, integer_io, open_session

# The step of boolean outputs and of integers wider than a byte, for arrays. A difference of one then exceeds the
# smallest tolerance.
_EXACT = 0.5


def golden_of(
    int8: Path, data: DataModule, count: int, step: float | None, *, threads: int, options: Mapping[str, str]
) -> Golden:
    """Returns test samples, and the file's outputs for them with and without ONNX Runtime's optimizations.

    Args:
        int8: the quantized file.
        data: the data whose test samples are used.
        count: the number of samples.
        step: the size of a quantization step of the first output, if it is float; None means 1/255 of its range, as
            for all other float outputs.
        threads, options: the settings of ONNX Runtime.

    Raises:
        ConfigError: an output of a model of arrays is not an array of numbers.
    """
    sessions = {
        name: open_session(int8, threads=threads, optimize=name == "on", options=options)
        for name in ("off", "on")
    }
    if data.of_arrays:
        return _of_arrays(sessions, data, count, step)
    images = data.golden_samples(count)
    inputs = feeds(sessions["on"], data.joined(images).numpy(), integer_io(sessions["on"]))
    names = [one.name for one in sessions["on"].get_outputs()]
    found = {
        name: dict(zip(names, _outputs(session, inputs), strict=True)) for name, session in sessions.items()
    }
    steps = {name: _step([found["on"][name]], step if name == names[0] else None) for name in names}
    own, other = tolerances(found["off"], found["on"], steps)
    raw = tuple(map(in_unit, images)) if data.recordings else tuple(map(decoded, images))
    pixels, sounds = ((), raw) if data.recordings else (raw, ())
    return Golden(pixels, inputs, found["off"], found["on"], steps, own, other, sounds=sounds)


def _outputs(session: Any, inputs: Mapping[str, Array]) -> Sequence[Array]:
    # Row by row, as most checks do, since the results of a dynamically quantized file depend on the batch.
    return in_its_batches(lambda given: session.run(None, dict(given)), inputs, fixed_batch(session) or 1)


def _of_arrays(sessions: Mapping[str, Any], data: DataModule, count: int, step: float | None) -> Golden:
    session = sessions["on"]
    names = [one.name for one in session.get_outputs()]
    runs = [feeds(session, one) for one in _batches(data, count, _samples_a_run(session, data))]
    found = {
        name: [dict(zip(names, map(np.asarray, one.run(None, run)), strict=True)) for run in runs]
        for name, one in sessions.items()
    }
    for name, value in found["on"][0].items():
        if value.dtype.kind not in "fiub":
            allowed = f"false, since the output '{name}' of type {value.dtype.name} has no numbers"
            raise ConfigError("export.bundle", True, allowed)
    worth = {
        name: _step([one[name] for one in found["on"]], step if name == names[0] else None, _EXACT)
        for name in names
    }
    steps = {f"{place}/{name}": worth[name] for place in range(len(runs)) for name in names}
    off, on = run_named(found["off"]), run_named(found["on"])
    own, other = tolerances(off, on, steps)
    return Golden((), runs[0], off, on, steps, own, other, tuple(runs))


def ports_of(session: Any, data: DataModule) -> tuple[list[Port], list[Port]]:
    """Returns the inputs and outputs of a file whose inputs are arrays; the batch axes of outputs are not known."""
    axes = list(data.array_axes().items())
    named, declared = dict(axes), session.get_inputs()
    inputs = [
        Port.of(one, named[one.name] if one.name in named else axes[place][1])
        for place, one in enumerate(declared)
    ]
    return inputs, [Port.of(one) for one in session.get_outputs()]


def _samples_a_run(session: Any, data: DataModule) -> int:
    """Returns how many samples the file accepts at once; 1 if the batch size is not fixed."""
    inputs, _ = ports_of(session, data)
    fixed = {port.shape[port.batch_axis] for port in inputs if port.batch_axis is not None}
    return next((size for size in fixed if size is not None), 1)


def _batches(data: DataModule, count: int, together: int) -> list[Any]:
    """Returns test samples in batches of `together`, the last one filled up with the first samples."""
    samples = data.golden_samples(count)
    samples += [samples[place % len(samples)] for place in range(-len(samples) % together)]
    return [data.joined(samples[start : start + together]) for start in range(0, len(samples), together)]


def _step(values: Sequence[Array], known: float | None, whole: float = 1.0) -> float:
    """Returns the quantization step of an output.

    It is 1 for 8-bit integers, and `whole` for wider integers and booleans. For floats it is `known`, otherwise 1/255
    of the range, or 1 if all values are equal.
    """
    if values[0].dtype.kind != "f":
        return 1.0 if values[0].dtype.kind != "b" and values[0].dtype.itemsize == 1 else whole
    low = min(float(one.min(initial=np.inf)) for one in values)
    high = max(float(one.max(initial=-np.inf)) for one in values)
    return known or max(high - low, 0.0) / 255 or 1.0
