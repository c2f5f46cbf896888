"""Tests of emulated uint8 x int8 kernels against scalar sums and ONNX Runtime.

ONNX Runtime runs on this processor and on an emulated Haswell.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from saturating_ops import DEPTHWISE, OPS, Op

from qatkit.verify.avx2 import PairedWeight
from qatkit.verify.int8_kernels import Int8Kernel, int8_kernel
from qatkit_verify.saturation import saturates_here

QEMU = shutil.which("qemu-x86_64")


def kernel_of(op: Op) -> Int8Kernel | None:
    return int8_kernel(ir.serde.deserialize_model(op.model()).graph[0], "op")


@pytest.mark.parametrize("name", OPS)
def test_both_forms_against_products_one_by_one(name: str) -> None:
    op, kernel = OPS[name], kernel_of(OPS[name])
    assert kernel is not None and kernel.can_saturate
    exact, saturated = op.scalar(saturate=False), op.scalar(saturate=True)
    assert (exact != saturated).mean() > 0.1  # otherwise the case shows nothing
    np.testing.assert_array_equal(kernel(op.x, saturate=False), exact)
    np.testing.assert_array_equal(kernel(op.x, saturate=True), saturated)


@pytest.mark.parametrize("name", OPS)
def test_onnx_runtime_on_this_processor(name: str) -> None:
    session = ort.InferenceSession(OPS[name].model().SerializeToString(), providers=["CPUExecutionProvider"])
    kernel = kernel_of(OPS[name])
    assert kernel is not None
    found = session.run(None, {"x": OPS[name].x})[0]
    np.testing.assert_array_equal(kernel(OPS[name].x, saturate=saturates_here()), found)


@pytest.mark.parametrize("name", DEPTHWISE)
def test_a_depthwise_convolution_is_none_of_them(name: str) -> None:
    assert kernel_of(DEPTHWISE[name]) is None


def test_overflowing_pairs_are_found_for_all_activations() -> None:
    """Checks pairs of weights at the limit of overflow with all values of both activations."""
    columns = np.array(list(product(range(256), repeat=2)), np.uint8).T
    weights = np.array(
        [[127, 2], [1, 127], [-128, -1], [-1, -128], [65, 64], [-128, 127], [127, 127]], np.int8
    )
    sums = weights.astype(np.int64) @ columns
    np.testing.assert_array_equal(PairedWeight(weights).clipped(columns), np.clip(sums, -32768, 32767) - sums)


SCRIPT = """
import sys
from pathlib import Path
import numpy as np, onnxruntime as ort
for file in sorted(Path(sys.argv[1]).glob("*.onnx")):
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = dict(np.load(file.with_suffix(".npz")))
    np.save(file.with_suffix(".npy"), session.run(None, given)[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    QEMU is None, reason="needs qemu-x86_64 (apt-get install qemu-user), for a CPU without VNNI"
)
def test_onnx_runtime_on_an_emulated_haswell(tmp_path: Path) -> None:
    """MLAS's AVX2 kernels must saturate as emulated, and be exact where there is no emulated kernel."""
    every = [*OPS.values(), *DEPTHWISE.values()]
    for i, op in enumerate(every):
        onnx.save(op.model(), tmp_path / f"{i}.onnx")
        np.savez(tmp_path / f"{i}.npz", x=op.x)
    assert QEMU is not None
    command = [QEMU, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    for i, op in enumerate(every):
        kernel = kernel_of(op)
        expected = op.scalar(saturate=False) if kernel is None else kernel(op.x, saturate=True)
        np.testing.assert_array_equal(np.load(tmp_path / f"{i}.npy"), expected, err_msg=f"{i}: {op.kind}")
