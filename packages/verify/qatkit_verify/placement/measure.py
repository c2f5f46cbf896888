"""qatkit-measure FOLDER: times the files that `export.py placement=variants` wrote, on the machine that will run them.

    FOLDER/variants.json and *.onnx ── timed in turns ──> a printed table, and placement.json for training

Only numpy and onnxruntime are needed. The exit status is 0, or 2 for a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.files import write_text
from qatkit_verify.installed import check_onnxruntime
from qatkit_verify.placement.decide import chosen, measured, noise
from qatkit_verify.placement.machine import this_machine
from qatkit_verify.placement.quiet import timed_quietly
from qatkit_verify.placement.record import FLOAT, TABLE, Placed, write_placement
from qatkit_verify.placement.sites import Sites
from qatkit_verify.table import drawn
from qatkit_verify.typed import count
from qatkit_verify.untrusted import read_json

VARIANTS_FILE, PLACEMENT_FILE = "variants.json", "placement.json"
FORMAT = 1
_SESSIONS, _RUNS = 3, 40


@dataclass(frozen=True)
class Variant:
    """A file of the folder, with its SHA-256 and the operators that it places differently from the backend's table."""

    file: str
    sha256: str
    sites: Sites


@dataclass(frozen=True)
class Variants:
    """The contents of a folder.

    Attributes:
        model, backend, input_shape: the model, the backend and the shape (C, H, W) of one image.
        graph: a digest of the graph's operators and shapes.
        options: the backend's session config entries.
        files: the files by name, including FLOAT and TABLE (see `decide`).
    """

    model: str
    backend: str
    input_shape: tuple[int, ...]
    graph: str
    options: Mapping[str, str]
    files: Mapping[str, Variant]


def write_variants(folder: Path, found: Variants) -> None:
    """Writes variants.json as the last file of the folder, so that a folder without it is incomplete."""
    files = {
        name: {"file": one.file, "sha256": one.sha256, **one.sites.as_dict()}
        for name, one in found.files.items()
    }
    stored = {"format": FORMAT, "model": found.model, "backend": found.backend, "graph": found.graph,
              "input_shape": found.input_shape, "options": dict(found.options), "files": files}  # fmt: skip
    write_text(folder / VARIANTS_FILE, json.dumps(stored, indent=1) + "\n")


def read_variants(folder: Path) -> Variants:
    """Reads a folder, and compares each file with its digest.

    Raises:
        ConfigError: the folder or a file does not exist, a file differs from its digest, or variants.json is damaged
            or has another format.
    """
    allowed = "a folder that export.py placement=variants wrote"
    try:
        stored = read_json(folder / VARIANTS_FILE)
        found = _variants(stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing in {VARIANTS_FILE}" if isinstance(error, KeyError) else str(error)
        raise ConfigError("variants", folder, f"{allowed} ({reason})") from error
    for name, one in found.files.items():
        path = folder / one.file
        if not path.is_file():
            reason = f"{one.file} ({name}) is missing; copy the complete folder"
            raise ConfigError("variants", folder, reason=reason)
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != one.sha256:
                reason = f"{one.file} has other contents than when it was written; copy the folder again"
                raise ConfigError("variants", folder, reason=reason)
    return found


def _variants(stored: Any) -> Variants:
    if stored["format"] != FORMAT:
        raise ValueError(f"format {stored['format']}; this version reads format {FORMAT}")
    files = {}
    for name, one in stored["files"].items():
        if Path(one["file"]).name != one["file"]:
            raise ValueError(f"{one['file']!r} is not the name of a file in the folder")
        files[name] = Variant(one["file"], one["sha256"], Sites.from_dict(one))
    if missing := {FLOAT, TABLE} - files.keys():
        raise ValueError(f"{sorted(missing)[0]!r} is not among its files")
    return Variants(
        stored["model"],
        stored["backend"],
        tuple(stored["input_shape"]),
        stored["graph"],
        stored["options"],
        files,
    )


def measure(folder: Path, *, threads: int, batch: int, runs: int) -> Placed:
    """Times the files of a folder and returns the placement.

    Args:
        folder: the folder of the files.
        threads: the number of threads of ONNX Runtime.
        batch: the number of images per run.
        runs: the number of runs per file and session.

    Raises:
        ConfigError: see `read_variants`.
    """
    found = read_variants(folder)
    paths = {name: folder / one.file for name, one in found.files.items()}
    timed = timed_quietly(paths, found.input_shape, batch=batch, threads=threads, runs=runs, sessions=_SESSIONS,
                          options=found.options)  # fmt: skip
    best = chosen(timed, threads)
    files = tuple(
        measured(name, len(one.sites.floats), len(one.sites.opened), None, timed.ms)
        for name, one in found.files.items()
    )
    return Placed(found.model, found.backend, found.input_shape, found.graph, this_machine(threads, batch),
                  found.files[best].sites, files, best, noise(timed.ms), {}, timed.quiet, timed.waited)  # fmt: skip


def table(placed: Placed) -> list[str]:
    """Returns the table of the files, fastest first."""
    ms = placed.of(FLOAT).ms
    rows = [("file", "ms", "speed-up over fixed", "over float")]
    rows += [
        (one.name + ("  <- chosen" if one.name == placed.chosen else ""), f"{one.ms:.3f}",
         f"{one.ratio:.2f} [{one.low:.2f}-{one.high:.2f}]", f"{ms / one.ms:.2f}")
        for one in sorted(placed.files, key=lambda one: one.ms)
    ]  # fmt: skip
    return drawn(rows)


def main(typed: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser("qatkit-measure", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder that export.py placement=variants wrote")
    parser.add_argument("--threads", type=count, default=2, help="threads of ONNX Runtime (default: 2)")
    parser.add_argument("--batch", type=count, default=1, help="samples per run (default: 1)")
    parser.add_argument(
        "--runs", type=count, default=_RUNS, help=f"runs per file and session (default: {_RUNS})"
    )
    parser.add_argument("--output", type=Path, help=f"the file to write (default: FOLDER/{PLACEMENT_FILE})")
    given = parser.parse_args(typed)
    try:
        check_onnxruntime()
        placed = measure(given.folder, threads=given.threads, batch=given.batch, runs=given.runs)
        path = given.output or given.folder / PLACEMENT_FILE
        write_placement(path, placed)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = placed.machine
    where = (
        f"{machine.cpu}, {counted(machine.threads, 'thread')}, batch {machine.batch}, "
        f"ONNX Runtime {machine.onnxruntime}"
    )
    print(f"{placed.model}: {where}; ratios vary by {100 * placed.noise:.1f} % between sessions")
    print("\n".join(table(placed)))
    if placed.unrest():
        print(f"{placed.unrest()}; run the same command again when the machine is idle")
    if placed.of(placed.chosen).ms > placed.of(FLOAT).ms:
        print("the chosen file is slower than float here; keep the model in float on this machine")
    print(f"{path} is written; to train with it, run train.py placement={path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
