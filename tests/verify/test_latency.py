"""Tests of latency: less work is faster, ratios are taken within a round, and bad settings are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from qdq_graphs import classifier
from quantized_resnet import Files, quantized_resnet18

from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import from_times, latency


@pytest.fixture(scope="module")
def resnet18() -> Files:
    return quantized_resnet18()


def test_a_file_of_a_hundredth_of_the_work_is_much_faster(resnet18: Files, tmp_path: Path) -> None:
    classifier(tmp_path / "small.onnx")
    classifier(tmp_path / "same.onnx")
    files = {"small": tmp_path / "small.onnx", "same": tmp_path / "same.onnx"}
    result = latency(files, (16, 8, 8), threads=1, runs=40)
    assert list(result) == ["small", "same"]
    assert result["small"].ratio == result["small"].ratio_p10 == result["small"].ratio_p90 == 1
    assert 0.25 < result["same"].ratio < 4
    big = latency({"big": resnet18.float_path}, (3, 64, 64), threads=1, runs=5)["big"]
    assert big.p10_ms <= big.median_ms <= big.p90_ms
    assert big.median_ms > 3 * result["small"].median_ms
    assert (big.batch, big.threads, big.runs) == (1, 1, 5)


def test_ratios_are_taken_within_a_round() -> None:
    """On a machine that gets slower from round to round, the medians drift but the ratio stays."""
    slowdown = np.linspace(1, 9, 41)
    result = from_times(10 * slowdown, 4 * slowdown, batch=1, threads=2)
    assert (result.ratio, result.ratio_p10, result.ratio_p90) == pytest.approx((2.5, 2.5, 2.5))
    assert (result.p10_ms, result.median_ms, result.p90_ms) == pytest.approx((4 * 1.8, 4 * 5, 4 * 8.2))
    assert (result.batch, result.threads, result.runs) == (1, 2, 41)


def test_bad_requests(tmp_path: Path) -> None:
    classifier(tmp_path / "fixed.onnx", batch=4)
    with pytest.raises(ConfigError, match=r"verify\.latency_batch=1: .*fixed batch of 4"):
        latency({"a": tmp_path / "fixed.onnx"}, (16, 8, 8))
    with pytest.raises(ConfigError, match=r"verify\.latency_runs=0"):
        latency({"a": tmp_path / "fixed.onnx"}, (16, 8, 8), batch=4, runs=0)
