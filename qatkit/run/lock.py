"""One run a folder: a lock that ends with its process, however that ends.

    folder/.lock    locked by fcntl while a run is at work, with its process and machine for whoever comes second

The lock is the process's (POSIX), so what it forks to load images does not hold it on, and a killed run's folder is
free at once. Another rank of a run asks for none. The file goes when the run ends; one that is left says nothing.
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
    """Within, no other run writes into `folder`; what killed ones left half-written in it is removed first.

    The folder is made if need be; one that was made, and is left empty, goes again.

    Raises:
        ConfigError: another run does.
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
        allowed = f"a folder that can be created and written ({error.strerror})"
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
    """An open file that is locked; None where the system or the disk knows no locks."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    path = folder / LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have removed the file in between: then nobody else would see this lock.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                with suppress(OSError):  # a full disk, of which those who write files will tell
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
                return descriptor
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            who = _holder(path)
            allowed = f"a folder that no other run is using ({who} is)"
            raise ConfigError("output_dir", folder, allowed) from error
        except FileNotFoundError:
            pass
        except OSError as error:
            warnings.warn(
                f"{folder} can't be locked ({error.strerror}): nothing keeps a second run from writing there",
                stacklevel=2,
            )
            return descriptor
        os.close(descriptor)


def at_work(folder: Path) -> bool | None:
    """Whether a run is at work in `folder`; None where that is unknown: on another machine, or without locks."""
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
