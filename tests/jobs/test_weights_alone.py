"""Tests of whole runs on real images with a backend that only quantizes weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny_run import digits_test, logits, report_of, tiny, top

from qatkit.config.schema import BackendConfig, Config, OverrideConfig
from qatkit.jobs import pipeline
from qatkit_verify.errors import ConfigError

TARGET = "qatkit.quant.backends.WEIGHT_ONLY"


def asked(folder: Path, **backend: Any) -> Config:
    """Returns the config of a tiny run with low-bit weights."""
    config = tiny(folder, backend=BackendConfig(target=TARGET, **backend))
    config.export.bundle = False
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with float training, GPTQ and QAT."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    config = asked(folder)
    config.algorithm = {"gptq": {"target": "qatkit.algorithms.GPTQ", "images": 64}}
    assert pipeline.train(config) == 0
    return folder


def test_the_file_is_as_accurate_as_reported(finished: Path) -> None:
    images, labels = digits_test()
    reported = report_of(finished)
    for name in ("float", "int8"):
        scores = logits(finished / f"model.{name}.onnx", images)
        assert reported["accuracy"][name]["top1"] == pytest.approx(top(scores, labels, 1), abs=1e-9)
    assert reported["accuracy"]["int8"]["top1"] > 50


def test_nothing_but_weights_is_quantized(finished: Path) -> None:
    model = onnx.load(finished / "model.int8.onnx")
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["MatMulNBits"] == 1 and kinds["Conv"] == 2
    assert not {"QuantizeLinear", "DequantizeLinear", "Gemm"} & set(kinds)
    large = [one for one in model.graph.initializer if len(one.raw_data) > 1024]
    assert {one.data_type for one in large} <= {onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT}


def test_the_report_says_what_the_file_is(finished: Path) -> None:
    reported = report_of(finished)
    assert reported["label"] == "INT4 weights"
    assert reported["parity"]["optimized"]["max_steps"] < 0.01
    assert not reported["audit"]["problems"]
    page = (finished / "report.html").read_text()
    assert "INT4 weights, ONNX Runtime" in page and "INT8, " not in page


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "7 bits": ({"reduce_range": True}, "backend.reduce_range=true: expected auto with this backend"),
    "activations": (
        {"every_operator": True},
        "backend.every_operator=true: expected false with this backend",
    ),
    "one range": (
        {"overrides": {"fc": OverrideConfig(activation_dtype="int8")}},
        "backend.overrides.fc.activation_dtype=int8: expected null with this backend",
    ),
    "block": (
        {"weight_granularity": {"block": 48}},
        r"backend.weight_granularity=\{block: 48\}: expected one of per_tensor, per_channel, \{block: 16",
    ),
    "bits": ({"weight_dtype": "int5"}, "backend.weight_dtype=int5: expected one of int8, int4, int3, int2"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    backend, message = MISTAKES[case]
    with pytest.raises(ConfigError) as raised:
        pipeline.train(asked(tmp_path / "run", **backend))
    assert re.match(message, str(raised.value))
    assert not (tmp_path / "run").exists()


def test_blocks_are_refused_where_int8_kernels_multiply(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", backend=BackendConfig(weight_granularity={"block": 32}))
    with pytest.raises(
        ConfigError, match=r"granularity=\{block: 32\}: expected .*backend=weight_only allows blocks"
    ):
        pipeline.train(config)


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_int8_kernels_take_scales_in_float32_alone(dtype: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", backend=BackendConfig(weight_scale_dtype=dtype))
    with pytest.raises(ConfigError, match=rf"scale_dtype={dtype}: expected float32, .*backend=weight_only"):
        pipeline.train(config)


@pytest.mark.parametrize("key", ["io", "pack_int4"])
def test_what_a_file_of_weights_has_no_use_for_is_refused(key: str, tmp_path: Path) -> None:
    config = asked(tmp_path / "run")
    settings: dict[str, dict[str, Any]] = {
        "io": {"io": "uint8"},
        "pack_int4": {"pack_int4": True, "opset": 21},
    }
    changed = settings[key]
    config = replace(
        config, export=replace(config.export, **changed), verify=replace(config.verify, audit=False)
    )
    with pytest.raises(ConfigError, match=f"export.{key}=.*with this backend"):
        pipeline.train(config)
