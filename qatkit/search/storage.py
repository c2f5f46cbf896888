"""Stores a study's trials: in SQLite or a journal in its folder, or in a database for several machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from qatkit_verify.errors import ConfigError, disk_error, first_line
from qatkit_verify.installed import install_extra

DATABASE, JOURNAL = "study.db", "study.journal"
_BUSY = 120  # seconds for which SQLite waits for another worker
_LIBPQ = {
    "connect_timeout": 30,
    "tcp_user_timeout": 120_000,
    "keepalives_idle": 60,
    "keepalives_interval": 20,
}


class StorageError(ConfigError):
    """Raised if a storage stops answering; the worker ends, and its trial keeps its last stored state."""


def storage_of(where: str | None, folder: Path) -> BaseStorage:
    """Returns the storage for a study in `folder`.

    Args:
        where: `search.storage`: None for SQLite in the folder, "journal" for a journal there, or a database's URL.
        folder: the folder of the study.

    Raises:
        ImportError: the database's driver is missing.
        Exception: Optuna, SQLAlchemy, a driver or the disk failed.
    """
    if where == "journal":
        return JournalStorage(_Journal(folder / JOURNAL))
    if where is None:
        waiting = {"connect_args": {"timeout": _BUSY}}
        url = URL.create("sqlite", database=str(folder.absolute() / DATABASE)).render_as_string()
        return RDBStorage(url.replace("{", "{{").replace("}", "}}"), engine_kwargs=waiting)
    # During hours of training, servers may restart and firewalls may drop idle connections.
    return RDBStorage(where, engine_kwargs={"pool_pre_ping": True, "connect_args": _patience(where)})


def _patience(where: str) -> dict[str, int]:
    """Returns the time limits of PostgreSQL's driver for a broken network, except those that the URL sets.

    Returns an empty dict for other databases and drivers. With Linux's defaults, the driver waits a quarter
    of an hour for the confirmation of sent data (measured), and forever for an answer.
    """
    url = make_url(where)
    if url.get_backend_name() != "postgresql" or not url.get_driver_name().startswith("psycopg"):
        return {}
    return {key: value for key, value in _LIBPQ.items() if key not in url.query}


@contextmanager
def answering(where: str | None) -> Iterator[None]:
    """Turns errors of the storage within the context into a StorageError with a message of one line.

    Args:
        where: `search.storage`.

    Raises:
        StorageError: the storage failed. Disk errors, such as a full disk, are raised unchanged. So is any other
            OSError if the storage is not a journal, since it comes from the trials' folders.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        of_folders = isinstance(error, OSError) and where != "journal"
        if of_folders or disk_error(error) is not None:
            raise
        reason = f"the storage failed ({_cause(error)}); the same command continues the search"
        raise StorageError("search.storage", where or DATABASE, reason=reason) from error


def _cause(error: BaseException) -> str:
    """Returns the cause of an error in one line: the message of the driver if there is one, else that of the error."""
    below, told = error.__cause__ or error.__context__, first_line(error)
    while below is not None:
        told = first_line(below) if str(below).strip("() ") else told
        below = below.__cause__ or below.__context__
    return told


def driver(error: ImportError) -> str:
    """Returns the end of a message about a missing driver: the command that installs psycopg, or the driver's name."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "name", None) is None:
        cause = cause.__cause__ or cause.__context__
    name = getattr(cause, "name", None)
    return (
        f"; install it with {install_extra('postgresql')}"
        if name == "psycopg"
        else f" ({name or first_line(error)})"
    )


class _Journal(BaseJournalBackend):  # type: ignore[misc]  # Optuna's types are not checked
    """Optuna's journal file, in which every line is complete.

    A full disk or a kill may cut off a line. Optuna would append the next line to it, and the result could never be
    read. Therefore an incomplete line is removed before anything is written. This loses nothing, since the call that
    wrote it did not succeed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = JournalFileBackend(str(path), JournalFileSymlinkLock(str(path)))
        self._lock = self._file._lock

    def read_logs(self, log_number_from: int) -> Any:
        return self._file.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in logs).encode()
        self._lock.acquire()
        try:
            with self._path.open("r+b") as file:
                end = _end_of_lines(file)
                file.truncate(end)
                file.seek(end)
                try:
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
        finally:
            self._lock.release()


def _end_of_lines(file: Any) -> int:
    """Returns the position after the last complete line; reads the file in pieces, from its end."""
    end: int = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + int(found) + 1
        end = start
    return 0
