"""Tests that a runtime with different outputs is detected by its SQNR; the operators and a fix are named.

MatMulNBits at accuracy level 4 quantizes activations that are float in the file. Every tested ONNX Runtime
creates it from blockwise int4 weights, so golden vectors with exact outputs stand for an older version, which
did not quantize these activations.
"""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import ROOT
from onnx import TensorProto, helper
from products import EXACT, LEVEL_4, answers, bundle_of, inputs, int4_in_blocks, int8_by

from qatkit_verify.bundle.manifest import INT8_FILE, MANIFEST, read_manifest
from qatkit_verify.checks import runtime as check
from qatkit_verify.checks.base import CheckInputs
from qatkit_verify.checks.runtime import noise, rounds_to_8_bits
from qatkit_verify.command import main
from qatkit_verify.installed import NEWEST, OLDEST, untested, version_numbers
from qatkit_verify.onnx_file import read_onnx
from qatkit_verify.session import open_session

needs_1_32 = pytest.mark.skipif(
    version_numbers(ort.__version__) < (1, 32),
    reason=f"needs ONNX Runtime 1.32, which makes MatMulNBits of 16-bit activations (here {ort.__version__})",
)


def judged(bundle: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns the exit status of qatkit-verify and its results, by check."""
    told = bundle.parent / "told.json"
    status = main([str(bundle), "--runs", "3", "--threads", "1", "--min-speedup", "0", "--json", str(told)])
    return status, {one["check"]: one for one in json.loads(told.read_text())["checks"]}


@pytest.fixture
def int4(tmp_path: Path) -> Path:
    """Returns a folder with a file that ONNX Runtime turns into MatMulNBits; tests make it a bundle."""
    (tmp_path / "bundle").mkdir()
    int4_in_blocks(tmp_path / "bundle" / INT8_FILE)
    return tmp_path / "bundle"


def test_a_runtime_that_quantizes_more_is_named_with_the_remedy(int4: Path) -> None:
    status, found = judged(bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=None))

    assert status == 1
    assert (
        found["answers, optimized"]["verdict"] == "ok" and found["answers, optimized"]["figures"]["same"] == 8
    )
    seen, figures = found["runtime"]["seen"], found["runtime"]["figures"]
    assert found["runtime"]["verdict"] == "falls short"
    assert seen.startswith(
        f"the outputs of ONNX Runtime {ort.__version__} differ from those of {ort.__version__}: SQNR 4"
    )
    assert "this version quantizes the activations of 1 MatMulNBits node to 8 bits (product)" in seen
    restored = (
        "set the session option session.qdq_matmulnbits_accuracy_level=0, which restores the outputs"
        " (bit-identical)"
    )
    assert found["runtime"]["mend"] == restored
    assert 35 < figures["db"] < 55 and figures["quantize_activations"] == ["product"]


def test_the_file_is_judged_under_the_options_of_the_manifest(int4: Path) -> None:
    status, found = judged(bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=EXACT))

    assert status == 0
    assert found["runtime"]["figures"]["session_options"] == EXACT
    assert found["runtime"]["figures"]["db"] is None  # bit-identical
    assert "dB without session.qdq_matmulnbits_accuracy_level=0)" in found["runtime"]["seen"]


def test_onnx_runtime_among_other_runtimes_has_the_options_too(int4: Path) -> None:
    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=None)
    told = int4.parent / "told.json"
    main([str(int4), "--runs", "3", "--min-speedup", "0", "--runtime", "onnxruntime", "--json", str(told)])
    found = {one["check"]: one["figures"] for one in json.loads(told.read_text())["checks"]}

    assert (
        found[f"answers, onnxruntime {ort.__version__}"]["steps"]
        == found["answers, optimized"]["steps"]
        > 0.1
    )


def test_a_bundle_verified_with_quantized_activations_passes(int4: Path) -> None:
    """Covers a bundle of an older qatkit, which set no level: its golden outputs have the same error."""
    status, found = judged(bundle_of(int4, golden=answers(int4 / INT8_FILE, LEVEL_4), told=None))

    assert status == 0
    assert 35 < found["runtime"]["figures"]["db_optimizations_there"] < 55


@pytest.mark.parametrize(("told", "status"), [(None, 1), (EXACT, 0)], ids=["older bundle", "bundle"])
@needs_1_32
def test_16_bit_activations_stay_exact_only_with_the_options(
    tmp_path: Path, told: dict[str, str] | None, status: int
) -> None:
    (tmp_path / "bundle").mkdir()
    file = int8_by("uint16", tmp_path / "bundle" / INT8_FILE)
    exact = answers(file, {}, "ORT_DISABLE_ALL")  # what 1.31 outputs, with optimizations too
    given, found = judged(bundle_of(tmp_path / "bundle", golden=exact, told=told))

    assert given == status
    assert (
        "this version quantizes the activations of 1 MatMulNBits node" in found["runtime"]["seen"]
    ) == bool(status)
    if status:
        assert "session.qdq_matmulnbits_accuracy_level=0, which restores" in found["runtime"]["mend"]


@pytest.mark.parametrize(
    ("activation", "steps", "verdict"),
    [("uint8", 0.9, "ok"), ("uint8", 4, "falls short"), ("uint16", 0.9, "falls short"), ("uint16", 0, "ok")],
)
def test_only_a_file_that_rounds_to_8_bits_may_move_by_a_step(
    tmp_path: Path, activation: str, steps: float, verdict: str
) -> None:
    """A sum halfway between two 8-bit values may round either way; with 16 bits, no output moves that far."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    file = int8_by(activation, folder / INT8_FILE)
    asked = CheckInputs(
        bundle_of(folder, golden=answers(file, EXACT), told=EXACT), read_manifest(folder), threads=1
    )
    optimized = asked.golden.on["y"].copy()
    optimized[2, 1] += steps * asked.golden.steps["y"]
    # Simulates a runtime whose optimizations change one value.
    vars(asked)["answers"] = {False: [asked.golden.off["y"]], True: [optimized]}

    found = check.runtime(asked)
    assert found.verdict == verdict
    assert found.figures["quantize_activations"] == []
    if verdict != "ok":
        assert found.fix == f"use the version of ONNX Runtime that verified the file: {ort.__version__}"


def test_the_version_that_verified_is_told_beside_the_one_here(
    int4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=EXACT)
    monkeypatch.setattr(check, "RUNTIME_VERSION", "7.1.0")
    status, found = judged(int4)

    assert status == 0  # only a note
    assert found["runtime"]["seen"].startswith(
        f"the outputs of ONNX Runtime 7.1.0 match those of {ort.__version__}"
    )
    assert found["runtime"]["seen"].endswith(f"newer than any version that was tested ({OLDEST} to {NEWEST})")


def test_what_was_tested_is_what_the_packages_ask_for() -> None:
    bounds = []
    for folder in (ROOT / "packages" / "verify", ROOT):
        wanted = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
        bounds += [one.removeprefix("onnxruntime>=") for one in wanted if one.startswith("onnxruntime>=")]
    assert bounds[0] == OLDEST
    assert untested(bounds[1]) == untested(metadata.version("onnxruntime")) == ""
    for version in ("1.23.0", "1.23.2", "1.31.1", "1.32.0", "1.32.7"):
        assert untested(version) == ""
    assert untested("1.22.1").startswith("older") and untested("1.9.0").startswith("older")
    assert untested("1.33.0.dev20270101").startswith("newer") and untested("2.0").startswith("newer")


@pytest.mark.parametrize("told", [5, ["a", "b"], {"session.x": 1}, "text"])
def test_session_options_that_are_none_are_refused_in_one_line(
    int4: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=EXACT)
    stored = json.loads((int4 / MANIFEST).read_text())
    _sealed(int4 / MANIFEST, stored | {"session_options": told})

    assert main([str(int4)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_entry_that_the_runtime_refuses_is_one_line(
    int4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told={"": "1"})

    assert main([str(int4)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def _sealed(path: Path, stored: dict[str, Any]) -> None:
    import hashlib

    text = json.dumps(stored | {"sha256": "0" * 64}, indent=1) + "\n"
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


def test_a_session_computes_exactly_unless_a_level_is_given(tmp_path: Path) -> None:
    file = int4_in_blocks(tmp_path / "model.onnx")
    plain, exact, level_4 = (
        np.concatenate([open_session(file, threads=1, options=options).run(None, {"x": row[None]})[0]
                        for row in inputs()])
        for options in (None, EXACT, LEVEL_4)
    )  # fmt: skip

    np.testing.assert_array_equal(plain, answers(file, EXACT))
    np.testing.assert_array_equal(plain, exact)
    np.testing.assert_array_equal(level_4, answers(file, LEVEL_4))
    assert noise([answers(file, {}, "ORT_DISABLE_ALL")], [plain]) < 1e-10
    assert noise([plain], [level_4]) > 1e-6


def test_the_session_option_leaves_int8_products_unchanged(tmp_path: Path) -> None:
    file = int8_by("uint8", tmp_path / "model.onnx")
    for name, options in (("ours", None), ("unset", LEVEL_4)):
        (tmp_path / name).mkdir()
        open_session(file, threads=1, options=options, optimized_path=tmp_path / name / "m.onnx")

    for name in ("m.onnx", "m.onnx.data"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "unset" / name).read_bytes()
    np.testing.assert_array_equal(answers(file, EXACT), answers(file, {}))


def test_a_manifest_keeps_the_options_and_the_version(int4: Path) -> None:
    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told=None)
    older = read_manifest(int4)
    assert (older.onnxruntime, older.session_options) == (None, None)

    bundle_of(int4, golden=answers(int4 / INT8_FILE, EXACT), told={**EXACT, "session.qdqisint8allowed": "1"})
    found = read_manifest(int4)
    assert found.onnxruntime == ort.__version__
    assert found.session_options == {**EXACT, "session.qdqisint8allowed": "1"}


def test_noise_is_a_share_of_the_power_of_the_worst_output() -> None:
    one, other = np.array([3.0, 4.0]), np.array([10.0])
    assert noise([one, other], [one, other]) == 0
    assert noise([one, other], [np.array([3.0, 4.5]), np.array([11.0])]) == pytest.approx(0.01)
    assert noise([np.zeros(2)], [np.array([0.0, 1e-9])]) == np.inf
    assert noise([one], [np.array([np.nan, 4.0])]) == np.inf
    assert noise([np.array([250], np.uint8)], [np.array([255], np.uint8)]) == pytest.approx((5 / 250) ** 2)


@pytest.mark.parametrize(
    ("zero_point", "attributes", "expected"),
    [(TensorProto.UINT8, {}, True), (TensorProto.INT4, {}, True), (TensorProto.UINT16, {}, False),
     (TensorProto.INT16, {}, False), (None, {}, True), (None, {"output_dtype": TensorProto.INT16}, False)],
)  # fmt: skip
def test_what_rounds_to_8_bits(
    tmp_path: Path, zero_point: int | None, attributes: dict[str, int], expected: bool
) -> None:
    names, stored = ["x", "s"], [helper.make_tensor("s", TensorProto.FLOAT, [], [0.1])]
    if zero_point is not None:
        names, stored = [*names, "z"], [*stored, helper.make_tensor("z", zero_point, [], [0])]
    node = helper.make_node("QuantizeLinear", names, ["y"])
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    x, y = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])] for name in "xy")
    model = helper.make_model(helper.make_graph([node], "g", x, y, stored))
    onnx.save(model, str(tmp_path / "model.onnx"))

    assert rounds_to_8_bits(read_onnx(tmp_path / "model.onnx")) is expected
