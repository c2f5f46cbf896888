"""Tests that a file is either written completely or left as it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qatkit_verify.files import whole, write_text


@pytest.mark.parametrize("failure", [ValueError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [None, "old"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, failure: type[BaseException], before: str | None
) -> None:
    target = tmp_path / "file.json"
    if before is not None:
        target.write_text(before)

    def write_half() -> None:
        with whole(target) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        write_half()

    assert os.listdir(tmp_path) == ([] if before is None else ["file.json"])
    assert before is None or target.read_text() == before


def test_the_target_is_untouched_until_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    target.write_text("old")

    with whole(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"

    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["file.json"]


def test_a_writer_that_renames_onto_the_temporary_name_is_fine(tmp_path: Path) -> None:
    with whole(tmp_path / "file") as temporary:
        other = tmp_path / "other"
        other.write_text("renamed")
        other.chmod(0o600)
        other.replace(temporary)

    (tmp_path / "plain").write_text("")
    assert (tmp_path / "file").read_text() == "renamed"
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_a_plain_open(tmp_path: Path, umask: int) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")
    kept.chmod(0o640)
    before = os.umask(umask)
    try:
        write_text(tmp_path / "new", "text")
        (tmp_path / "plain").write_text("text")
        write_text(kept, "new")
    finally:
        os.umask(before)

    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert kept.stat().st_mode & 0o777 == 0o640


def test_temporary_names_are_hidden_and_ones_own(tmp_path: Path) -> None:
    target = tmp_path / "model.int8.onnx"
    with whole(target) as first, whole(target) as second:
        assert first != second and first.parent == second.parent == tmp_path
        assert re.fullmatch(rf"\.model\.int8\.onnx\.{os.getpid()}\.[0-9a-f]+\.part", first.name)
        assert not list(tmp_path.glob("*.onnx")) and not list(tmp_path.glob("*.ckpt"))
        first.write_text("first")
        second.write_text("second")
    assert target.read_text() == "first"  # the outer block ends last
    assert os.listdir(tmp_path) == [target.name]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "nowhere" / "file", "text")


def test_processes_that_write_one_file_leave_one_of_theirs(tmp_path: Path) -> None:
    code = (
        "import sys; from qatkit_verify.files import write_text\n"
        "for _ in range(200): write_text(sys.argv[1], sys.argv[2] * 5000)"
    )
    target = tmp_path / "file"
    running = [subprocess.Popen([sys.executable, "-c", code, str(target), letter]) for letter in "ab"]
    while any(process.poll() is None for process in running):
        if target.exists():
            assert target.read_text() in ("a" * 5000, "b" * 5000)
    assert [process.returncode for process in running] == [0, 0]
    assert os.listdir(tmp_path) == ["file"]
