"""The one way in which a file is written: under a temporary name beside the target, then renamed.

    with whole(path) as temporary:      # .NAME.PROCESS.RANDOM.part, in the folder of `path`
        ...                             # write `temporary`, check it, load it

The target is whole or absent, or what it was before: a reader never finds half a file, and a run that is killed
leaves none. The temporary name starts with a dot and ends in `.part`, so no search for `*.onnx` or `*.ckpt`
finds it; two processes that write one target have two.
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
_NAME = 50  # characters, of up to four bytes each: a name of 255 bytes leaves no room for the rest
_PART = re.compile(rf"\..*\.(\d+)\.[0-9a-f]{{8}}{re.escape(PART)}")


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends, and goes away when it fails.

    The file that replaces has the permissions that a plain `open` for writing would leave: those of the file
    that was there, or those that the process gives new files.

    Args:
        path: the target, in a folder that exists.

    Yields:
        An empty file beside it, to write or to replace.

    Raises:
        OSError: the folder is not there, or can't be written; of a disk that is full, it names `path`.
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
    """Why `folder` can't be made or written to; "" where it can. Nothing stays of the trial.

    The place is tried by writing, since permission bits say little to root or on a network drive.
    """
    try:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if os.path.lexists(folder) and not folder.exists():
            raise OSError(0, "a link to nowhere")
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def no_room(path: Path) -> OSError | None:
    """The error of a file that is of no use any more and can't grow: not every library says why it could not write."""
    try:
        with path.open("ab") as stream:
            stream.write(bytes(_BLOCK))
    except OSError as error:
        full = disk_error(error)
        return None if full is None else OSError(full.errno, full.strerror, str(path))
    return None


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 text file, whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """Where things are kept that are made again when they are lost; it may not exist.

    Raises:
        RuntimeError: nobody knows the user's home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qatkit"


def unfinished(target: Path) -> Path:
    """A hidden name beside `target`, of this process alone, for what is to take its place."""
    return target.with_name(f".{target.name[:_NAME]}.{os.getpid()}.{secrets.token_hex(4)}{PART}")


def clear_parts(folder: Path) -> None:
    """Removes what killed processes left half-written in `folder`; what a living one writes stays."""
    for path in folder.glob(f".*{PART}"):
        named = _PART.fullmatch(path.name)
        if named and not lives(int(named[1])):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def lives(process: int) -> bool:
    """Whether there is a process of this number on this machine."""
    if os.name != "posix":
        return True  # there the question would be a signal
    try:
        os.kill(process, 0)
    except PermissionError:
        return True  # of another user
    except (OSError, OverflowError):
        return False
    return True
