"""The file sweep.json in a sweep's folder: it has the folder and cluster job of each run.

If a sweep was interrupted, the same command reads the file and continues the sweep, so that no run is repeated.

    multirun/A/sweep.json     seed=0: its folder, job 12_0     seed=1: ...          interrupted
    multirun/B/sweep.json     the same command again, which takes over A's runs

A sweep is recognized by its typed overrides. If it has ended and each of its runs has a report, the same command
starts a new sweep.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

from qatkit.records.run_files import REPORT_FILE
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_json

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Known:
    """The folder, cluster job and logs of a sweep's run, as far as they are known.

    Attributes:
        folder: the absolute path of the run's folder; "" for a run that finds its folder itself.
        job: the number of the Slurm job; "" on this machine.
        logs: the folder of the job's log files; "" on this machine.
    """

    folder: str = ""
    job: str = ""
    logs: str = ""


class SweepFile:
    """The file of one sweep, which is written after each change.

    Args:
        folder: the folder of the sweep.
        typed: the overrides of the sweep.

    Attributes:
        ended: whether the previous sweep of the same command has ended; False if there was none.
        runs: the known runs, by their `key`. At first these are the runs of the previous sweep, or none if it has
            ended and each of its runs has a report.
    """

    def __init__(self, folder: Path, typed: Sequence[str]) -> None:
        self.path, self.typed = folder / SWEEP_FILE, sorted(_kept(typed))
        before = _newest(folder, self.typed)
        self.ended = before is not None and before[0]
        self.runs = {} if before is None else before[1]
        if self.ended and all(map(_finished, self.runs.values())):
            self.runs = {}  # the previous sweep has ended, so this is a new one
        self._write(ended=False)

    def known(self, overrides: Sequence[str]) -> Known:
        """Returns what is known about a run; an empty `Known` if nothing is known."""
        return self.runs.get(key(overrides), Known())

    def note(self, overrides: Sequence[str], run: Known) -> None:
        """Records the folder, job and logs of a run."""
        self.runs[key(overrides)] = run
        self._write(ended=False)

    def end(self) -> None:
        """Records that all runs have been reported. On a full disk the sweep stays marked as interrupted."""
        with suppress(OSError):
            self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        runs = {name: asdict(run) for name, run in self.runs.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            self.path, json.dumps({"typed": self.typed, "ended": ended, "runs": runs}, indent=1) + "\n"
        )


def key(overrides: Sequence[str]) -> str:
    """Returns the text that identifies a run within its sweep."""
    return " ".join(sorted(_kept(overrides)))


def _kept(typed: Sequence[str]) -> list[str]:
    """Returns the overrides without those that only decide how a run starts and where it is queued."""
    return [one for one in typed if not one.lstrip("+~").startswith(("resume=", "hydra.", "hydra/"))]


def _finished(run: Known) -> bool:
    return bool(run.folder) and (Path(run.folder) / REPORT_FILE).is_file()


def _newest(folder: Path, typed: Sequence[str]) -> tuple[bool, dict[str, Known]] | None:
    """Returns whether the last sweep of the same command has ended, and its runs; None if there is no such sweep.

    Sweeps are searched in `folder` and in the folders next to it.
    """
    there = [path for path in {folder / SWEEP_FILE, *folder.parent.glob(f"*/{SWEEP_FILE}")} if path.is_file()]
    for path in sorted(there, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            found = read_json(path)
            if found["typed"] == list(typed):
                runs = {
                    name: Known(**{one: str(it) for one, it in run.items()})
                    for name, run in found["runs"].items()
                }
                return bool(found["ended"]), runs
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # the file belongs to another program
    return None


@dataclass
class _Sweep:
    typed: Sequence[str]
    file: SweepFile | None = None
    folder: str = ""


_SWEEP: ContextVar[_Sweep | None] = ContextVar("sweep", default=None)


@contextmanager
def sweeping(typed: Sequence[str] | None) -> Iterator[None]:
    """Sets the sweep whose file `sweep_file` returns within the context; None means that there is no sweep.

    The sweep counts as ended when the context ends, also by an error. SystemExit and KeyboardInterrupt (signals)
    do not end it, since its runs continue or are resumed later.
    """
    sweep = None if typed is None else _Sweep(tuple(typed))
    token, stopped = _SWEEP.set(sweep), False
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        stopped = True
        raise
    finally:
        _SWEEP.reset(token)
        if sweep is not None and sweep.file is not None and not stopped:
            sweep.file.end()


def sweep_file(folder: str | Path) -> SweepFile | None:
    """Returns the file of the current sweep, which the first call creates in `folder`.

    It is None outside of a sweep, and in a process that executes only one run of a sweep.
    """
    sweep = _SWEEP.get()
    if sweep is None:
        return None
    if sweep.file is None:
        sweep.file = SweepFile(Path(folder).absolute(), sweep.typed)
    return sweep.file


def own_folder(name: str) -> str:
    """Creates and returns the folder of this sweep: `name`, or `name_2` if another sweep of the same second has `name`.

    Without a sweep it returns `name`. A cluster node that executes one run gets the folder from the
    configuration that was composed here.
    """
    sweep = _SWEEP.get()
    if sweep is None:
        return name
    sweep.folder = sweep.folder or _made(name)
    return sweep.folder


def _made(name: str) -> str:
    """Creates and returns the folder with the first free name; if none can be created, Hydra reports why."""
    names = itertools.chain([name], (f"{name}_{again}" for again in itertools.count(2)))
    with suppress(OSError):
        return next(new for new in names if _is_new(Path(new)))
    return name


def _is_new(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True
