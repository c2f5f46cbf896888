"""A lock that allows one run per folder. It ends with its process, even if that is killed.

    folder/.lock    locked by fcntl while a run is active, with its process and machine for the error of a second run

The lock belongs to the process (POSIX). Forked processes that load images therefore do not have it, and the
folder of a killed run is free at once. Only rank 0 takes the lock. The file is removed when the run ends; a
file that remains without a lock has no effect.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qatkit.warning import warn
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import clear_parts, lives

LOCK_FILE = ".lock"
_HELD: set[Path] = set()  # folders locked by this process: the last run of a climb uses the climb's folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of `folder` within the context, and removes half-written files of killed runs.

    The folder is created if needed. A folder that was created here and stays empty is removed.

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
        with suppress(OSError):  # the folder was removed together with the file
            (place / LOCK_FILE).unlink()
        if descriptor is not None:
            os.close(descriptor)
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _acquired(folder: Path) -> int | None:
    """Returns the descriptor of the locked file; None if the system or the disk does not support locks."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    path = folder / LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous run may have removed the file in the meantime. Other processes would not see a lock
            # on it.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                with suppress(OSError):  # a full disk: the stages that write files will report it
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
            warn(
                f"{folder} cannot be locked ({error.strerror}): do not start a second run there",
            )
            return descriptor
        os.close(descriptor)


def at_work(folder: Path) -> bool | None:
    """Returns whether a run is active in `folder`.

    None means unknown: the lock file cannot be read, or names another machine or no process.
    """
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
