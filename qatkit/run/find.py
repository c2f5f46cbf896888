"""Finds the folder that a run writes to, and the unfinished run that it continues.

The files in a run's folder show its progress:

1. `config.yaml`
2. a checkpoint for each training stage, the partial result of an algorithm before it, or the record of a rescue
3. `report.json` after the verification
4. the bundle, if one is requested and all bounds are met

`resume=auto` searches for a folder that has (2), still lacks (3) or (4), and whose (1) equals the current
configuration. This module does not import torch, since the command line calls it before torch is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from qatkit.config.compose import load_config
from qatkit.config.schema import Config
from qatkit.records.run_files import (
    CLIMB_FILE,
    CONFIG_FILE,
    HANDED_OVER,
    last_checkpoint,
    partial_results,
    report_of,
)
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import not_writable

OUTPUTS, SEARCH = Path("outputs"), "search"


def output_dir(config: Config, job: int | None = None) -> Path:
    """Returns the run's folder: `config.output_dir`, or a new outputs/NAME/DATE_TIME (_JOB in a sweep).

    A search uses outputs/NAME/search, which every worker opens again.

    Nothing is created; only the write access is checked.

    Raises:
        ConfigError: the folder could not be created or written.
    """
    if config.output_dir is not None:
        folder = Path(config.output_dir)
    elif config.search.trials:
        folder = OUTPUTS / config.name / SEARCH
    else:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + ("" if job is None else f"_{job}")
        names = itertools.chain([stamp], (f"{stamp}_{again}" for again in itertools.count(2)))
        every = OUTPUTS / config.name
        folder = next(new for name in names if not (new := every / name).exists())  # a clock may be set back
    if reason := not_writable(folder):
        raise ConfigError("output_dir", folder, f"a folder that can be created and written to ({reason})")
    return folder


def place(config: Config, job: int | None = None) -> Path:
    """Returns the folder of a run that will begin: with resume=auto that of an unfinished run, else `output_dir`.

    If there is no unfinished run to continue, resume=auto has no effect.

    Raises:
        ConfigError: `output_dir` raises it.
    """
    return _unfinished(config) or output_dir(config, job)


def _unfinished(config: Config) -> Path | None:
    """Returns the folder of the unfinished run that resume=auto continues, or None."""
    resumes = config.resume == "auto" and not config.search.trials  # a search continues by itself
    found = find_resume(config) if resumes else None
    return None if found is None else found[0]


@contextmanager
def taken(config: Config, job: int | None = None) -> Iterator[Path]:
    """Yields the folder that `place` returns, and creates a new one, so that simultaneous runs get different folders.

    A folder that was created here and stays empty is removed.

    Raises:
        ConfigError: `place` raises it.
    """
    unfinished = _unfinished(config)
    if unfinished is not None or config.output_dir is not None or config.search.trials:
        yield unfinished or output_dir(config, job)
        return
    made = list[Path]()
    while not made:
        folder = output_dir(config, job)
        absent = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            made = absent
        except FileExistsError:  # another run began in the same second
            continue
        except OSError as error:
            allowed = f"a folder that can be created and written to ({error.strerror})"
            raise ConfigError("output_dir", folder, allowed) from error
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def finished(config: Config, folder: Path) -> bool:
    """Returns whether `folder` contains a finished run of this configuration."""
    return _done(config, folder) and _same_run(config, _asked(folder))


def _done(config: Config, folder: Path) -> bool:
    """Returns whether a run of `config` in `folder` is complete.

    It then has a report and, if a bundle is requested and the report names no missed bound, a bundle.
    """
    report = report_of(folder)
    if report is None:
        return False
    left = config.export.bundle and not report.get("shortfalls")
    return not left or any((folder / name).exists() for name in HANDED_OVER)


def begun_as(config: Config, folder: Path) -> bool:
    """Returns whether a run of this configuration may use `folder`: no other run was started there."""
    asked = _asked(folder)
    return not asked.is_file() or _same_run(config, asked)


def find_resume(config: Config) -> tuple[Path, Path] | None:
    """Returns the folder of the unfinished run that `resume=auto` continues, and the file that shows its progress.

    That file is the latest checkpoint, an algorithm's partial result, or the record of a climb. The result is None
    if there is no such run.

    The search covers `config.output_dir` and every outputs/NAME/*. A run can be continued if it is not complete
    (`_done`) and has a stage's checkpoint, an algorithm's partial result or the record of a climb. The configuration
    that it was started with must equal `config` except for `resume` and `output_dir`. The newest such run is
    returned.
    """
    folders = {path.parent.resolve() for path in (OUTPUTS / config.name).glob(f"*/{CONFIG_FILE}")}
    if config.output_dir is not None:
        folders.add(Path(config.output_dir).resolve())
    checkpoints = [
        checkpoint
        for folder in folders
        if not _done(config, folder) and (checkpoint := _newest(folder)) is not None
    ]
    for checkpoint in sorted(checkpoints, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if _same_run(config, _asked(checkpoint.parent)):
            return checkpoint.parent, checkpoint
    return None


def going_on(config: Config) -> Config:
    """Returns `config` changed to resume the run in its folder, if there is a checkpoint or the record of a climb."""
    folder = Path(config.output_dir or ".")
    if (folder / CLIMB_FILE).is_file():
        return replace(config, resume="auto")
    checkpoint = last_checkpoint(folder)
    return config if checkpoint is None else replace(config, resume=str(checkpoint))


def _newest(folder: Path) -> Path | None:
    if (folder / CLIMB_FILE).is_file():
        return folder / CLIMB_FILE
    return last_checkpoint(folder) or next(iter(partial_results(folder)), None)


def _asked(folder: Path) -> Path:
    """Returns the path of the configuration that the run was started with."""
    climb = folder / CLIMB_FILE
    return climb if climb.is_file() else folder / CONFIG_FILE


def _same_run(config: Config, saved: Path) -> bool:
    """Returns whether the file `saved` contains `config`, apart from `resume` and `output_dir`.

    False for a file that is missing or does not fit the schema.
    """
    try:
        other = load_config(saved)
    except ConfigError:
        return False
    in_order = list(other.algorithm.items()) == list(
        config.algorithm.items()
    )  # dictionaries are equal in any order
    return in_order and replace(other, resume=None, output_dir=None) == replace(
        config, resume=None, output_dir=None
    )
