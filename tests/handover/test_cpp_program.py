"""Compiles the C++ program of a model card with g++ and runs it on the golden pictures.

The test needs ONNX Runtime's C++ headers, which the wheel lacks (the library itself is included):

    QATKIT_ONNXRUNTIME_INCLUDE=FOLDER    with onnxruntime_cxx_api.h, of the wheel's version or an older one
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tiny_run import calibrate_only

from qatkit.jobs import pipeline

INCLUDE = Path(os.environ.get("QATKIT_ONNXRUNTIME_INCLUDE") or "/nowhere")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH"),
    pytest.mark.skipif(not (INCLUDE / "onnxruntime_cxx_api.h").is_file(),
                       reason="QATKIT_ONNXRUNTIME_INCLUDE names no folder with onnxruntime_cxx_api.h"),
]  # fmt: skip
# Follows the card's own lines, which open the session; prints the scores of each given picture on a line.
MAIN = """
#include <cstdio>
#include <fstream>
#include <iterator>
int main(int count, char** typed) {
%s
  for (int i = 1; i < count; ++i) {
    std::ifstream stream(typed[i], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), {});
    for (const auto score : classify(session, reinterpret_cast<const uint8_t*>(bytes.data())))
      std::printf("%%.9g ", double(score));
    std::printf("\\n");
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the wheel's libonnxruntime under the names that a linker looks for."""
    capi, folder = Path(onnxruntime.__file__).parent / "capi", tmp_path_factory.mktemp("lib")
    (real,) = capi.glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(real)
    return folder


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("FBGEMM", {}), ("FBGEMM", {"io": "uint8"}), ("FBGEMM", {"dynamic_batch": False}), ("QNNPACK", {})],
    ids=["floats", "bytes", "three at a time", "with a session's options"],
)
def test_the_program_of_the_card_gives_the_golden_answers(
    backend: str, asked: dict[str, Any], library: Path, tmp_path: Path
) -> None:
    config = calibrate_only(tmp_path / "run")
    config.backend.target = f"qatkit.quant.backends.{backend}"
    config.export = replace(config.export, bundle=True, **asked)
    config.verify.latency_batch = 1 if config.export.dynamic_batch else 3
    assert pipeline.train(config) == 0
    bundle = tmp_path / "run" / "bundle"

    (code,) = re.findall(r"```cpp\n(.*?)```", (bundle / "card.md").read_text(), re.DOTALL)
    function, once = code.split("// Once: ")
    opening = "\n".join(line.removeprefix("//") for line in once.splitlines())
    (tmp_path / "run.cpp").write_text(function + MAIN % opening)
    compile_it = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "run.cpp", "-isystem", str(INCLUDE),
                  "-L", str(library), "-lonnxruntime", "-o", "run.out"]  # fmt: skip
    done = subprocess.run(compile_it, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr

    stored = np.load(bundle / "golden.npz")
    (wanted,) = (stored[name] for name in stored.files if name.startswith("on:"))
    names = []
    for index in range(len(wanted)):
        pixels = np.repeat(stored[f"pixels_{index}"], 3, axis=2)  # digits are greyscale
        assert pixels.shape == (8, 8, 3)
        names.append(str(tmp_path / f"{index}.raw"))
        pixels.tofile(names[-1])
    env = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [str(tmp_path / "run.out"), *names], cwd=bundle, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = np.array([line.split() for line in done.stdout.splitlines()], np.float64)
    np.testing.assert_array_equal(found.astype(wanted.dtype), wanted)
