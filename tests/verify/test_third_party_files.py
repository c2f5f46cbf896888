"""Tests of emulated third-party files against ONNX Runtime on this processor and on an emulated Haswell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from test_int8_kernels import QEMU
from third_party_files import File, convolutions, products
from third_party_graphs import graphs

from qatkit.verify.emulation import Emulation
from qatkit_verify.saturation import saturates_here
from qatkit_verify.session import open_session

FILES: dict[str, File] = dict(convolutions()) | dict(products()) | dict(graphs())


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_on_this_processor(name: str, tmp_path: Path) -> None:
    file, path = FILES[name], tmp_path / "model.onnx"
    onnx.save(file.model, path)
    emulation, session = Emulation(path, options={}, threads=1), open_session(path, threads=1)
    names = [kernel.name for kernel in emulation.kernels]
    differ = False
    for batch in file.batches:
        expected = session.run(None, batch)
        exact, saturated = emulation.outputs(batch), emulation.outputs(batch, names)
        for one, right in zip(saturated if saturates_here() else exact, expected, strict=True):
            np.testing.assert_array_equal(one, right)
            assert one.dtype == right.dtype
        differ |= any(not np.array_equal(one, other) for one, other in zip(exact, saturated, strict=True))
    can = any(kernel.can_saturate for kernel in emulation.kernels)
    assert differ == (can and "int8 x int8" not in name)
    assert emulation.others == list(file.others)


def test_weights_beside_the_file(tmp_path: Path) -> None:
    file = FILES["stacked weight"]
    path, outputs = tmp_path / "model.onnx", []
    for beside in (False, True):
        onnx.save(file.model, path, save_as_external_data=beside, location="values.bin", size_threshold=0)
        outputs.append(Emulation(path, options={}, threads=1).outputs(file.batches[0], ["product"])[0])
    assert (tmp_path / "values.bin").is_file()
    np.testing.assert_array_equal(outputs[0], outputs[1])


SCRIPT = """
import sys
from pathlib import Path
import numpy as np, onnxruntime as ort
for file in sorted(Path(sys.argv[1]).glob("*.onnx")):
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch in sorted(file.parent.glob(f"{file.stem}.*.npz")):
        found = session.run(None, dict(np.load(batch)))
        np.savez(batch.with_suffix(".out"), *(one.astype(str) if one.dtype == object else one for one in found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    QEMU is None, reason="needs qemu-x86_64 (apt-get install qemu-user), for a CPU without VNNI"
)
def test_whole_files_on_an_emulated_haswell(tmp_path: Path) -> None:
    """MLAS's AVX2 kernels must match completely emulated files bit for bit; an LSTM only within 1e-3."""
    whole = {str(i): file for i, file in enumerate(FILES.values()) if not file.others}
    for i, file in whole.items():
        onnx.save(file.model, tmp_path / f"{i}.onnx")
        for j, batch in enumerate(file.batches):
            np.savez(tmp_path / f"{i}.{j}.npz", allow_pickle=False, **batch)
    assert QEMU is not None
    command = [QEMU, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(tmp_path)]
    subprocess.run(command, check=True, timeout=800, capture_output=True)
    for i, file in whole.items():
        emulation = Emulation(tmp_path / f"{i}.onnx", options={}, threads=1)
        names = [kernel.name for kernel in emulation.kernels]
        for j, batch in enumerate(file.batches):
            with np.load(tmp_path / f"{i}.{j}.out.npz") as found:
                for one, right in zip(emulation.outputs(batch, names), found.values(), strict=True):
                    name = list(FILES)[int(i)]
                    if (
                        "LSTM" in name
                    ):  # its float kernels differ between AVX2 and AVX-512; saturation changes 0.05
                        np.testing.assert_allclose(one, right, rtol=0, atol=1e-3)
                    else:
                        np.testing.assert_array_equal(one, right, err_msg=name)
