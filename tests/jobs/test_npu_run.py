"""Tests of `backend=npu_cnn` from a float network to the report: exit status, audit, accuracy of the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from npu_nets import EveryKind, Pairs

from qatkit import quantize

_SIXTEEN = ("backend.activation_dtype=int16", "backend.bias_dtype=int32")


@pytest.mark.parametrize(
    ("dtype", "least", "settings"),
    [("int8", 30.0, ()), pytest.param("int16", 50.0, _SIXTEEN, marks=pytest.mark.slow)],
)
def test_a_run_ends_with_a_file_for_npus(
    dtype: str, least: float, settings: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batches = EveryKind().eval(), [noise(8, 3, 12, 12, seed=seed) for seed in range(4)]
    run = ["backend=npu_cnn", f"output_dir={tmp_path / 'run'}", *settings]
    result = quantize(model, batches[0], batches, run)
    assert result.met
    report = json.loads((result.folder / "report.json").read_text())
    audit = report["audit"]
    assert audit["ok"] and audit["problems"] == [] and audit["int8_macs"] == audit["macs"] > 0
    assert any("avg_pool2d" in site and "shared with" in why for site, why in report["skipped"])

    pairs = Pairs(result.file)
    written = {str(pairs.constants[pair.input[2]].dtype) for pair in pairs.of("QuantizeLinear")}
    assert written == {dtype} and pairs.unequal() == []
    images = noise(16, 3, 12, 12, seed=9)
    session = ort.InferenceSession(str(result.file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        exact = model(images).numpy()
    assert 10 * np.log10(np.square(exact).sum() / np.square(found - exact).sum()) > least
