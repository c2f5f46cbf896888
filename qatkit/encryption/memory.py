"""Temporary files in memory: a folder of a tmpfs that takes the place of /tmp, for this process and its children.

ONNX Runtime, the exporter and OpenVINO want files with names, in the clear. So `tempfile` and TMPDIR lead into a folder
that no disk ever holds. It goes at the end of the job; where the process is killed, its guard removes it; where both
are killed, its bytes are memory still, and the next encrypted run of that user removes them, by the lock that nobody
holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qatkit.encryption import guard
from qatkit.encryption.cipher import KEY_SETTING
from qatkit_verify.errors import ConfigError

_PREFIX = "qatkit-in-memory-"
_LOCK = ".lock"
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")


@contextmanager
def temporary_files_in_memory(key_file: str) -> Iterator[Path]:
    """All temporary files of the block are in a folder in memory, which goes with it.

    Args:
        key_file: for the message, where there is no such folder.

    Raises:
        ConfigError: no folder in memory is known on this machine.
    """
    place = _folder_in_memory(key_file)
    import fcntl  # where there are such folders there are these
    import resource

    _clear_left(place)
    new = Path(tempfile.mkdtemp(prefix="qatkit-", dir=place))
    held = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)
    folder = new.rename(place / new.name.replace("qatkit-", _PREFIX))  # locked from its first moment
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))  # a core dump is a file of all memory
    watching = subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-I", guard.__file__, str(folder), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = (tempfile.tempdir, os.environ.get("TMPDIR"))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR")
        os.environ.update({} if before[1] is None else {"TMPDIR": before[1]})
        shutil.rmtree(folder, ignore_errors=True)
        watching.wait()
        os.close(held)
        resource.setrlimit(resource.RLIMIT_CORE, limits)


def _folder_in_memory(key_file: str) -> Path:
    """The folder of temporary files, where that is in memory, else /dev/shm."""
    for place in (Path(tempfile.gettempdir()), Path("/dev/shm")):  # noqa: S108 - our folder in it is for us alone
        if _file_system(place) in _IN_MEMORY and os.access(place, os.W_OK | os.X_OK):
            return place
    allowed = "null without a writable folder in memory (tmpfs): /dev/shm, or the one that TMPDIR names"
    raise ConfigError(KEY_SETTING, key_file, allowed)


def _file_system(place: Path) -> str:
    """The type of what is mounted there; "" where nobody says."""
    real = str(place.resolve())
    found = ("", "")
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            mounted, kind = line.split()[1:3]
            if (real == mounted or real.startswith(f"{mounted.rstrip('/')}/")) and len(mounted) >= len(
                found[0]
            ):
                found = (mounted, kind)
    return found[1]


def _clear_left(place: Path) -> None:
    """Removes the folders of processes that were killed with their guards."""
    import fcntl

    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or held
            descriptor = os.open(folder / _LOCK, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
