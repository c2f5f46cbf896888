"""Tests that the light commands fail with one line if ONNX Runtime cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import runpy, sys
sys.modules["onnxruntime"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["qatkit_verify.command", "qatkit_verify.placement.measure"])
def test_an_onnx_runtime_that_is_missing_is_one_line(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, module, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: onnxruntime=") and done.stderr.count("\n") == 1, done.stderr
