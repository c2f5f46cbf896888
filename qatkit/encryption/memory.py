"""Keeps temporary files in memory: a folder on a tmpfs replaces /tmp for this process and its children.

ONNX Runtime, the exporter and OpenVINO need unencrypted files with names. Therefore `tempfile` and TMPDIR
point to a folder that is never on a disk. The folder is removed at the end of the job, or by a second process
(`guard`) if the job's process is killed. If both are killed, the folder stays in memory until the next
encrypted run of the same user removes it; that run recognizes such a folder because nobody holds its lock.
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
    """Puts all temporary files of the block into a folder in memory, which is removed afterwards.

    The folders of killed runs are removed first. Within the block, core dumps are off, since they would write
    all memory to a file.

    Args:
        key_file: the key file, for the error message if there is no such folder.

    Raises:
        ConfigError: this machine has no known folder in memory that this process may write to.
    """
    place = _folder_in_memory(key_file)
    import fcntl  # exists on every system with such folders
    import resource

    _clear_left(place)
    new = Path(tempfile.mkdtemp(prefix="qatkit-", dir=place))
    held = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)
    folder = new.rename(
        place / new.name.replace("qatkit-", _PREFIX)
    )  # it is locked before it gets its final name
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, limits[1])
    )  # no core dump, which would write all memory to a file
    watching = subprocess.Popen(  # noqa: S603 - runs our own file
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
    """Returns the folder for temporary files if it is in memory and writable, else /dev/shm.

    Raises:
        ConfigError: /dev/shm is not in memory or not writable either.
    """
    for place in (Path(tempfile.gettempdir()), Path("/dev/shm")):  # noqa: S108 - our folder in it is private
        if _file_system(place) in _IN_MEMORY and os.access(place, os.W_OK | os.X_OK):
            return place
    reason = f"neither {tempfile.gettempdir()} nor /dev/shm is a writable folder in memory (tmpfs); set TMPDIR to one"
    raise ConfigError(KEY_SETTING, key_file, reason=reason)


def _file_system(place: Path) -> str:
    """Returns the type of the file system that contains a folder; "" if it is unknown."""
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
    """Removes the folders of processes that were killed together with their guards."""
    import fcntl

    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a folder of another user, or a locked one
            descriptor = os.open(folder / _LOCK, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
