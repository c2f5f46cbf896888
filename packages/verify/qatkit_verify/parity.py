"""Compares two ONNX files on the same inputs and writes parity_report.json: `qatkit-verify A.onnx B.onnx`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, noise_feeds
from qatkit_verify.npz import read_npz
from qatkit_verify.session import fixed_batch, in_its_batches, open_session

PARITY_FILE = "parity_report.json"
_IMAGES = 32


@dataclass(frozen=True)
class FileParity:
    """The distance of B's outputs from A's, over all outputs.

    Attributes:
        a, b: the paths of the files.
        max_abs_diff, mean_abs_diff: the maximum and the mean absolute difference over all values.
        cosine: the cosine similarity of all values as one vector; if those of a file are all zero, 1 if those
            of the other are as well, else 0.
        same_top1: the share of images whose first output has its largest value at the same position in both
            files.
        images: the number of rows of the first output.
        abs_tol, mean_tol: the bounds on max_abs_diff and mean_abs_diff; None: not checked.
        passed: whether both bounds are met.
    """

    a: str
    b: str
    max_abs_diff: float
    mean_abs_diff: float
    cosine: float
    same_top1: float
    images: int
    abs_tol: float | None
    mean_tol: float | None
    passed: bool


def file_parity(
    a: Path,
    b: Path,
    *,
    inputs: Path | None = None,
    abs_tol: float | None = None,
    mean_tol: float | None = None,
    threads: int = 2,
) -> FileParity:
    """Runs both files on the same inputs, in ONNX Runtime with all optimizations.

    Args:
        a, b: files with the same number of inputs and outputs, of the same shapes.
        inputs: an npz file with arrays by the names of A's inputs; B gets them in this order. None: noise.
        abs_tol, mean_tol: bounds on the largest and the mean absolute difference; None: no bound.
        threads: the number of threads of ONNX Runtime.

    Raises:
        ConfigError: a file does not load, the inputs do not fit a file, or the outputs differ in shape or contain
            NaN or infinity.
    """
    first, second = (open_session(path, threads=threads) for path in (a, b))
    given = (
        noise_feeds(first, None, seed=0, batch=fixed_batch(first) or _IMAGES)
        if inputs is None
        else _read(inputs)
    )
    names = [[one.name for one in session.get_inputs()] for session in (first, second)]
    if missing := [name for name in names[0] if name not in given]:
        raise ConfigError("inputs", inputs, f"an array for each input of {a.name}; {missing[0]} is missing")
    if len(names[0]) != len(names[1]):
        raise ConfigError(
            "onnx file", b, f"as many inputs as {a.name} ({len(names[0])}); found {len(names[1])}"
        )
    outputs = [_run(session, dict(zip(own, (given[name] for name in names[0]), strict=True)), path)
               for session, own, path in ((first, names[0], a), (second, names[1], b))]  # fmt: skip
    one, other = (np.concatenate([part.astype(np.float64).ravel() for part in found]) for found in outputs)
    shapes = [", ".join(str([*part.shape]) for part in found) for found in outputs]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "onnx file", b, f"outputs with the shapes of {a.name} ({shapes[0]}); found {shapes[1]}"
        )
    apart = np.abs(one - other)
    if not np.isfinite(apart).all():
        path = b if np.isfinite(one).all() else a
        raise ConfigError(
            "onnx file", path, reason="its outputs contain NaN or infinity, which cannot be compared"
        )
    largest, mean = float(apart.max(initial=0)), float(apart.mean()) if apart.size else 0.0
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    rows = [part.reshape(len(part), -1).argmax(1) for part in (outputs[0][0], outputs[1][0])]
    kept = [bound is None or value <= bound for value, bound in ((largest, abs_tol), (mean, mean_tol))]
    return FileParity(
        str(a), str(b), largest, mean, float(one @ other) / length if length else float(not apart.any()),
        float((rows[0] == rows[1]).mean()), len(rows[0]), abs_tol, mean_tol, all(kept),
    )  # fmt: skip


def parity_json(found: FileParity) -> str:
    """Returns the content of parity_report.json."""
    return json.dumps(asdict(found), indent=1) + "\n"


def _read(path: Path) -> dict[str, Array]:
    try:
        return read_npz(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("inputs", path, f"an npz file with one array per input ({reason})") from error


def _run(session: Any, given: Mapping[str, Array], path: Path) -> list[Array]:
    try:
        return list(in_its_batches(lambda feed: session.run(None, dict(feed)), given, fixed_batch(session)))
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "onnx file", path, reason=f"ONNX Runtime failed on the inputs ({reason})"
        ) from error
