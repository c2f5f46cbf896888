"""Takes the models of the list through the chain, each in its own process, and stores the results.

The parent process imports everything once and forks, so that a model that crashes or hangs affects only its own row,
and no model spends time on importing torch. Each row is stored at once, so that a stopped run can continue.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing as mp
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from qatkit_verify.files import write_text
from zoo import GROUPS, entries
from zoo.entry import Entry

Rows = dict[str, Any]


@dataclass
class Running:
    """A running process that measures a model."""

    entry: Entry
    process: BaseProcess
    started: float
    result: Path


def chosen(patterns: Sequence[str]) -> list[Entry]:
    """Returns the models that match a pattern, such as "odd/yolo_v8", "odd" or "timm/*net*".

    Without patterns it returns all models.

    Raises:
        SystemExit: a pattern matches no model.
    """
    groups = [
        g for g in GROUPS if not patterns or any(fnmatch.fnmatchcase(g, p.split("/")[0]) for p in patterns)
    ]
    listed = [entry for group in groups for entry in entries(group)]
    for pattern in patterns:
        if not any(_named(entry, pattern) for entry in listed):
            sys.exit(f"--models {pattern}: no model matches; the groups are {', '.join(GROUPS)}")
    return [e for e in listed if not patterns or any(_named(e, p) for p in patterns)]


def _named(entry: Entry, pattern: str) -> bool:
    return fnmatch.fnmatchcase(entry.name, pattern) or fnmatch.fnmatchcase(entry.name, f"{pattern}/*")


def run(wanted: Sequence[Entry], record: Path, *, jobs: int, limit: float, again: bool) -> Rows:
    """Measures the models that are not recorded yet, and returns all recorded rows.

    Args:
        wanted: the models.
        record: the JSON file of rows by name.
        jobs: the number of processes at a time.
        limit: the time limit of one model, in seconds.
        again: whether to measure recorded models again.
    """
    rows: Rows = json.loads(record.read_text()) if record.is_file() else {}
    left = [entry for entry in wanted if again or entry.name not in rows]
    if left:
        _warm()
    with tempfile.TemporaryDirectory() as folder:
        for done, (entry, row) in enumerate(_measured(left, Path(folder), jobs, limit), 1):
            rows[entry.name] = row
            said = row.get("error") or "; ".join(row.get("wrong", [])) or _figures(row)
            print(f"[{done}/{len(left)}] {entry.name}: {row['status']}, {row['seconds']:.0f} s; {said[:300]}",
                  file=sys.stderr, flush=True)  # fmt: skip
            write_text(record, json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return rows


def _figures(row: Rows) -> str:
    loss = "-" if row.get("snr") is None else f"{row['snr']:.1f} dB"
    return f"{100 * row['int8_share']:.1f} % int8, {loss}, size {row['size_ratio']:.2f}"


def _warm() -> None:
    """Imports what every model needs, on one thread, so that forking is safe; an export imports the exporter."""
    import torch

    from qatkit.export.torch_to_onnx import export_onnx

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as quiet, redirect_stdout(quiet):
        export_onnx(torch.nn.Linear(2, 2), torch.zeros(2, 2), Path(folder) / "warm.onnx")


def _measured(left: Sequence[Entry], folder: Path, jobs: int, limit: float) -> Iterator[tuple[Entry, Rows]]:
    """Yields the entry and row of each model when its process ends or exceeds the time limit."""
    waiting, running = list(left), list[Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), folder))
        time.sleep(0.1)
        for one in list(running):
            late = time.monotonic() - one.started > limit
            if one.process.is_alive() and not late:
                continue
            running.remove(one)
            yield one.entry, _ended(one, limit)


def _start(entry: Entry, folder: Path) -> Running:
    result = folder / f"{entry.name.replace('/', '_')}.json"
    process = mp.get_context("fork").Process(target=_one, args=(entry, result))
    process.start()
    return Running(entry, process, time.monotonic(), result)


def _one(entry: Entry, result: Path) -> None:
    import torch

    from zoo.measure import measure

    torch.set_num_threads(1)  # set again, since the thread pool does not survive a fork
    with open("/dev/null", "w") as quiet, redirect_stdout(quiet):  # the exporter prints its progress
        row = measure(entry)
    result.write_text(json.dumps(row))


def _ended(one: Running, limit: float) -> Rows:
    """Ends a process; returns the row that it wrote, or one with the reason why it wrote none."""
    if one.process.is_alive():
        one.process.kill()
    one.process.join()
    if one.result.is_file():
        found: Rows = json.loads(one.result.read_text())
        return found
    code = one.process.exitcode or 0
    why = (
        f"not finished after {limit:.0f} s" if time.monotonic() - one.started > limit else f"exit code {code}"
    )
    if code < 0 and "exit" in why:
        why = f"killed by {signal.Signals(-code).name}"
    return {
        "status": "killed",
        "error": why,
        "seconds": time.monotonic() - one.started,
        "about": one.entry.about,
    }
