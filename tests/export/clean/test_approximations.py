"""Tests of operators replaced by hardware approximations, of the reported error and of dropped Q/DQ pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from clean_nets import Arrays, cleaned, drawn, kinds, reference, run, save
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from qatkit.export.clean.rewrite.dpu import best_fraction
from qatkit.verify.sqnr import sqnr
from qatkit_verify.errors import ConfigError

Values = NDArray[np.float64]


def net(body: str, x: str = "2, 3, 6, 6") -> str:
    return (
        f'<ir_version: 8, opset_import: ["" : 18]> net (float[{x}] x) => (float[a, b, c, d] y) {{ {body} }}'
    )


def _pooled(x: Values, side: int) -> Values:
    n, c, h, w = x.shape
    return np.asarray(x.reshape(n, c, h // side, side, w // side, side).mean((3, 5)))


_CLIP = """low = Constant <value_float: float = {}> () high = Constant <value_float: float = {}> ()
  y = Clip (x, low, high)"""
_POOL = "y = AveragePool <kernel_shape: ints = [{0}, {0}], strides: ints = [{0}, {0}]> (x)"
_MEAN = "axes = Constant <value_ints: ints = [1, 2]> () y = ReduceMean (x, axes)"
# Graph body, and the expected values with the hardware's factors.
CASES: dict[str, tuple[str, Callable[[Values], Values]]] = {
    "relu6": (_CLIP.format(0.0, 6.0), lambda x: np.maximum(x, 0)),
    "leaky_relu": ("y = LeakyRelu <alpha: float = 0.1> (x)", lambda x: np.where(x < 0, x * 26 / 256, x)),
    "sigmoid": ("y = Sigmoid (x)", lambda x: np.clip(x / 6 + 0.5, 0, 1)),
    "hard_sigmoid": (
        "y = HardSigmoid <alpha: float = 0.16666667, beta: float = 0.5> (x)",
        lambda x: np.clip(x / 6 + 0.5, 0, 1) * 2731 / 16384 * 6,
    ),
    "average_pool": (_POOL.format(3), lambda x: _pooled(x, 3) * 9 * 7 / 64),
    "average_pool of 6": ("y = GlobalAveragePool (x)", lambda x: _pooled(x, 6) * 36 * 7 / 256),
    "average_pool of 2": (_POOL.format(2), lambda x: _pooled(x, 2)),
    "reduce_mean": (_MEAN, lambda x: x.mean((1, 2), keepdims=True) * 18 * 57 / 1024),
    "clip": (_CLIP.format(-1.6, 300.0), lambda x: np.clip(x, -2, 127)),
    "clip at infinity": (_CLIP.format("-inf", "inf"), lambda x: np.clip(x, -128, 127)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replaced_operator_computes_its_factors(case: str, tmp_path: Path) -> None:
    body, wanted = CASES[case]
    source = save(tmp_path / "net.onnx", net(body))
    found, _ = cleaned(source, approximate=[case.split()[0]])
    x = drawn(2, 3, 6, 6) * 5
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", {"x": x})
    np.testing.assert_allclose(ours, wanted(x.astype(np.float64)), rtol=2e-6, atol=2e-6)
    assert found.error is not None
    ratio = found.error.outputs["y"]
    told = f"the worst output has a signal-to-noise ratio of {ratio:.1f} dB against the original's"
    told = "all outputs are equal to the original's" if ratio == math.inf else told
    assert found.rows[-2:] == [("approximate", f"{case.split()[0]}: 1 replaced"), ("approximate", told)]


def test_the_error_is_that_of_the_outputs(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net("y = Sigmoid (x)"))
    np.savez(tmp_path / "given.npz", x=drawn(2, 3, 6, 6))
    found, _ = cleaned(source, approximate=["sigmoid"], inputs=f"{tmp_path / 'given.npz'}")
    x = drawn(2, 3, 6, 6).astype(np.float64)
    exact, other = 1 / (1 + np.exp(-x)), np.clip(x / 6 + 0.5, 0, 1)
    assert found.error is not None and math.isclose(
        found.error.outputs["y"], sqnr(exact, other), abs_tol=0.01
    )
    assert found.proof.outputs == {"y": float("inf")}  # the exact steps are proved on their own


def test_softmax_is_computed_in_bfloat16(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net("y = Softmax <axis: int = 1> (x)"))
    cleaned(source, approximate=["softmax"])
    x = drawn(2, 3, 6, 6) * 3
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", {"x": x})
    np.testing.assert_array_equal(ours, _softmax(x))
    assert 30 < sqnr(reference(source, {"x": x})[0], ours) < 60


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Computes a softmax over axis 1 with a cubic polynomial for exp, rounding each step to bfloat16."""

    def rounded(value: NDArray[np.float32]) -> NDArray[np.float32]:
        return value.astype(bfloat16).astype(np.float32)

    x = rounded(x)
    whole = np.floor(rounded(x * np.float32(1.4453125)))
    rest = rounded(x - rounded(whole * np.float32(0.69140625)))
    cubic = np.full_like(rest, 0.21875)
    for coefficient in (0.486328125, 1.0, 1.0):
        cubic = rounded(cubic * rest + np.float32(coefficient))
    power = rounded(rounded(np.float32(2) ** whole) * cubic)
    return rounded(power / rounded(power.sum(1, keepdims=True, dtype=np.float32)))


@pytest.mark.parametrize("count", [2, 3, 9, 49, 100, 7 * 9, 255 * 255])
def test_a_factor_is_the_best_of_its_bits(count: int) -> None:
    k, shift = best_fraction(count)
    errors = [abs(round(2**n / count) / 2**n - 1 / count) for n in range(7 + math.ceil(math.log2(count)))]
    assert abs(k / 2**shift - 1 / count) == min(errors)


def test_other_operators_stay(tmp_path: Path) -> None:
    body = "a = LeakyRelu <alpha: float = 0.5> (x) y = HardSigmoid <alpha: float = 0.2> (a)"
    source = save(tmp_path / "net.onnx", net(body))
    found, model = cleaned(source, approximate=["hard_sigmoid", "leaky_relu", "average_pool"])
    assert kinds(model) == ["LeakyRelu", "HardSigmoid"]
    assert found.error is not None and found.error.outputs == {"y": float("inf")}


_QUANTIZED = """q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) r = Relu (d)
  t = QuantizeLinear (r, s, z) u = DequantizeLinear (t, s, z) a = Neg (u) b = Abs (u) c = Add (a, b)
  v = QuantizeLinear (c, s, z) y = DequantizeLinear (v, s, z)"""
_SCALE: Arrays = {"s": np.asarray(0.25, np.float32), "z": np.asarray(128, np.uint8)}


@pytest.mark.parametrize(
    ("asked", "left", "readers"),
    [
        (["Relu:Neg"], 3, {"Neg": "Relu", "Abs": "DequantizeLinear"}),
        (["Relu:*"], 2, {"Neg": "Relu", "Abs": "Relu"}),
        (["Relu:Abs", "Add:*"], 2, {"Neg": "DequantizeLinear", "Abs": "Relu"}),
    ],
)
def test_pairs_are_dropped_between_operators(
    asked: list[str], left: int, readers: dict[str, str], tmp_path: Path
) -> None:
    source = save(tmp_path / "net.onnx", net(_QUANTIZED), _SCALE)
    found, model = cleaned(source, drop_pairs=asked)
    assert kinds(model).count("QuantizeLinear") == left
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    assert {
        node.op_type: made[node.input[0]] for node in model.graph.node if node.op_type in readers
    } == readers
    x = drawn(2, 3, 6, 6)
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", {"x": x})
    np.testing.assert_array_equal(ours, np.zeros_like(x))  # |y| - y, where no y is negative
    assert found.rows[-1][0] == "drop_pairs" and found.error is not None


def test_a_pair_that_rounds_is_missed(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(_QUANTIZED.replace("Abs", "Sigmoid")), _SCALE)
    cleaned(source, drop_pairs=["Add:*"])
    x = drawn(2, 3, 6, 6)
    first = np.maximum(np.round(x.astype(np.float64) / 0.25) * 0.25, 0)
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", {"x": x})
    np.testing.assert_allclose(ours, 1 / (1 + np.exp(-first)) - first, atol=1e-6)


def test_a_pair_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(_QUANTIZED), _SCALE)
    with pytest.raises(
        ConfigError, match=r"clean.drop_pairs=Conv:Relu: the file has no pair between such operators"
    ):
        cleaned(source, drop_pairs=["Conv:Relu"])


def test_casts_to_bfloat16_and_back_are_pairs(tmp_path: Path) -> None:
    body = """a = Cast <to: int = 16> (x) b = Cast <to: int = 1> (a) c = Cast <to: int = 1> (w)
      d = Mul (b, c) e = Cast <to: int = 16> (d) y = Cast <to: int = 1> (e)"""
    weight = np.asarray(1 / 3, bfloat16)
    source = save(tmp_path / "net.onnx", net(body), {"w": weight})
    found, model = cleaned(source, drop_pairs=["*:*"], fold="exact")
    assert kinds(model) == ["Mul"] and found.error is not None
    x = drawn(2, 3, 6, 6)
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", {"x": x})
    np.testing.assert_array_equal(ours, x * weight.astype(np.float32))
