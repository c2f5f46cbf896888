"""Checks that temporary files in memory disappear with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import ROOT

from qatkit.encryption.cipher import is_encrypted, new_key
from qatkit.encryption.memory import _file_system
from qatkit.encryption.vault import protected, readable, secret
from qatkit_verify.errors import ConfigError

pytest.importorskip("cryptography", reason="the extra sign is not installed")
pytestmark = pytest.mark.skipif(_file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is no tmpfs")

_WAITING = """
import sys, tempfile, time
from pathlib import Path
from qatkit.encryption.vault import protected
with protected(sys.argv[1]):
    Path(tempfile.mkdtemp(), "weights").write_bytes(b"in the clear")
    print(tempfile.gettempdir(), flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this test and its processes an in-memory folder of their own.

    An encrypted run that cleans up at its start briefly locks all sibling folders, and no other process
    removes a locked folder.
    """
    with tempfile.TemporaryDirectory(prefix="qatkit-test-", dir="/dev/shm") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.fixture
def key(tmp_path: Path) -> str:
    new_key(tmp_path / "key")
    return str(tmp_path / "key")


def soon(asked: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not asked() and time.monotonic() < end:
        time.sleep(0.05)
    return asked()


def waiting(key: str) -> tuple[subprocess.Popen[str], Path]:
    """Returns a process with unencrypted files in memory, and their folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITING, key], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def guard_of(process: int) -> int:
    """Returns the id of the guard: the child that removes the temporary files once `process` has ended."""
    (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def ended(process: int) -> bool:
    """Returns whether the process is gone, or a zombie, which no longer holds any lock."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_protected_keeps_temporary_files_in_memory_and_encrypts(tmp_path: Path, key: str) -> None:
    before = tempfile.gettempdir()
    with protected(key):
        folder = Path(tempfile.gettempdir())
        assert folder.parent == Path(before)
        assert _file_system(folder) == "tmpfs" and os.environ["TMPDIR"] == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        with secret(tmp_path / "weights") as temporary:
            assert temporary.is_relative_to(folder)
            temporary.write_bytes(b"weights")
        assert is_encrypted(tmp_path / "weights")
        with readable(tmp_path / "weights") as plain:
            assert plain.is_relative_to(folder) and plain.read_bytes() == b"weights"
        assert not plain.exists()
    assert not folder.exists() and tempfile.gettempdir() == before and os.environ.get("TMPDIR") != str(folder)


def test_a_job_that_fails_leaves_nothing(tmp_path: Path, key: str) -> None:
    places = []

    def failing() -> None:
        with protected(key), secret(tmp_path / "weights"):
            places.append(Path(tempfile.gettempdir()))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert places and not places[0].exists() and not (tmp_path / "weights").exists()


def test_another_key_is_one_line(tmp_path: Path, key: str) -> None:
    with protected(key), secret(tmp_path / "weights") as temporary:
        temporary.write_bytes(b"weights")
    new_key(tmp_path / "other")
    wanted = rf"export\.encrypt={tmp_path / 'other'}: expected the key that {tmp_path / 'weights'} was encrypted with"
    with (
        protected(str(tmp_path / "other")),
        pytest.raises(ConfigError, match=wanted),
        readable(tmp_path / "weights"),
    ):
        pass
    stored = bytearray((tmp_path / "weights").read_bytes())
    stored[-1] ^= 1
    (tmp_path / "weights").write_bytes(stored)
    with (
        protected(key),
        pytest.raises(ConfigError, match="is damaged or cut off"),
        readable(tmp_path / "weights"),
    ):
        pass


def test_a_kill_leaves_nothing_in_the_clear(key: str) -> None:
    process, folder = waiting(key)
    assert list(folder.rglob("weights"))
    process.kill()
    process.wait()
    assert soon(lambda: not folder.exists())


def test_where_its_guard_is_killed_too_the_next_one_clears_up(key: str) -> None:
    (process, folder), (other, at_work) = waiting(key), waiting(key)
    try:
        guard = guard_of(process.pid)
        os.kill(guard, signal.SIGKILL)
        process.kill()
        process.wait()
        assert soon(lambda: ended(guard))  # until then it may hold the lock
        assert folder.exists()
        with protected(key):
            assert not folder.exists() and at_work.exists()  # the folder of a running process stays
    finally:
        other.kill()
        other.wait()
    assert soon(lambda: not at_work.exists())
