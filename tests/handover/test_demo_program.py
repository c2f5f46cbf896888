"""Checks that the demo page's modules, which share one script, define no name twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qatkit.handover import demo

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
def test_the_modules_of_the_page_are_one_program(tmp_path: Path) -> None:
    program = tmp_path / "page.mjs"
    program.write_text(demo._program())
    done = subprocess.run([str(NODE), "--check", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
