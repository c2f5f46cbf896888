"""Finds the folders of runs and reads their files.

    report.json                       a finished run with its results
    config.yaml or rescue.yaml only   a run that was stopped or is still running
    manifest.json inside a run        the run's bundle, which has a copy of the report and is skipped

The files may come from anywhere. If a report.json cannot be read, or was not written by `qatkit.report`, the row of
its run says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qatkit.records.comparison import BROKEN, MET, SHORT, UNFINISHED, Row
from qatkit.records.figures import figures_of
from qatkit.records.run_files import CLIMB_FILE, CONFIG_FILE, PAGE_FILE, REPORT_FILE, last_checkpoint
from qatkit.report.record import SCHEMA
from qatkit_verify.bundle.manifest import MANIFEST
from qatkit_verify.classification import names_of
from qatkit_verify.errors import counted, first_line, printable
from qatkit_verify.records import TaskNames
from qatkit_verify.untrusted import read_json, read_yaml

_CONFIGURED = (CLIMB_FILE, CONFIG_FILE)


def runs_below(root: Path) -> list[Row]:
    """Returns the runs in `root` and below, sorted by recipe and folder.

    Links and hidden folders are skipped. A folder that cannot be read has a row with the state BROKEN.
    """
    rows: list[Row] = []

    def unreadable(error: OSError) -> None:
        folder = _relative(Path(error.filename), root)
        rows.append(Row(folder, BROKEN, f"the folder can't be read ({error.strerror})"))

    for place, folders, files in os.walk(root, onerror=unreadable):
        folder = Path(place)
        is_run = bool({REPORT_FILE, *_CONFIGURED} & {*files, *folders})
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and not (is_run and (folder / name / MANIFEST).is_file())
        ]
        if is_run and (row := row_of(folder, root)) is not None:
            rows.append(row)
    return in_order(rows)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows sorted by recipe and folder."""
    return sorted(rows, key=lambda row: (row.recipe, row.folder))


def row_of(folder: Path, root: Path) -> Row | None:
    """Returns the row of the run in `folder`; None if the folder contains no run.

    A run whose report.json cannot be read has the state BROKEN.
    """
    name = _relative(folder, root)
    if not os.path.lexists(folder / REPORT_FILE):
        return _unfinished(folder, name)
    try:
        report = read_json(folder / REPORT_FILE)
        if not isinstance(report, dict):
            raise ValueError("it was not written by a run")
        if report.get("schema") != SCHEMA:
            raise ValueError(f"it has schema {report.get('schema')}, but this version reads schema {SCHEMA}")
        return _finished(report, folder, name)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
    return Row(name, BROKEN, f"{REPORT_FILE}: {printable(reason, 200)}", page=_has_page(folder))


def _unfinished(folder: Path, name: str) -> Row | None:
    """Returns the row of a run without a report; None if `folder` has no readable configuration of qatkit."""
    import yaml  # only needed for runs without a report

    path = next((path for one in _CONFIGURED if (path := folder / one).is_file()), None)
    if path is None:
        return None
    try:
        config = yaml.safe_load(read_yaml(path))
        described = {
            "recipe": _text(config["name"]),
            "backend": _backend(config),
            "model": config["model"]["name"],
        }
        known = isinstance(config["export"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return None
    checkpoint = last_checkpoint(folder)
    why = "stopped or still running" + (
        f"; {checkpoint.name} is there" if checkpoint else "; no checkpoint yet"
    )
    return Row(name, UNFINISHED, why, **described) if known else None


def _finished(report: Mapping[str, Any], folder: Path, name: str) -> Row:
    found = figures_of(report)
    shortfalls = [_text(line) for line in report["shortfalls"]]
    return Row(
        name,
        SHORT if shortfalls else MET,
        "; ".join(shortfalls),
        recipe=_text(report["name"]),
        backend=_backend(report["config"]),
        model=_text(report["model"]),
        page=_has_page(folder),
        task=names_of(report),
        data=_data(report["config"], found.images, names_of(report)),
        machine=_machine(report.get("hardware"), report["latency"].get("int8") or {}),
        **vars(found),
    )  # fmt: skip


def _data(config: Mapping[str, Any], count: int, task: TaskNames) -> str:
    """Returns the data and the number of samples, since metrics on different data cannot be compared."""
    data = config["data"]
    source = str(data.get("source")).rpartition(".")[2]
    root = Path(str(data["root"])).name if data.get("root") else ""
    return f"{source} {root}".strip() + (f", {counted(count, task.sample)}" if count else "")


def _machine(hardware: Mapping[str, Any] | None, latency: Mapping[str, Any]) -> str:
    if hardware is None or not latency:
        return ""
    return f"{hardware['cpu']}, {counted(latency['threads'], 'thread')}, batch {latency['batch']}"


def _backend(config: Mapping[str, Any]) -> str:
    return _text(config["backend"]["target"]).rpartition(".")[2].lower()


def _has_page(folder: Path) -> bool:
    return (folder / PAGE_FILE).is_file()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return printable(value)


def _relative(folder: Path, root: Path) -> str:
    return Path(os.path.relpath(folder, root)).as_posix()
