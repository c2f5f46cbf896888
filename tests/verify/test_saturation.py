"""Tests of INT8 files on CPUs without VNNI: emulation, measured saturation and weights guarded against it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import compose
from qdq_graphs import classifier
from saturating_ops import Array, Op
from test_int8_kernels import QEMU, SCRIPT
from third_party_files import integers
from tiny_run import digits_test, report_of, tiny

from qatkit.config.schema import Config, VerifyConfig
from qatkit.data.inputs import ImageInputs
from qatkit.jobs.pipeline import train
from qatkit.records.fixes import Fix, either
from qatkit.records.results import Fidelity, Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit.verify.checks.saturation import GUARDS, SaturationCheck
from qatkit.verify.emulation import Emulation
from qatkit.verify.saturation import measure_saturation
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.classification import classified
from qatkit_verify.saturation import saturates_here
from qatkit_verify.session import open_session, run_outputs

DRAW = np.random.default_rng(0)
X = DRAW.choice(np.array([255, 250, 40, 0], np.uint8), (12, 30))
HARD = Op("QLinearMatMul", X, DRAW.choice(np.array([127, 110, -60, -120], np.int8), (30, 14)))
SOFT = DRAW.integers(-64, 65, (14, 9)).astype(np.int8)
OPTIONS: dict[str, Any] = {"options": {}, "threads": 1}


def two_products(path: Path, soft: Array = SOFT) -> tuple[Array, Array, Path]:
    """Writes a file that computes X · HARD · `soft` in uint8.

    Returns its outputs with and without VNNI, and the file. Without VNNI, only the first product saturates.
    """
    answers = []
    for saturate in (False, True):
        between = HARD.scalar(saturate=saturate)
        answers.append(Op("QLinearMatMul", between, soft, (100, 0)).scalar(saturate=False))
    second = Op("QLinearMatMul", between, soft, (100, 0)).model()
    merged = compose.merge_models(
        compose.add_prefix(HARD.model(), "hard/"), compose.add_prefix(second, "soft/"), [("hard/y", "soft/x")]
    )
    onnx.save(merged, path)
    return answers[0], answers[1], path


def emulated(path: Path) -> Emulation:
    return Emulation(path, **OPTIONS)


def test_only_requested_kernels_that_can_saturate_are_emulated(tmp_path: Path) -> None:
    exact, saturated, path = two_products(tmp_path / "two.onnx")
    emulation = emulated(path)
    assert [(kernel.name, kernel.can_saturate) for kernel in emulation.kernels] == [
        ("hard/op/node", True),
        ("soft/op/node", False),
    ]
    assert (exact != saturated).mean() > 0.3
    np.testing.assert_array_equal(emulation.outputs(X)[0], exact)
    np.testing.assert_array_equal(emulation.outputs(X, ["hard/op/node"])[0], saturated)
    np.testing.assert_array_equal(emulation.outputs(X, ["soft/op/node"])[0], exact)


@pytest.mark.parametrize("batch", ["N", 2])
def test_the_emulation_of_a_whole_file_matches_onnx_runtime(tmp_path: Path, batch: int | str) -> None:
    path = tmp_path / "int8.onnx"
    classifier(path, batch, largest=127)
    images = np.random.default_rng(1).standard_normal((5, 16, 8, 8), dtype=np.float32) * 3
    emulation = emulated(path)
    names = [kernel.name for kernel in emulation.kernels]
    assert names == ["conv", "fc"]
    expected = run_outputs(open_session(path, threads=1), images)[0]
    np.testing.assert_array_equal(emulation.outputs(images, names if saturates_here() else ())[0], expected)
    assert not np.array_equal(emulation.outputs(images, names)[0], emulation.outputs(images)[0])


def test_figures_of_a_layer_against_products_one_by_one(tmp_path: Path) -> None:
    _, _, path = two_products(tmp_path / "two.onnx")
    found = measure_saturation(emulated(path), [(X[:5], [0] * 5), (X[5:], [0] * 7)])
    exact, saturated = (HARD.scalar(saturate=s).astype(float) for s in (False, True))
    error = np.abs(saturated - exact)
    layer = found.layers["hard/op/node"]
    assert (found.images, layer.outputs, layer.step) == (12, exact.size, 1.0)
    assert (layer.total, layer.largest) == (error.sum(), error.max())
    assert layer.relative == pytest.approx((error**2).sum() / ((exact - 100) ** 2).sum(), rel=1e-6)
    pairs = (X.astype(int)[:, :, None] * HARD.weight).reshape(12, 15, 2, 14).sum(2)
    clipped = (np.clip(pairs, -32768, 32767) - pairs).sum(1) != 0
    assert layer.clipped == clipped.sum()


def test_the_answers_with_and_without_vnni(tmp_path: Path) -> None:
    exact, saturated, path = two_products(tmp_path / "two.onnx")
    labels = exact.argmax(1)
    found = measure_saturation(emulated(path), [(X, labels)])
    assert found.emulated is not None and found.exact is not None
    # The output is integers, so that every value counts as a decision.
    assert found.emulated.agreement == float((exact == saturated).mean())
    assert (found.exact.agreement, found.exact.score, found.exact.sqnr_db) == (1.0, 100, None)
    assert found.emulated.score == pytest.approx(100 * (saturated.argmax(1) == labels).mean())
    noise = np.square(saturated.astype(float) - exact).sum()
    decibel = 10 * np.log10(np.square(exact.astype(float)).sum() / noise)
    assert found.emulated.sqnr_db == pytest.approx(decibel)


def test_uint8_weights_asked_for_by_the_session_never_saturate(tmp_path: Path) -> None:
    path = two_products(tmp_path / "two.onnx")[2]
    assert not Emulation(path, options={"session.x64quantprecision": "1"}, threads=1).kernels


def checked(path: Path, config: Config, **changes: Any) -> tuple[Results, list[tuple[str, str]], list[str]]:
    """Returns the results of the check, its shortfalls with their fixes, and its lines in the report."""
    check, config.verify.target_isa = SaturationCheck(), "avx2"
    timed = ImageInputs((30,)).timed
    subject = Subject(
        path.parent, {"int8": path}, lambda: [(X, np.zeros(len(X), int))], timed, config.verify, **changes
    )
    results = check.measure(subject, Results("r", "m", str(path.parent), config=asdict(config)))
    short = [(one.line, either(one.fixes)) for one in check.shortfalls(config.verify, results)]
    return results, short, check.lines(results)


def test_a_shortfall_names_the_operator_and_what_is_typed(tmp_path: Path) -> None:
    config = Config()
    config.backend.reduce_range = False
    results, short, lines = checked(two_products(tmp_path / "two.onnx")[2], config)
    (line, fix), agreement = short[0], results.measured["saturation"]["emulated"]["agreement"]
    assert line == (
        "verify.min_agreement=0.999: without VNNI the file gives the same answer on"
        f" {100 * agreement:.2f} % of 12 images"
    )
    assert fix == "backend.reduce_range=auto (8-bit weights whose products cannot saturate)"
    assert lines[0].startswith(
        "without VNNI (AVX2): 1 of 2 uint8 x int8 operators cannot saturate, proven from their weights;"
        " 1 operator saturated on 12 images"
    )
    assert "hard/op/node" in lines[1] and "14 of 14 channels can saturate" in lines[1]
    json.dumps(results.as_dict())


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"export": {"weights_for_amx": True}}, "export.weights_for_amx=false (weights"),
        (
            {"backend": {"reduce_range": "auto", "overrides": {"fc": {"reduce_range": False}}}},
            "backend.overrides without reduce_range=false (fc)",
        ),
        ({"backend": {"reduce_range": "auto", "overrides": {}}}, "backend.reduce_range=true (7-bit weights)"),
    ],
)
def test_the_fix_is_what_the_run_does_not_do_yet(change: dict[str, Any], fix: str) -> None:
    answers = {"agreement": 0.5, "top1": 50.0, "sqnr_db": 3.0}
    found = {"images": 12, "layers": {}, "others": [], "here": True, "emulated": answers, "exact": answers}
    results = Results("r", "m", "", config=change).with_measured("saturation", found)
    assert str(SaturationCheck().shortfalls(VerifyConfig(), results)[0].fixes[0]).startswith(fix)


def test_asymmetric_weights_are_told_of_fewer_bits() -> None:
    """Guarded weights (backend.reduce_range=auto) must be symmetric, so that they are not advised."""
    answers = {"agreement": 0.5, "top1": 50.0, "sqnr_db": 3.0}
    found = {"images": 12, "layers": {}, "others": [], "here": True, "emulated": answers, "exact": answers}
    results = Results("r", "m", "", config={"backend": {"reduce_range": False}})
    results = results.with_measured("saturation", found).with_measured(GUARDS, {"asymmetric": True})
    (short,) = SaturationCheck().shortfalls(VerifyConfig(), results)
    assert either(short.fixes) == "backend.reduce_range=true (7-bit weights)"


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    ("line", "emulated", "caused"),
    [
        ("verify.max_drop=1.0: ...", {"agreement": 0.9, "top1": 93.0, "sqnr_db": 20.0}, True),
        ("verify.max_drop=1.0: ...", {"agreement": 0.9, "top1": 97.9, "sqnr_db": 20.0}, False),
        ("verify.min_agreement=0.999: ...", {"agreement": 0.99, "top1": 98.0, "sqnr_db": 20.0}, True),
        ("verify.min_agreement=0.999: ...", {"agreement": 1.0, "top1": 98.0, "sqnr_db": None}, False),
        ("verify.min_float_sqnr=12: ...", {"agreement": 0.9, "top1": 98.0, "sqnr_db": 10.0}, True),
        ("verify.min_float_sqnr=12: ...", {"agreement": 0.9, "top1": 98.0, "sqnr_db": 15.0}, False),
        ("verify.max_size_ratio=0.3: ...", {"agreement": 0.9, "top1": 90.0, "sqnr_db": 10.0}, False),
    ],
)
def test_where_saturation_is_the_cause_its_fix_is_the_only_one(
    line: str, emulated: dict[str, Any], caused: bool, here: bool
) -> None:
    """Float has 99 %, the file 93 % and 10 dB, on a processor that saturates (`here`) or doesn't."""
    exact = {"agreement": 1.0, "top1": 98.0, "sqnr_db": None}
    found = {"images": 12, "layers": {}, "others": [], "here": here, "emulated": emulated, "exact": exact}
    results = Results(
        "r", "m", "",
        accuracy={"float": classified(99.0, 100.0, 100), "int8": classified(93.0, 99.0, 100)},
        fidelity={"int8": Fidelity(0.9, 0.1, 10.0, 100)},
        config={"backend": {"reduce_range": False}},
    ).with_measured("saturation", found)  # fmt: skip

    class Other(Check):
        name = "other"

        def measure(self, subject: Subject, results: Results) -> Results:
            return results

        def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
            return [Shortfall(line, [Fix(note="another fix")])]

    bounds = VerifyConfig(min_agreement=None)
    (short,) = shortfalls([Other(), SaturationCheck()], bounds, results)
    if caused and here:
        assert short.explained and either(short.fixes).startswith("backend.reduce_range=auto")
        assert short.line == f"{line}; the cause is saturation, on this processor"
    else:
        assert short == Shortfall(line, [Fix(note="another fix")])


def test_weights_that_rule_it_out_need_no_images(tmp_path: Path) -> None:
    path = tmp_path / "soft.onnx"
    onnx.save(Op("QLinearMatMul", X[:, :14], SOFT).model(), path)
    results, short, lines = checked(path, Config())
    assert not short and results.measured["saturation"]["images"] == 0
    assert lines == [
        "uint8 x int8: no sum of two products saturates on x86, proven from the integers of 1 operator"
    ]


@pytest.mark.parametrize("least", [-127, -128])
def test_int8_activations_are_judged_for_arm(tmp_path: Path, least: int) -> None:
    path, weight = tmp_path / "signed.onnx", SOFT.copy()
    weight[:2, 0] = least
    onnx.save(integers(X[:, :14].astype(np.int8), weight, xz=np.int8(0)).model, path)
    lines = checked(path, Config())[2]
    proven = "int8 x int8: no sum of two products exceeds 16 bits, proven from the integers of 1 operator"
    possible = (
        "int8 x int8: 1 of 1 operators can exceed 16 bits on ARM without the dot product, through weights of"
        " -128"
    )
    assert lines[0].startswith(proven if least == -127 else possible)


def test_unmeasured_saturation_is_short_only_where_requested(tmp_path: Path) -> None:
    check, nothing, path = SaturationCheck(), Results("r", "m", ""), two_products(tmp_path / "two.onnx")[2]
    subject = Subject(
        tmp_path, {"int8": path}, lambda: [(X, [0] * len(X))], ImageInputs((30,)).timed, VerifyConfig()
    )
    results = check.measure(subject, nothing)
    # On a processor without VNNI, saturation is measured without being requested.
    assert bool(results.measured["saturation"]["images"]) == saturates_here()
    if not saturates_here():
        assert not check.shortfalls(VerifyConfig(), results)
        assert check.lines(results) == [
            "without VNNI (AVX2): 1 of 2 uint8 x int8 operators cannot saturate, proven from their weights; the"
            " effect of the others (hard/op/node) is not measured (verify.target_isa=avx2 emulates it)"
        ]
    assert not check.shortfalls(VerifyConfig(), nothing) and not check.lines(nothing)
    lines = [one.line for one in check.shortfalls(VerifyConfig(target_isa="avx2"), nothing)]
    assert lines == ["verify.target_isa=avx2: saturation was not measured"]
    _, short, said = checked(path, Config(), other_runtime="qatkit.verify.tensorrt_pairs")
    assert not short and said == ["saturation: not checked, since another runtime executes the file"]


def test_what_can_not_be_emulated_leaves_the_other_figures(tmp_path: Path) -> None:
    path = two_products(tmp_path / "two.onnx")[2]
    path.write_bytes(path.read_bytes()[:100])
    results, short, _ = checked(path, Config())
    assert results.notes[0].startswith("saturation: not measured (onnx file=")
    assert short == [("verify.target_isa=avx2: saturation was not measured", "")]


def test_outputs_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    path = two_products(tmp_path / "two.onnx")[2]
    model = onnx.load(path)
    name = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("NonZero", ["deciding"], ["places"]))
    model.graph.node.append(onnx.helper.make_node("Greater", [name, "limit"], ["deciding"]))
    model.graph.node.insert(0, model.graph.node.pop())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(120, np.uint8), "limit"))
    model.graph.output.append(onnx.ValueInfoProto(name="places"))
    onnx.save(model, path)
    results, _, _ = checked(path, Config())
    assert results.notes[0].startswith("saturation: not measured (verify.target_isa=avx2: output 1 is [2, ")


def trained(folder: Path, reduce_range: bool | str) -> tuple[int, dict[str, Any]]:
    """Returns the status and report of a run that trains a small network."""
    config = tiny(folder)
    config.verify.target_isa, config.verify.max_drop = "avx2", None
    config.backend.reduce_range = reduce_range
    return train(config), report_of(folder)


@pytest.mark.slow
def test_only_an_unguarded_file_saturates_and_haswell_agrees(
    tmp_path: Path,
) -> None:
    status, told = trained(tmp_path / "short", False)
    assert status == 1 and told["measured"]["saturation"]["emulated"]["agreement"] < 0.95
    assert "backend.reduce_range=auto (8-bit weights whose products cannot saturate)" in told["mends"]
    status, told = trained(tmp_path / "guarded", "auto")
    found = told["measured"]["saturation"]
    assert status == 0 and found["images"] == 0
    assert not any(one["can_saturate"] for one in found["layers"].values())
    assert len(told["measured"]["guarded_weights"]["operators"]) == len(found["layers"])
    if QEMU is None:
        pytest.skip("needs qemu-x86_64 (apt-get install qemu-user) for a CPU without VNNI")
    images = digits_test()[0][:64]
    for name in ("short", "guarded"):
        path = tmp_path / name / "model.int8.onnx"
        np.savez(path.with_suffix(".npz"), input=images)
        path.parent.joinpath("model.float.onnx").unlink()
        command = [QEMU, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(path.parent)]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
        emulation = emulated(path)
        everywhere = [kernel.name for kernel in emulation.kernels]
        seen = np.load(path.with_suffix(".npy"))
        np.testing.assert_array_equal(seen, emulation.outputs(images, everywhere)[0])
    if not saturates_here():  # the guarded file gives the same bits with VNNI
        session = open_session(path, threads=1)
        np.testing.assert_array_equal(seen, run_outputs(session, images)[0])
