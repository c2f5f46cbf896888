"""A lock that allows one run per folder and ends with its process, however that ends.

    folder/.lock    locked by fcntl while a run is active, with its process and machine for the error of a second run

The lock belongs to the process (POSIX), so forked processes that load images do not hold it, and a killed
run's folder is free at once. Other ranks of a run take no lock. The file is removed when the run ends; a
remaining file means nothing.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qatkit_verify.errors import ConfigError
from qatkit_verify.files import clear_parts, lives

LOCK_FILE = ".lock"
_HELD: set[Path] = set()  # by this process: a climb's last run is in the climb's folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevents, within the context, that another run writes into `folder`, and removes half-written files of
    killed runs.

    The folder is created if needed; a created folder that stays empty is removed.

    Raises:
        ConfigError: another run uses the folder.
    """
    place = folder.absolute()
    if place in _HELD:
        yield
        return
    made = [path for path in (place, *place.parents) if not path.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        descriptor = _acquired(place)
    except OSError as error:
        allowed = f"a folder that can be created and written to ({error.strerror})"
        raise ConfigError("output_dir", folder, allowed) from error
    _HELD.add(place)
    try:
        clear_parts(place)
        yield
    finally:
        _HELD.discard(place)
        with suppress(OSError):  # whoever removed the folder has removed the file
            (place / LOCK_FILE).unlink()
        if descriptor is not None:
            os.close(descriptor)
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _acquired(folder: Path) -> int | None:
    """Returns the descriptor of a locked file; None where the system or the disk supports no locks."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    path = folder / LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous run may have removed the file in between: then nobody else would see this lock.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                with suppress(OSError):  # a full disk, which those who write files will report
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
                return descriptor
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            who = _holder(path)
            allowed = f"a folder that no other run is using; {who} is using it"
            raise ConfigError("output_dir", folder, allowed) from error
        except FileNotFoundError:
            pass
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}): do not start a second run there",
                stacklevel=2,
            )
            return descriptor
        os.close(descriptor)


def at_work(folder: Path) -> bool | None:
    """Returns whether a run is active in `folder`; None if unknown: on another machine, or without locks."""
    try:
        text = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return None
    number, _, host = text.removeprefix("process ").strip().partition(" on ")
    return lives(int(number)) if number.isdecimal() and host == platform.node() else None


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"
