"""Reads and writes golden.npz: a few samples, the file's inputs for them, and its expected answers.

    pixels_0 ..        uint8 [H, W, C], before any preprocessing (for models of images)
    samples_0 ..       float32 [T], before any preprocessing (for models of recordings)
    input:NAME         the file's inputs, [N, ...], by name
    off:NAME, on:NAME  the file's outputs where the bundle was made, computed by ONNX Runtime without and with
                       all optimizations
    runs               integer: the number of calls of the file, only for a model of arrays. Each NAME is then
                       RUN/NAME (runs from 0). The batch may be on any axis or missing, and sizes may differ
                       between runs
    step:NAME          float: the size of a quantization step of that output
    tolerance          float: number of steps by which ONNX Runtime may differ
    tolerance_other    float: the larger of `tolerance` and 8, for other runtimes, which may round after other
                       operators

ONNX Runtime's answers with and without optimizations may differ, for example in transformers, whose residual
stream is float. The tolerance for ONNX Runtime is therefore twice this difference plus one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.feeds import Array
from qatkit_verify.files import whole
from qatkit_verify.npz import read_npz

STEPS, STEPS_OTHER = 1.0, 8.0  # the minimum tolerances, in steps
_LARGEST = 2**31  # maximum size of the file in bytes; there are few golden vectors


@dataclass(frozen=True)
class Golden:
    """The contents of golden.npz.

    Attributes:
        pixels: the pixels of each image, uint8 [H, W, C]; empty if the inputs are not images.
        inputs: the file's inputs, arrays [N, ...] by name; for a model of arrays those of the first run.
        off, on: the file's outputs without and with optimizations, arrays [N, ...] by name. For a model of
            arrays they are the outputs of all runs, named RUN/NAME, run after run, in the file's order.
        steps: the size of a quantization step of each output.
        tolerance, tolerance_other: the tolerances of ONNX Runtime and of other runtimes, in steps.
        runs: the inputs of each run, by name; empty unless it is a model of arrays.
        sounds: the samples of each recording [T]; empty if the inputs are not recordings.
    """

    pixels: tuple[Array, ...]
    inputs: Mapping[str, Array]
    off: Mapping[str, Array]
    on: Mapping[str, Array]
    steps: Mapping[str, float]
    tolerance: float
    tolerance_other: float
    runs: tuple[Mapping[str, Array], ...] = ()
    sounds: tuple[Array, ...] = ()

    @property
    def raw(self) -> tuple[Array, ...]:
        """The pictures or recordings before any preprocessing; empty for a model of arrays."""
        return self.pixels or self.sounds


@dataclass(frozen=True)
class Away:
    """The distance from the golden answers.

    Attributes:
        steps: the largest difference over all outputs, in quantization steps; infinite if it is not finite.
        same: the number of samples whose first output has its maxima at the same positions as the golden one.
        images: the number of samples; 0 if the first output is a scalar.
    """

    steps: float
    same: int
    images: int


def tolerances(
    off: Mapping[str, Array], on: Mapping[str, Array], steps: Mapping[str, float]
) -> tuple[float, float]:
    """Returns the tolerances in steps for ONNX Runtime (from its answers `off`, `on`) and for other runtimes."""
    apart = max(_apart(on[name], off[name], steps[name]) for name in on)
    own = STEPS + 2 * apart
    return own, max(STEPS_OTHER, own)


def away(golden: Mapping[str, Array], steps: Mapping[str, float], found: Sequence[Array]) -> Away:
    """Compares the answers `found`, in the order of the outputs, with the golden ones.

    Raises:
        ConfigError: an answer has another shape than the golden one.
    """
    worst, same, images = 0.0, 0, 0
    for index, ((name, wanted), got) in enumerate(zip(golden.items(), found, strict=True)):
        if got.shape != wanted.shape:
            raise ConfigError(
                "golden", name, f"answers of shape {list(wanted.shape)}; found {list(got.shape)}"
            )
        worst = max(worst, _apart(got, wanted, steps[name]))
        if index == 0 and wanted.ndim:
            images, same = len(wanted), sum(map(_alike, got, wanted))
    return Away(worst, same, images)


def _apart(one: Array, other: Array, step: float) -> float:
    difference = np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0)
    return float(difference) / step if np.isfinite(difference) else float("inf")


def _alike(one: Array, other: Array) -> bool:
    """Returns whether two outputs for a sample have their maxima along the first axis at the same positions.

    Scalars must be equal.
    """
    return bool((one.argmax(0) == other.argmax(0)).all()) if one.ndim else bool(one == other)


def run_named(runs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns the arrays of several runs in one dictionary, by RUN/NAME."""
    return {f"{place}/{name}": one for place, run in enumerate(runs) for name, one in run.items()}


def write_golden(path: Path, golden: Golden) -> None:
    """Writes golden.npz; the same arrays give the same bytes."""
    arrays = {f"pixels_{index}": one for index, one in enumerate(golden.pixels)}
    arrays |= {f"samples_{index}": one for index, one in enumerate(golden.sounds)}
    inputs = run_named(golden.runs) or golden.inputs
    arrays |= {f"input:{name}": one for name, one in inputs.items()}
    if golden.runs:
        arrays["runs"] = np.asarray(len(golden.runs))
    arrays |= {f"off:{name}": one for name, one in golden.off.items()}
    arrays |= {f"on:{name}": one for name, one in golden.on.items()}
    arrays |= {f"step:{name}": np.asarray(one, np.float64) for name, one in golden.steps.items()}
    arrays |= {
        "tolerance": np.asarray(golden.tolerance),
        "tolerance_other": np.asarray(golden.tolerance_other),
    }
    with whole(path) as new, new.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_golden(path: Path) -> Golden:
    """Reads golden.npz.

    Raises:
        ConfigError: the file does not exist, or was not written by `write_golden`.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        return _golden(read_npz(path))
    except (OSError, ValueError, KeyError) as error:
        cause = getattr(error, "strerror", None) or error
        reason = f"{error} is missing" if isinstance(error, KeyError) else cause
        raise ConfigError(
            "golden", path, reason=f"the file has no valid golden vectors ({reason})"
        ) from error


def _golden(arrays: Mapping[str, Array]) -> Golden:
    def part(prefix: str) -> dict[str, Array]:
        return {key.removeprefix(prefix): one for key, one in arrays.items() if key.startswith(prefix)}

    def raw(prefix: str) -> tuple[Array, ...]:
        return tuple(arrays[f"{prefix}{index}"] for index in range(len(part(prefix))))

    runs = tuple(part(f"input:{place}/") for place in range(_runs(arrays)))
    found = Golden(
        raw("pixels_"),
        runs[0] if runs else part("input:"),
        part("off:"), part("on:"), {key: float(one) for key, one in part("step:").items()},
        float(arrays["tolerance"]), float(arrays["tolerance_other"]), runs, raw("samples_"),
    )  # fmt: skip
    if (
        not found.inputs
        or not found.on
        or found.on.keys() != found.off.keys()
        or found.on.keys() != found.steps.keys()
    ):
        raise ValueError("its inputs, outputs and steps do not match")
    if runs:
        _check_runs(found)
        return found
    lengths = {len(one) for part in (found.inputs, found.on, found.off) for one in part.values()}
    if len(lengths) != 1 or lengths == {0} or (found.raw and lengths != {len(found.raw)}):
        told = f"its arrays have {', '.join(map(str, sorted(lengths)))} rows"
        raise ValueError(told + (f" for {counted(len(found.raw), 'golden sample')}" if found.raw else ""))
    return found


def _runs(arrays: Mapping[str, Array]) -> int:
    count = int(arrays["runs"]) if "runs" in arrays else 0
    if not 0 <= count <= len(arrays):
        raise ValueError(f"its number of runs is {count}, but it has {counted(len(arrays), 'array')}")
    return count


def _check_runs(found: Golden) -> None:
    """Raises ValueError for runs whose inputs or outputs have other names than those of the first run."""
    names = [name.partition("/")[2] for name in found.on if name.startswith("0/")]
    wanted = [f"{place}/{name}" for place in range(len(found.runs)) for name in names]
    if list(found.on) != wanted or any(run.keys() != found.runs[0].keys() for run in found.runs):
        raise ValueError("its runs differ in their inputs or outputs")
