"""Tests of qatkit-verify on aarch64, under qemu-user: the outputs of a bundle of the ARM backend.

    scripts/aarch64.sh FOLDER && export QATKIT_AARCH64=FOLDER

qemu reproduces the processor's results bit for bit; its timings mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT
from tiny_run import calibrate_only

from qatkit.jobs.pipeline import train

FOLDER = Path(os.environ.get("QATKIT_AARCH64") or "/nowhere")
PYTHON = FOLDER / "root" / "usr" / "bin" / "python3.11"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="no qemu-aarch64: apt-get install qemu-user"),
    pytest.mark.skipif(not PYTHON.is_file(), reason="QATKIT_AARCH64 names nothing that scripts/aarch64.sh made"),
]  # fmt: skip


def judged(bundle: Path) -> tuple[dict[str, Any], str]:
    """Returns the results of qatkit-verify under qemu, by check, and its output."""
    told = bundle.parent / "told.json"
    places = os.pathsep.join(map(str, (FOLDER / "site", ROOT / "packages" / "verify")))
    command = [
        *("qemu-aarch64", "-L", str(FOLDER / "root"), "-E", f"PYTHONPATH={places}", str(PYTHON)),
        *("-m", "qatkit_verify.command", str(bundle), "--threads", "1", "--runs", "1", "--min-speedup", "0"),
        *("--json", str(told)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return {one["check"]: one for one in json.loads(told.read_text())["checks"]}, done.stdout


@pytest.mark.parametrize(("name", "size"), [("tiny_run.Net", 8), ("mobilenet_v2", 32)], ids=str)
def test_a_bundle_for_arm_answers_there_as_here(name: str, size: int, tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.model.name, config.data.image_size, config.data.test_images = name, size, 64
    config.backend.target, config.export.bundle = "qatkit.quant.backends.QNNPACK", True
    assert train(config) == 0
    found, printed = judged(tmp_path / "run" / "bundle")

    assert found["preprocessing"]["verdict"] == "ok"
    # Without optimizations, ONNX Runtime computes in float, and the order of float sums depends on the
    # processor.
    for check, steps in (("answers, as written", 1e-3), ("answers, optimized", 0)):
        figures = found[check]["figures"]
        assert figures["same"] == figures["images"] == 8, printed
        assert figures["steps"] <= steps, printed  # 0: bit-identical
    assert found["int8 kernels"]["figures"]["int8_share"] == 1
