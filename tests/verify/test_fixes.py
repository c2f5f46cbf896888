"""Tests of the fixes for shortfalls: only settings that this run accepts and has not used already."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_thresholds import GOOD, STRICT

from qatkit.config.compose import compose_config
from qatkit.config.schema import (
    BackendConfig,
    CalibrationConfig,
    Config,
    ExportConfig,
    OverrideConfig,
    ScheduleConfig,
)
from qatkit.records.fixes import Fix, either
from qatkit.records.results import MIXED_SCALES, Audit, Divergence, NodeAudit, Parity, Results, TensorParity
from qatkit.verify.checks.base import default_checks
from qatkit.verify.checks.requested import RequestedSettings
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.classification import classified
from qatkit_verify.records import Comparison, Hardware, Latency

_MIXED = "precision=auto (keeps the operators that lose most in float)"
CONF = Path(__file__).parents[2] / "conf"
NODE = NodeAudit("a", "FusedConv", "", "float", "layer1.0.conv1/Conv", "no output pair", True, 10, None)
FIRST = TensorParity("layer1.0.add_quant/QuantizeLinear_output", 10, 0.5, 9)
BAD = replace(
    GOOD,
    accuracy={"float": classified(78.6, None, 1000), "int8": classified(76.2, None, 1000)},
    latency={"int8": Latency(2.0, 1.9, 2.2, 1.256, 1.2, 1.3, 1, 2, 50)},
    sizes={"float": 40_000_000, "int8": 20_000_000},
    parity=Parity(512, 0.1, "a step", Comparison(0.5, 0, 0, 0, 0), Comparison(0.5, 9, 1, 90, 10)),
    divergence=Divergence(1, FIRST, (FIRST,), operator="layer1.0.add/Add"),
    audit=Audit(
        (NODE,), {}, 1, 1, 2, (), 100, 50, ("float FusedConv 'layer1.0.conv1/Conv': no output pair",)
    ),
    hardware=Hardware("cpu", 2, ("avx2", "avx512_vnni"), 2, "Linux x86_64"),
)


def test_a_node_of_an_imported_file_is_overridden_by_its_name() -> None:
    of_a_file = {"model": {"name": "onnx/net.onnx"}, "schedule": {}, "export": {"mode": "static"}}
    asked = RequestedSettings(replace(GOOD, config=of_a_file))
    (one,) = asked.override("/head.0/Conv_3")
    assert str(one) == "'+backend.overrides={/head.0/Conv_3:{float:true}}' (keeps '/head.0/Conv_3' in float)"
    assert asked.override("Conv: 3") == []  # Hydra accepts no quoted keys
    (of_module,) = RequestedSettings(replace(GOOD, config={})).override("fc_quant/Gemm", "slow in int8")
    assert of_module == Fix(("+backend.overrides={fc:{float:true}}",), "slow in int8")


def fixes(results: Results, config: Config, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the fix for each bound, by its key."""
    told = {key: value for key, value in asdict(config).items() if key not in without}
    found = shortfalls(default_checks(), STRICT, replace(results, config=told))
    return {one.line.partition("=")[0].removeprefix("verify."): either(one.fixes) for one in found}


def test_each_bound_of_a_trained_module() -> None:
    assert fixes(BAD, Config(schedule=ScheduleConfig(epochs=3))) == {
        "max_drop": "calibration=auto, or algorithm=auto (uses the algorithms that help), or precision=auto (keeps the"
        " operators that lose most in float), or schedule.epochs=6",
        "min_agreement": "'+backend.overrides={layer1.0.add:{float:true}}' (keeps 'layer1.0.add/Add' in float)",
        "max_size_ratio": "verify.max_size_ratio=0.5 (the ratio of this file; no override keeps operators in float)",
        "min_speedup": "placement=measured (operators that are slower in int8 here stay float), or faster"
        " operators in place of those that the audit reports in float",
        "audit": "'+backend.overrides={layer1.0.conv1:{float:true}}' (keeps it in float: no output pair)",
    }


def test_a_large_file_names_what_calibration_left_in_float() -> None:
    left = [("fc", f"{MIXED_SCALES} what fc holds"), ("norm", "float LayerNorm: no int8 kernel")]
    fix = fixes(replace(BAD, skipped=left), Config())["max_size_ratio"]
    assert fix.startswith(
        "calibration.mixed_scales=report (quantizes 1 operator that calibration left in float)"
    )


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (
            Config(backend=BackendConfig(overrides={"*": OverrideConfig(activation_dtype="uint4")})),
            "backend.overrides.*.activation_dtype=uint4",
        ),
        (Config(backend=BackendConfig(overrides={"layer1": OverrideConfig(activation_dtype="uint4")})), ""),
        (Config(export=ExportConfig(pack_int4=True)), "export.pack_int4=true"),
        (Config(backend=BackendConfig(overrides={"*": OverrideConfig(activation_dtype="int8")})), ""),
    ],
)
def test_what_no_kernel_computes_is_not_measured_away(config: Config, setting: str) -> None:
    """If no kernel computes a setting, no placement is advised, and the audit lists no float operators."""
    slow = replace(
        BAD, latency={"int8": Latency(9.0, 8.9, 9.2, 0.56, 0.5, 0.6, 1, 2, 50)}, config=asdict(config)
    )
    checks = {one.name: one for one in default_checks()}
    (speed,) = checks["latency"].lines(slow)
    audit = checks["audit"].lines(slow)
    assert ("placement=measured" in speed) == (not setting)
    assert ("layer1.0.conv1/Conv" in "".join(audit)) == (not setting)
    if setting:
        assert speed == f"INT8 runs in float here, at 0.56 of float's speed: no kernel computes {setting}"
        assert fixes(slow, config)["min_speedup"].startswith("verify.min_speedup=null (no kernel computes ")


@pytest.mark.parametrize(
    ("shares", "adds_up"),
    [
        (
            (0.0, 0.00002, 0.0007, 0.013, 0.06),
            True,
        ),  # as in a transformer: first one value in 50,000, then some rows
        ((0.0, 0.00002, 0.0007, 0.013, 0.5), False),  # here the last operator computes something else
        ((0.0, 0.0, 0.0, 0.0, 0.06), False),
    ],
)
def test_roundings_that_add_up_are_no_operators_fault(shares: tuple[float, ...], adds_up: bool) -> None:
    *before, last = (TensorParity(f"t{i}", 50_000, share, int(share > 0)) for i, share in enumerate(shares))
    first = replace(last, max_steps=2)
    found = replace(BAD, divergence=Divergence(1, first, (*before, first), operator="layer1.0.add/Add"))
    told = asdict(Config())
    (short,) = [
        one
        for one in shortfalls(default_checks(), STRICT, replace(found, config=told))
        if one.line.startswith("verify.min_agreement")
    ]
    assert short.line.endswith(
        "; rounding differences accumulate from 't1' on"
        if adds_up
        else "; the first tensor that differs is 't4'"
    )
    assert either(short.fixes) == (
        "verify.min_agreement=0.5 (rounding differences of single values accumulate; no operator is at fault)"
        if adds_up
        else "'+backend.overrides={layer1.0.add:{float:true}}' (keeps 'layer1.0.add/Add' in float)"
    )


@pytest.mark.parametrize(
    ("control", "by_training"), [(76.9, True), (77.4, True), (77.6, False), (79.0, False)]
)
def test_a_drop_that_float_shares_is_blamed_on_fine_tuning(control: float, by_training: bool) -> None:
    """Fine-tuning is blamed if float also lost at least half of the 2.4 points."""
    found = replace(BAD, accuracy={**BAD.accuracy, "control": classified(control, None, 1000)})
    fix = fixes(found, Config(schedule=ScheduleConfig(epochs=3, lr=2e-3)))["max_drop"]
    lost = f"the float control also lost {78.6 - control:.2f} points by this fine-tuning"
    expected = f"schedule.lr=0.0002 ({lost}), or schedule=calibrate_only (trains nothing)"
    assert fix == expected if by_training else "schedule.lr" not in fix and "schedule.epochs=6" in fix


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["schedule=calibrate_only"], "calibration=auto, or algorithm=auto (uses the algorithms that help), or "
         f"{_MIXED}, or schedule=qat_sgd (fine-tunes; schedule=qat_adamw for a transformer)"),
        (["calibration=auto"], f"algorithm=auto (uses the algorithms that help), or {_MIXED}, or schedule.epochs=4"),
        (["calibration=auto", "algorithm=auto", "schedule.max_steps=50"],
         f"{_MIXED}, or schedule.max_steps=100"),
        (["calibration=auto", "algorithm=equalize"],
         f"algorithm=auto (uses the algorithms that help), or {_MIXED}, or schedule.epochs=4"),
        (["calibration=auto", "algorithm=auto"], f"{_MIXED}, or schedule.epochs=4"),
        (["calibration=auto", "algorithm=auto", "precision=auto"], "schedule.epochs=4"),
        (["calibration.random=true", "algorithm=all"],
         "calibration.random=false (ranges of real data), or schedule.epochs=4"),
    ],
)  # fmt: skip
def test_accuracy_advises_what_was_not_done(typed: list[str], expected: str) -> None:
    """Advice leaves out what the configuration (composed as on the command line) has already done."""
    config = compose_config(CONF, typed)
    assert fixes(BAD, config)["max_drop"] == expected


def test_a_table_for_tensorrt_allows_no_training() -> None:
    config = Config(schedule=ScheduleConfig(epochs=0), export=ExportConfig(tensorrt_table="8601"))
    config.calibration = CalibrationConfig(search="tournament")
    assert fixes(BAD, config)["max_drop"] == ""


@pytest.mark.parametrize("mode", ["dynamic", "static", "weight_only", "float16"])
def test_a_file_of_no_module_is_never_advised_to_train(mode: str) -> None:
    found = fixes(BAD, Config(onnx="m.onnx", mode=mode), without=("model", "algorithm", "schedule"))
    text = " ".join(found.values())
    assert not any(word in text for word in ("schedule", "algorithm", "calibration", "overrides"))
    assert f"mode={mode}" not in text and "export.mode" not in text
    assert found["max_drop"] and found["min_agreement"]
    of_model = Config(export=ExportConfig(mode=mode)) if mode != "static" else None
    if of_model is not None:
        assert "export.mode=" in fixes(BAD, of_model)["max_drop"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"latency": {"int8": Latency(2.0, 1.9, 2.2, 1.9, 1.7, 2.1, 1, 2, 50)}}, "verify.latency_runs=200"),
        ({"session_options": {"session.qdqisint8allowed": "1"}}, "backend=fbgemm"),
        ({"hardware": Hardware("cpu", 2, ("avx2",), 2, "Linux x86_64")}, "a CPU with VNNI"),
        ({"audit": replace(GOOD.audit or Audit((), {}, 0, 0, 0, (), 0, 0, ()), for_onnxruntime=False)},
         "verify.min_speedup=null"),
        ({"audit": None}, "verify.min_speedup=1.25 (the speed-up of this file on this machine)"),
    ],
)  # fmt: skip
def test_speed_advises_by_what_was_measured(changes: dict[str, Any], expected: str) -> None:
    found = fixes(replace(BAD, **changes), Config())["min_speedup"]
    assert expected in found and ("placement=measured" in found) == (expected != "verify.min_speedup=null")
    assert "placement" not in fixes(replace(BAD, **changes), Config(placement="measured"))["min_speedup"]


def test_float_that_was_asked_for_is_taken_back_first() -> None:
    config = Config()
    config.backend.overrides = {"fc": OverrideConfig(float=True), "conv": OverrideConfig(weight_dtype="int8")}
    assert (
        fixes(BAD, config)["max_size_ratio"]
        == "fewer operators in float than backend.overrides asks for (fc)"
    )


def test_tensors_that_agree_are_no_operators_fault() -> None:
    found = replace(BAD, divergence=Divergence(0, None, (), operator=None))
    assert fixes(found, Config())["min_agreement"].startswith("verify.min_agreement=0.5 (every tensor agrees")
