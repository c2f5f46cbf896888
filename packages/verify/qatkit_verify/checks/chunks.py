"""Checks whether the file for chunks, after the last chunk, agrees with the file for complete inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qatkit_verify.bundle.manifest import INT8_FILE
from qatkit_verify.checks.base import OK, SHORT, CheckInputs, Found
from qatkit_verify.chunks import in_chunks, kept_db
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.feeds import Array
from qatkit_verify.session import open_session, run_outputs
from qatkit_verify.stream import LEAST_DB, stream_file

NAME = "answers, in chunks"


def answers_in_chunks(asked: CheckInputs) -> list[Found]:
    """Compares the outputs after the last chunk of each golden input with those for the complete input.

    States are zero before the first chunk. A file that does not load or does not run in chunks falls short.
    Returns [] if the bundle has no file for chunks.
    """
    path = stream_file(asked.int8)
    if not path.is_file():
        return []
    try:
        return [_judged(path.name, _outputs(asked, path))]
    except ConfigError as error:  # the file does not load, or does not run in chunks
        return [Found(NAME, SHORT, f"{path.name} cannot run in chunks ({error})", _fix(path.name))]


def _outputs(asked: CheckInputs, path: Path) -> dict[str, list[tuple[Array, Array]]]:
    """Returns pairs by output name: for each golden sample, the value for the complete input and that for chunks."""
    whole, stream = (
        open_session(one, threads=asked.threads, options=asked.options) for one in (asked.int8, path)
    )
    names = [one.name for one in whole.get_outputs()]
    pairs: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    for given in asked.golden.runs or (asked.golden.inputs,):
        batch = _lone(given)
        exact, found = run_outputs(whole, batch), in_chunks(stream, batch)
        shapes = [", ".join(str([*one.shape]) for one in outputs) for outputs in (exact, found)]
        if shapes[0] != shapes[1]:
            reason = (
                f"its outputs after the last chunk have the shapes {shapes[1]}, and those of {INT8_FILE} have "
                f"{shapes[0]}"
            )
            raise ConfigError("onnx file", path.name, reason=reason)
        for name, *both in zip(names, exact, found, strict=True):
            pairs[name] += zip(*map(np.atleast_1d, both), strict=True)
    return pairs


def _lone(given: Mapping[str, Array]) -> Array:
    """Returns the single input; raises ConfigError if there are several."""
    if len(given) != 1:
        raise ConfigError("golden", ", ".join(given), "one input, which is cut into chunks")
    return next(iter(given.values()))


def _judged(name: str, pairs: Mapping[str, Sequence[tuple[Array, Array]]]) -> Found:
    """Judges the output with the lowest SQNR; if it is too low, names the golden sample where it is lowest."""
    kept = {output: kept_db(*map(np.stack, zip(*of_it, strict=True))) for output, of_it in pairs.items()}
    worst = min(kept, key=lambda output: kept[output])
    by_sample = [kept_db(*both) for both in pairs[worst]]
    apart = max(float(np.abs(np.subtract(*both, dtype=np.float64)).max(initial=0)) for both in pairs[worst])
    figures = {"file": name, "samples": len(by_sample), "sqnr_db": kept[worst], "max_abs_diff": apart}
    if kept[worst] >= LEAST_DB:
        near = f"SQNR {kept[worst]:.1f} dB (at least {LEAST_DB:g})" if apart else "bit-identical"
        return Found(
            NAME,
            OK,
            f"{name} against {INT8_FILE} on {counted(len(by_sample), 'sample')}: {near}",
            figures=figures,
        )
    place = int(np.argmin(by_sample))
    seen = (
        f"{name} against {INT8_FILE}: the SQNR of '{worst}' after the last chunk is {kept[worst]:.1f} dB, less than "
        f"{LEAST_DB:g} dB; the worst golden sample is number {place} ({by_sample[place]:.1f} dB)"
    )
    return Found(NAME, SHORT, seen, _fix(name), {**figures, "output": worst, "sample": place})


def _fix(name: str) -> str:
    return f"export the bundle again: {name} is damaged, or belongs to another file than {INT8_FILE}"
