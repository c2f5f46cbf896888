"""A whole file without VNNI: walked operator by operator, measured, and mended by 7-bit weights where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import compose
from qdq_graphs import classifier
from saturating_ops import Array, Op
from test_int8_kernels import QEMU, SCRIPT
from tiny_run import digits_test, report_of, tiny

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config, OverrideConfig, VerifyConfig
from qatkit.config.typed import typing
from qatkit.run.pipeline import train
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.saturation import SaturationCheck
from qatkit.verify.emulation import Emulation
from qatkit.verify.results import Results
from qatkit.verify.saturation import _fewest, measure_saturation
from qatkit_verify.saturation import saturates_here
from qatkit_verify.session import open_session, run_outputs

CONF = Path(__file__).parents[2] / "conf"
DRAW = np.random.default_rng(0)
X = DRAW.choice(np.array([255, 250, 40, 0], np.uint8), (12, 30))
HARD = Op("QLinearMatMul", X, DRAW.choice(np.array([127, 110, -60, -120], np.int8), (30, 14)))
SOFT = DRAW.integers(-64, 65, (14, 9)).astype(np.int8)
OPTIONS: dict[str, Any] = {"options": {}, "threads": 1}


def two_products(path: Path, soft: Array = SOFT) -> tuple[Array, Array, Path]:
    """X · HARD · `soft`, in uint8: its answers with VNNI and without where the first alone saturates; the file."""
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


def test_only_what_can_saturate_is_emulated_and_what_is_asked_saturates(tmp_path: Path) -> None:
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
def test_the_exact_form_of_a_whole_file_is_what_onnx_runtime_computes(
    tmp_path: Path, batch: int | str
) -> None:
    path = tmp_path / "int8.onnx"
    classifier(path, batch)
    images = np.random.default_rng(1).standard_normal((5, 16, 8, 8), dtype=np.float32) * 3
    emulation = emulated(path)
    names = [kernel.name for kernel in emulation.kernels]
    assert names == ["conv", "fc"]
    expected = run_outputs(open_session(path, threads=1), images)[0]
    np.testing.assert_array_equal(emulation.outputs(images, names if saturates_here() else ())[0], expected)
    assert not np.array_equal(emulation.outputs(images, names)[0], emulation.outputs(images)[0])


def test_figures_of_a_layer_against_products_one_by_one(tmp_path: Path) -> None:
    _, _, path = two_products(tmp_path / "two.onnx")
    found = measure_saturation(emulated(path), [(X[:5], [0] * 5), (X[5:], [0] * 7)], least=None)
    exact, saturated = (HARD.scalar(saturate=s).astype(float) for s in (False, True))
    error = np.abs(saturated - exact)
    layer = found.layers["hard/op/node"]
    assert (found.images, layer.outputs, layer.step) == (12, exact.size, 1.0)
    assert (layer.total, layer.largest) == (error.sum(), error.max())
    assert layer.relative == pytest.approx((error**2).sum() / ((exact - 100) ** 2).sum(), rel=1e-6)
    pairs = (X.astype(int)[:, :, None] * HARD.weight).reshape(12, 15, 2, 14).sum(2)
    clipped = (np.clip(pairs, -32768, 32767) - pairs).sum(1) != 0
    assert layer.clipped == clipped.sum()


def test_what_is_proposed_keeps_the_answers(tmp_path: Path) -> None:
    exact, saturated, path = two_products(tmp_path / "two.onnx")
    labels = exact.argmax(1)
    agreement = float((exact == saturated).mean())  # the output is integers: every value decides
    found = measure_saturation(emulated(path), [(X, labels)], least=agreement)
    assert found.emulated is not None and found.exact is not None
    assert (found.emulated.agreement, found.exact.agreement, found.proposed) == (agreement, 1.0, [])
    assert found.exact.top1 == 100
    assert found.emulated.top1 == pytest.approx(100 * (saturated.argmax(1) == labels).mean())
    found = measure_saturation(emulated(path), [(X, labels)], least=agreement + 0.01)
    assert found.proposed == ["hard/op/node"] and found.left is not None and found.left.agreement == 1


@pytest.mark.parametrize("needed", range(1, 8))
def test_the_search_finds_the_fewest(needed: int) -> None:
    worst, asked = list("abcdefg"), []

    def kept(names: list[str]) -> bool:
        asked.append(names)
        return len(worst) - len(names) >= needed

    assert _fewest(worst, kept) == needed and len(asked) <= 3


def test_uint8_weights_asked_for_by_the_session_never_saturate(tmp_path: Path) -> None:
    path = two_products(tmp_path / "two.onnx")[2]
    assert not Emulation(path, options={"session.x64quantprecision": "1"}, threads=1).kernels


def checked(path: Path, config: Config, **changes: Any) -> tuple[Results, list[tuple[str, str]], list[str]]:
    """What the check finds, falls short of with its mend, and says."""
    check, config.verify.target_isa = SaturationCheck(), "avx2"
    subject = Subject(
        path.parent, {"int8": path}, lambda: [(X, np.zeros(len(X), int))], (30,), config.verify, **changes
    )
    results = check.measure(subject, Results("r", "m", str(path.parent), config=asdict(config)))
    short = [(one.line, one.mend) for one in check.shortfalls(config.verify, results)]
    return results, short, check.lines(results)


def test_a_shortfall_names_the_operator_and_what_is_typed(tmp_path: Path) -> None:
    results, short, lines = checked(two_products(tmp_path / "two.onnx")[2], Config())
    (line, mend), agreement = short[0], results.measured["saturation"]["emulated"]["agreement"]
    assert line == (
        f"verify.min_agreement=0.999: without VNNI the file keeps its answer on {100 * agreement:.2f} % of 12 images;"
        " with 7-bit weights in 'hard/op/node' on 100.00 %"
    )
    assert mend == (
        "'+backend.overrides={hard/op:{reduce_range:true}}' (7-bit weights there),"
        " or backend.reduce_range=true (7-bit weights everywhere)"
    )
    assert lines[0].startswith(
        "without VNNI (AVX2): 1 of 2 uint8 x int8 operators cannot saturate, by their weights; 1 do on 12 images"
    )
    assert "hard/op/node" in lines[1] and "14 of 14 channels can be" in lines[1]
    json.dumps(results.as_dict())


def test_overrides_go_with_those_that_were_asked_for(tmp_path: Path) -> None:
    config = Config()
    config.backend.overrides = {"hard/*": OverrideConfig(weight_granularity="per_tensor")}
    with typing(["recipe=mine", "backend=qnnpack", "output_dir=here"]):
        _, [(_, mend)], _ = checked(two_products(tmp_path / "two.onnx")[2], config)
    folder = tmp_path / "mend"
    assert mend.startswith(
        f"uv run train.py --config-dir {folder} recipe=mine backend=reduce_range (7-bit weights"
    )
    typed = ["backend=reduce_range", f"hydra.searchpath=['file://{folder}']"]
    found = compose_config(CONF, typed).backend
    assert found == replace(
        config.backend,
        overrides={
            **config.backend.overrides,
            "hard/op": OverrideConfig(weight_granularity="per_tensor", reduce_range=True),
        },
    )


def test_weights_that_rule_it_out_need_no_images(tmp_path: Path) -> None:
    path = tmp_path / "soft.onnx"
    onnx.save(Op("QLinearMatMul", X[:, :14], SOFT).model(), path)
    results, short, lines = checked(path, Config())
    assert not short and results.measured["saturation"]["images"] == 0
    assert lines == ["without VNNI (AVX2): 1 of 1 uint8 x int8 operators cannot saturate, by their weights"]


def test_silent_where_not_asked_for_and_short_where_asked_for_in_vain(tmp_path: Path) -> None:
    check, nothing, path = SaturationCheck(), Results("r", "m", ""), two_products(tmp_path / "two.onnx")[2]
    subject = Subject(tmp_path, {"int8": path}, lambda: [(X, [0] * len(X))], (30,), VerifyConfig())
    measured = check.measure(subject, nothing).measured
    assert bool(measured) == saturates_here()  # by itself, on a processor without VNNI
    assert not check.shortfalls(VerifyConfig(), nothing) and not check.lines(nothing)
    lines = [one.line for one in check.shortfalls(VerifyConfig(target_isa="avx2"), nothing)]
    assert lines == ["verify.target_isa=avx2: saturation was not measured"]
    _, short, said = checked(path, Config(), other_runtime="qatkit.verify.tensorrt_pairs")
    assert not short and said == ["saturation: not looked at, since another runtime executes the file"]


def test_what_can_not_be_emulated_leaves_the_other_figures(tmp_path: Path) -> None:
    path = two_products(tmp_path / "two.onnx")[2]
    path.write_bytes(path.read_bytes()[:100])
    results, short, _ = checked(path, Config())
    assert results.notes[0].startswith("saturation: not measured (ConfigError: onnx file=")
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
    assert results.notes[0].startswith(
        "saturation: not measured (ConfigError: verify.target_isa=avx2: output 1 is [2, "
    )


@pytest.mark.slow
def test_a_trained_file_is_mended_as_it_says_and_an_emulated_haswell_agrees(tmp_path: Path) -> None:
    def run(folder: Path, overrides: dict[str, OverrideConfig]) -> int:
        config = tiny(folder)
        config.verify.target_isa, config.verify.max_drop, config.backend.overrides = "avx2", None, overrides
        return train(config)

    assert run(tmp_path / "short", {}) == 1
    found = report_of(tmp_path / "short")["measured"]["saturation"]
    assert found["proposed"] == ["conv1/Conv"] and found["emulated"]["agreement"] < 0.95
    assert run(tmp_path / "mended", {"conv1": OverrideConfig(reduce_range=True)}) == 0
    if QEMU is None:
        pytest.skip("needs qemu-x86_64 (apt-get install qemu-user) for a CPU without VNNI")
    images = digits_test()[0][:64]
    for name in ("short", "mended"):
        path = tmp_path / name / "model.int8.onnx"
        np.savez(path.with_suffix(".npz"), input=images)
        path.parent.joinpath("model.float.onnx").unlink()
        command = [QEMU, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(path.parent)]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
        emulation = emulated(path)
        everywhere = [kernel.name for kernel in emulation.kernels]
        np.testing.assert_array_equal(
            np.load(path.with_suffix(".npy")), emulation.outputs(images, everywhere)[0]
        )
