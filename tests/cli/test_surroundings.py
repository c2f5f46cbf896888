"""Tests of commands on full disks, with long names, closed pipes and terminals, and other encodings."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, Launch
from full_disk import largest_file
from safetensors.torch import save_file

from qatkit.config.schema import Config
from qatkit.run import find
from qatkit.run.loop.fit import _AtomicCheckpoints
from qatkit_verify.files import whole, write_text

SAY = "import sys; from qatkit.run import streams; streams.prepare()\n"


def checkpoint(path: Path) -> None:
    _AtomicCheckpoints().save_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, path)


def tensors(path: Path) -> None:
    with whole(path) as temporary:
        save_file({"w": torch.zeros(100_000)}, temporary)


def text(path: Path) -> None:
    write_text(path, "x" * 400_000)


@pytest.mark.parametrize("room", [0, 1000, 200_000])
@pytest.mark.parametrize("write", [checkpoint, tensors, text])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    launch: Launch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
    room: int,
) -> None:
    path = tmp_path / "kept" / "file"
    path.parent.mkdir()
    path.write_text("before")

    def job(config: Config) -> Any:
        with largest_file(room):
            write(path)

    assert launch(job) == 1
    assert capfd.readouterr().err == (
        f"error: {path}: File too large: free some space, then run the same command with resume=auto to continue\n"
    )
    assert path.read_text() == "before" and os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200])
def test_a_folder_with_too_long_a_name_is_one_line(
    launch: Launch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    assert launch(lambda config: 0, f"output_dir='{name}'") == 2
    assert capfd.readouterr().err == (
        f"error: output_dir={name}: expected a path without control characters, of at most 4000 bytes, "
        "with names of at most 240 bytes, or null\n"
    )


def test_a_file_may_have_as_long_a_name_as_the_disk_takes(tmp_path: Path) -> None:
    for name in ("x" * 255, "日" * 85):
        write_text(tmp_path / name, "whole")
        assert (tmp_path / name).read_text() == "whole"


def shell(script: str, code: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}", sys.executable, SAY + code],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )


def test_a_pipe_that_closes_early_ends_nothing(tmp_path: Path) -> None:
    code = f"""
for _ in range(3): print("x" * 100_000, flush=True); print("y" * 100_000, file=sys.stderr)
open({str(tmp_path / "end")!r}, "w").close()"""
    done = shell('"$0" -c "$1" 2>&1 | head -c 3', code)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"xxx", b"")
    assert (tmp_path / "end").exists()


def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    """A terminal closes when its user logs out; the command must go on."""
    code = f"""
import time
print("begins", flush=True)
while not {str(tmp_path / "closed")!r} in map(str, __import__("pathlib").Path({str(tmp_path)!r}).iterdir()):
    time.sleep(0.01)
for _ in range(3): print("x", flush=True); print("y", file=sys.stderr)
open({str(tmp_path / "end")!r}, "w").close()"""
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", SAY + code]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=end, stderr=end, start_new_session=True
    ) as child:
        os.close(end)
        assert os.read(terminal, 100).startswith(b"begins")
        os.close(terminal)
        (tmp_path / "closed").touch()
        assert child.wait(60) == 0
    assert (tmp_path / "end").exists()


def test_closed_streams_stay_closed_to_what_is_opened(tmp_path: Path) -> None:
    """A file that got the descriptor of standard output would receive everything that is printed."""
    file = tmp_path / "file"
    code = f"""
import os
with open({str(file)!r}, "w") as file:
    print("hello"); print("hello", file=sys.stderr); os.write(1, b"hello"); os.write(2, b"hello")
    file.write(str(file.fileno() > 2))"""
    assert shell('"$0" -c "$1" <&- >&- 2>&-', code).returncode == 0
    assert file.read_text() == "True"


def test_what_an_encoding_lacks_is_spelled_out() -> None:
    done = shell('LC_ALL=C PYTHONIOENCODING=ascii "$0" -c "$1"', r"print('\xfc \u2192 \u65e5')")
    assert (done.returncode, done.stdout) == (0, b"\\xfc \\u2192 \\u65e5\n")


def test_a_clock_that_is_set_back_finds_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Clock:
        @staticmethod
        def now() -> datetime:
            return datetime(2026, 10, 25, 2, 30)

    monkeypatch.setattr(find, "datetime", Clock)
    monkeypatch.chdir(tmp_path)
    for name in ("2026-10-25_02-30-00", "2026-10-25_02-30-00_2", "2026-10-25_02-30-00_3"):
        folder = find.output_dir(Config(name="mine"))
        assert folder == Path("outputs", "mine", name)
        folder.mkdir(parents=True)
