"""Tests of the model card's section on the streaming file, whose example is run as a reader would run it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spotters import STREAM, make, spotter

from qatkit.handover.stream_section import stream_section
from qatkit.handover.write import check_source
from qatkit_verify.bundle.golden import read_golden
from qatkit_verify.bundle.manifest import entry
from qatkit_verify.errors import ConfigError


def test_the_cards_example_hears_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make(tmp_path / "bundle")
    text = stream_section(bundle, {"hop": 160, "rate": 8000})
    assert "| `x` [N, n, 4] | `y` | a chunk |" in text
    assert "| `state_0` [N, 5] | `state_0_next` | a state |" in text
    assert "one every 20 ms" in text and "n ≥ 1 steps along axis 1" in text
    assert "All states are zero before the first chunk" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 6
    monkeypatch.chdir(bundle)
    told: dict[str, Any] = {}
    exec(code, told)
    wanted = read_golden(bundle / "golden.npz").on["y"][:1]
    np.testing.assert_allclose(told["output"], wanted, rtol=0, atol=1e-5)


def test_a_bundle_of_whole_files_has_no_such_section(tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle")
    (bundle / STREAM).unlink()
    assert stream_section(bundle, {}) == ""


def test_a_file_that_changed_since_its_report_is_not_bundled(tmp_path: Path) -> None:
    whole, stream = tmp_path / "model.int8.onnx", tmp_path / "model.int8.stream.onnx"
    spotter(whole)
    spotter(stream, stream=True)
    files = [vars(entry(tmp_path, one.name)) for one in (whole, stream)]
    (tmp_path / "report.json").write_text(json.dumps({"files": files}))
    check_source(tmp_path, whole)
    stream.write_bytes(stream.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.int8\.stream\.onnx has changed since .*report\.json"):
        check_source(tmp_path, whole)
