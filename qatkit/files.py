"""The one way in which a file is written: under a temporary name beside the target, then renamed.

    with whole(path) as temporary:      # .NAME.PROCESS.RANDOM.part, in the folder of `path`
        ...                             # write `temporary`, check it, load it

The target is whole or absent, or what it was before: a reader never finds half a file, and a run that is killed
leaves none. The temporary name starts with a dot and ends in `.part`, so no search for `*.onnx` or `*.ckpt`
finds it; two processes that write one target have two.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
        OSError: the folder is not there, or can't be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)
        mode = (target if target.exists() else temporary).stat().st_mode & 0o7777
        yield temporary
        if temporary.stat().st_mode & 0o7777 != mode:
            temporary.chmod(mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def not_writable(folder: Path) -> str:
    """Why `folder` can't be made or written to; "" where it can. Nothing stays of the trial.

    The place is tried by writing, since permission bits say little to root or on a network drive.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        if os.path.lexists(folder) and not folder.exists():
            raise OSError(0, "a link to nowhere")
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        return error.strerror or str(error)
    return ""


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
