"""Writes files as all code of qatkit must: under a temporary name in the target's folder, then renamed.

    with whole(path) as temporary:      # .NAME.PROCESS.RANDOM.part, in the folder of `path`
        ...                             # write `temporary`, check it, load it

The target is complete, absent, or what it was before, even if the run is killed: a reader never finds half a
file. The temporary name starts with a dot and ends in `.part`, so that no search for `*.onnx` or `*.ckpt` finds
it. `clear_parts` removes the temporary files of killed runs. Two processes that write the same target use two
temporary names.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qatkit_verify.errors import disk_error

PART = ".part"
_BLOCK = 1 << 16  # bytes
_NAME = (
    50  # characters of the name that are kept, of up to four bytes each: file names have at most 255 bytes
)
_PART = re.compile(rf"\..*\.(\d+)\.[0-9a-f]{{8}}{re.escape(PART)}")


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Yields a temporary file's path; the file replaces `path` when the block ends, or is removed if the block fails.

    The new file has the permissions that a plain `open` for writing would leave: those of the previous file,
    or those that the process gives new files.

    Args:
        path: the target, in a folder that exists.

    Yields:
        An empty file in the same folder, to write or to replace.

    Raises:
        OSError: the folder does not exist or cannot be written to; for a full disk, the error names `path`.
    """
    target = Path(path)
    temporary = unfinished(target)
    try:
        temporary.touch(exist_ok=False)
        mode = (target if target.exists() else temporary).stat().st_mode & 0o7777
        yield temporary
        if temporary.stat().st_mode & 0o7777 != mode:
            temporary.chmod(mode)
        os.replace(temporary, target)
    except BaseException as error:
        full = (disk_error(error) or no_room(temporary)) if isinstance(error, Exception) else None
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if full is not None:
            raise OSError(full.errno, full.strerror, str(target)) from error
        raise


def not_writable(folder: Path) -> str:
    """Returns why `folder` cannot be created or written to, or "" if it can; leaves no traces.

    It tries to write, since permission bits say little for root or on a network drive.
    """
    try:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if os.path.lexists(folder) and not folder.exists():
            raise OSError(0, "a broken symbolic link")
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def no_room(path: Path) -> OSError | None:
    """Appends zeros to a file that is no longer needed; returns the disk's error if that fails, else None.

    This tells whether a library failed because the disk is full, if the library itself does not say so.
    """
    try:
        with path.open("ab") as stream:
            stream.write(bytes(_BLOCK))
    except OSError as error:
        full = disk_error(error)
        return None if full is None else OSError(full.errno, full.strerror, str(path))
    return None


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 text file, completely or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """Returns the folder for files that can be regenerated if they are lost; it may not exist.

    Raises:
        RuntimeError: the user's home folder is unknown.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qatkit"


def unfinished(target: Path) -> Path:
    """Returns a hidden name next to `target`, unique to this process, for the file that will replace it."""
    return target.with_name(f".{target.name[:_NAME]}.{os.getpid()}.{secrets.token_hex(4)}{PART}")


def clear_parts(folder: Path) -> None:
    """Removes incomplete files of killed processes from `folder`; files of running processes stay."""
    for path in folder.glob(f".*{PART}"):
        named = _PART.fullmatch(path.name)
        if named and not lives(int(named[1])):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def lives(process: int) -> bool:
    """Returns whether a process with this number exists on this machine; always True on other systems than POSIX."""
    if os.name != "posix":
        return True  # elsewhere, os.kill would send a signal
    try:
        os.kill(process, 0)
    except PermissionError:
        return True  # it belongs to another user
    except (OSError, OverflowError):
        return False
    return True
