"""Tests of comparing the outputs of two ONNX files, against figures computed with NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from bundles import make

from qatkit_verify.command import main


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    import onnx
    from onnx import numpy_helper

    a = make(tmp_path / "bundle") / "model.onnx"
    model = onnx.load(str(a))
    for tensor in model.graph.initializer:
        if tensor.name == "ws":
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(0.011, np.float32), "ws"))
    onnx.save(model, str(tmp_path / "b.onnx"))
    return a, tmp_path / "b.onnx"


def test_the_figures_are_those_of_the_outputs(files: tuple[Path, Path], tmp_path: Path) -> None:
    inputs = np.random.default_rng(5).standard_normal((50, 8)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=inputs)
    one, other = (ort.InferenceSession(str(path)).run(None, {"x": inputs})[0].astype(float) for path in files)
    report = tmp_path / "parity_report.json"

    code = main([*map(str, files), "--inputs", str(tmp_path / "inputs.npz"), "--json", str(report)])
    told = json.loads(report.read_text())

    assert code == 0 and told["passed"] and told["images"] == 50
    assert told["max_abs_diff"] == pytest.approx(np.abs(one - other).max())
    assert told["mean_abs_diff"] == pytest.approx(np.abs(one - other).mean())
    assert told["cosine"] == pytest.approx((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum()))
    assert told["same_top1"] == pytest.approx((one.argmax(1) == other.argmax(1)).mean())
    assert told["max_abs_diff"] > 0


def test_the_figures_can_go_to_standard_output(
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main([*map(str, files), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] and sorted(tmp_path.iterdir()) == before


def test_a_bound_that_is_not_kept_is_status_one(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, files), "--abs-tol", "1e-6"]) == 1
    assert not json.loads((tmp_path / "parity_report.json").read_text())["passed"]
    assert main([*map(str, files), "--mean-tol", "1e-6"]) == 1
    assert main([str(files[0]), str(files[0]), "--abs-tol", "0", "--mean-tol", "0"]) == 0


def test_what_can_not_be_compared_is_one_line(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "wrong.npz", y=np.zeros((2, 8), np.float32))
    (tmp_path / "no.onnx").write_bytes(b"no")
    np.save(tmp_path / "one.npy", np.zeros((2, 8), np.float32))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no zip")
    for typed in (
        [str(files[0]), str(tmp_path / "no.onnx")],
        [*map(str, files), "--inputs", str(tmp_path / "wrong.npz")],
        *(
            [*map(str, files), "--inputs", str(tmp_path / name)]
            for name in ("nothing.npz", "one.npy", "bad.npz")
        ),
        [*map(str, files), str(files[0])],
    ):
        assert main(typed) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
