"""Tests of rewrites that compute the same function with other operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, cleaned, drawn, kinds, reference, run, save

from qatkit.config.fields import limit_of
from qatkit.config.schema import CleanConfig
from qatkit.export.clean.rewrite.run import APPROXIMATE, EXACT, SAME
from qatkit_verify.errors import ConfigError


def net(body: str, x: str = "batch, 6, 10, 8", y: str = "batch, n, h, w", opset: int = 20) -> str:
    """Returns a model in onnx's text syntax with the float input x and output y."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}]> net (float[{x}] x) => (float[{y}] y)'
    return f"{head} {{ {body} }}"


_AXES = "axes = Constant <value_ints: ints = [2, 3]> ()"
_HALF_NORM = """
  m = ReduceMean (x, axes)   d = Sub (x, m)   q = {square}   v = ReduceMean (q, axes)
  e = Constant <value_float: float = 0.01> ()   s = Add (v, e)   r = Sqrt (s)"""
_LAST = "axes = Constant <value_ints: ints = [-1]> ()"
_MUL_NORM = _HALF_NORM.format(square="Mul (d, d)")
_POW_NORM = "two = Constant <value_float: float = 2.0> ()" + _HALF_NORM.format(square="Pow (d, two)")
LAYER = f"{_LAST} {_MUL_NORM} n = Div (d, r) g = Mul (n, w) y = Add (b, g)"
LAYER_BARE = f"{_LAST} {_POW_NORM} y = Div (d, r)"
INSTANCE = f"{_AXES} {_MUL_NORM} i = Reciprocal (r) n = Mul (i, d) g = Mul (w, n) y = Add (g, b)"
INSTANCE_SUMS = """m = GlobalAveragePool (x) d = Sub (x, m) q = Mul (d, d) v = GlobalAveragePool (q)
  e = Constant <value_float: float = 0.01> () s = Add (v, e) r = Sqrt (s) i = Reciprocal (r) a = Mul (i, w)
  p = Mul (x, a) t = Mul (m, a) u = Sub (b, t) y = Add (p, u)"""
NORMALIZE = """axes = Constant <value_ints: ints = [1]> () s = ReduceL2 (x, axes)
  low = Constant <value_float: float = 1.0e-12> () c = Clip (s, low) h = Shape (x) e = Expand (c, h) y = Div (x, e)"""
L2_SUMS = """axes = Constant <value_ints: ints = [1]> () q = Mul (x, x) s = ReduceSum (q, axes)
  low = Constant <value_float: float = 1.0e-12> () c = Max (s, low) r = Sqrt (c) i = Reciprocal (r) y = Mul (x, i)"""
GELU = """k = Constant <value_float: float = 1.4142135> () one = Constant <value_float: float = 1.0> ()
  half = Constant <value_float: float = 0.5> () d = Div (x, k) e = Erf (d) a = Add (e, one) p = Mul (x, a)
  y = Mul (p, half)"""
GELU_TANH = """three = Constant <value_float: float = 3.0> () one = Constant <value_float: float = 1.0> ()
  half = Constant <value_float: float = 0.5> () c = Constant <value_float: float = 0.044715> ()
  k = Constant <value_float: float = 0.7978845608> () q = Pow (x, three) t = Mul (q, c) s = Add (x, t) u = Mul (s, k)
  h = Tanh (u) a = Add (h, one) p = Mul (x, half) y = Mul (p, a)"""
ROW = {"w": drawn(8, seed=1), "b": drawn(8, seed=2)}
COLUMN = {"w": drawn(1, 6, 1, 1, seed=1), "b": drawn(6, 1, 1, seed=2)}
NORM = {"s": drawn(6, seed=3), "t": drawn(6, seed=4), "m": drawn(6, seed=5), "v": drawn(6, seed=6) ** 2 + 0.1}
BATCH_NORM = "y = BatchNormalization (x, s, t, m, v)"
CONCAT = """c = Conv <kernel_shape: ints = [1, 1]> (x, f)
  d = ConvTranspose <group: int = 2, kernel_shape: ints = [1, 1]> (x, g, h)
  j = Concat <axis: int = 1> (c, d) n = BatchNormalization (j, s, t, m, v) y = Relu (n)"""
CONVS = {"f": drawn(2, 6, 1, 1, seed=7), "g": drawn(6, 2, 1, 1, seed=8), "h": drawn(4, seed=9)}
MEAN = f"{_AXES} y = ReduceMean <keepdims: int = 1> (x, axes)"
MEAN_FLAT = f"{_AXES} y = ReduceMean <keepdims: int = 0> (x, axes)"
SPLIT = "a, b, c = Split <axis: int = 1, num_outputs: int = 3> (x) j = Concat <axis: int = 1> (c, a) y = Add (j, j)"
CLIP = "low = Constant <value_float: float = 0.0> () y = Clip (x, low)"
MAX = "zero = Constant <value_float: float = 0.0> () y = Max (zero, x)"

CASES: dict[str, tuple[str, str, Arrays, list[str]]] = {
    "layer_norm": ("layer_norm", net(LAYER), ROW, ["LayerNormalization"]),
    "layer_norm_alone": ("layer_norm", net(LAYER_BARE), {}, ["LayerNormalization"]),
    "instance_norm": ("instance_norm", net(INSTANCE), COLUMN, ["InstanceNormalization"]),
    "instance_norm_of_sums": ("instance_norm", net(INSTANCE_SUMS), COLUMN, ["InstanceNormalization"]),
    "normalize": ("l2_norm", net(NORMALIZE), {}, ["LpNormalization"]),
    "l2_norm_of_sums": ("l2_norm", net(L2_SUMS), {}, ["LpNormalization"]),
    "gelu": ("gelu", net(GELU), {}, ["Gelu"]),
    "gelu_of_tanh": ("gelu", net(GELU_TANH), {}, ["Gelu"]),
    "clip": ("relu", net(CLIP), {}, ["Relu"]),
    "max": ("relu", net(MAX), {}, ["Relu"]),
    "batch_norm": ("batch_norm_to_conv", net(BATCH_NORM), NORM, ["Conv"]),
    "concat": ("batch_norm_of_concat", net(CONCAT), NORM | CONVS, ["Conv", "ConvTranspose", "Concat", "Relu"]),
    "mean": ("mean_to_pool", net(MEAN), {}, ["GlobalAveragePool"]),
    "flat_mean": ("mean_to_pool", net(MEAN_FLAT, y="batch, n"), {}, ["GlobalAveragePool", "Flatten"]),
    "split": ("split_to_slice", net(SPLIT), {}, ["Slice", "Slice", "Concat", "Add"]),
    "large_pool": (
        "split_pool",
        net("y = GlobalAveragePool (x)", x="batch, 2, 36, 30"),
        {},
        ["AveragePool", "GlobalAveragePool"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_other_operators_give_the_same_values(case: str, tmp_path: Path) -> None:
    name, text, weights, wanted = CASES[case]
    source = save(tmp_path / "net.onnx", text, weights)
    found, model = cleaned(source, rewrite=[name])
    assert sorted(kinds(model)) == sorted(wanted)
    assert found.rows[0] == ("rewrite", f"{name}: 1 replaced")
    shape = [size.dim_value or 3 for size in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": drawn(*shape) * 3}
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", feeds)
    expected = run if "group" in text else reference  # onnx's evaluator lacks groups
    np.testing.assert_allclose(ours, expected(source, feeds)[0], rtol=1e-5, atol=2e-6)
    assert (found.proof.bound == float("inf")) == (name in EXACT)


def test_a_norm_with_a_scale_of_channels_is_an_instance_norm(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(INSTANCE), COLUMN)
    _, model = cleaned(source, rewrite=["layer_norm", "instance_norm"])
    assert kinds(model) == ["InstanceNormalization"]


_OTHER = {
    "a_bound_above": (
        "relu",
        CLIP.replace("(x, low)", "(x, low, high)").replace("y =", "high = Add (low, ones) y ="),
    ),
    "no_zero": ("relu", MAX.replace("0.0", "0.5")),
    "a_large_epsilon": ("l2_norm", L2_SUMS.replace("1.0e-12", "0.01")),
    "other_axes": ("layer_norm", LAYER_BARE.replace("[-1]", "[1]")),
    "one_axis": ("instance_norm", INSTANCE.replace("[2, 3]", "[2]")),
    "another_number": ("gelu", GELU.replace("1.4142135", "1.5")),
    "a_small_pool": ("split_pool", "y = GlobalAveragePool (x)"),
    "a_scale_of_channels": ("layer_norm", INSTANCE),
    "a_mean_of_channels": ("mean_to_pool", MEAN.replace("[2, 3]", "[1]")),
}


@pytest.mark.parametrize("case", _OTHER)
def test_what_is_another_function_stays(case: str, tmp_path: Path) -> None:
    name, body = _OTHER[case]
    weights = COLUMN | {"ones": np.ones((), np.float32)}
    found, _ = cleaned(save(tmp_path / "net.onnx", net(body), weights), rewrite=[name])
    assert found.rows[0] == ("rewrite", f"{name}: 0 replaced")


PAIRS = """q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
  u = DequantizeLinear <axis: int = 0> (k, c) w = DequantizeLinear (v, s, z)
  e = Conv <kernel_shape: ints = [1, 1]> (d, u) f = Conv <kernel_shape: ints = [1, 1]> (d, w) y = Sub (e, f)"""
INTEGERS: Arrays = {
    "s": np.asarray(0.031, np.float32),
    "z": np.asarray(121, np.uint8),
    "c": np.abs(drawn(5, seed=1)) + np.float32(1e-3),
    "k": np.arange(-15, 15).astype(np.int8).reshape(5, 6, 1, 1) * np.int8(4),
    "v": np.arange(0, 240, 8).astype(np.uint8).reshape(5, 6, 1, 1),
}  # fmt: skip


def test_each_reader_gets_a_pair_of_its_own(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(PAIRS), INTEGERS)
    found, model = cleaned(source, rewrite=["dedicated_pairs"])
    assert kinds(model).count("QuantizeLinear") == 2 and kinds(model).count("DequantizeLinear") == 4
    read = [name for node in model.graph.node for name in node.input]
    made = [
        node.output[0] for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    ]
    assert all(read.count(name) == 1 for name in made)
    assert found.proof.outputs == {"y": float("inf")}


@pytest.mark.parametrize(("zero", "folded"), [(0, True), (3, False)])
def test_a_relu_goes_where_its_quantizer_clips(zero: int, folded: bool, tmp_path: Path) -> None:
    text = net("r = Relu (x) q = QuantizeLinear (r, s, z) y = DequantizeLinear (q, s, z)")
    weights: Arrays = {"s": np.asarray(0.1, np.float32), "z": np.asarray(zero, np.uint8)}
    source = save(tmp_path / "net.onnx", text, weights)
    found, model = cleaned(source, rewrite=["fold_relu"])
    assert kinds(model) == ([] if folded else ["Relu"]) + ["QuantizeLinear", "DequantizeLinear"]
    assert found.proof.outputs == {"y": float("inf")}


def test_bfloat16_does_not_become_infinite(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net("c = Cast <to: int = 16> (x) y = Cast <to: int = 1> (c)"))
    found, model = cleaned(source, rewrite=["bfloat16_clip"])
    assert kinds(model) == ["Clip", "Cast", "Cast"] and found.proof.outputs == {"y": float("inf")}
    x = np.full((1, 6, 10, 8), np.finfo(np.float32).max, np.float32)
    assert np.isinf(run(source, {"x": x})[0]).all()
    largest = np.float32(2.0**128 - 2.0**120)
    np.testing.assert_array_equal(run(tmp_path / "cleaned" / "model.clean.onnx", {"x": -x})[0], -largest)


def test_weights_get_whole_pairs(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(PAIRS), INTEGERS)
    found, model = cleaned(source, rewrite=["weight_pairs"])
    assert kinds(model).count("QuantizeLinear") == 3
    stored = {one.name: one.data_type for one in model.graph.initializer}
    made = {node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    pairs = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert all(pair.input[0] in made for pair in pairs)  # no integer weight is stored
    assert onnx.TensorProto.FLOAT in stored.values()
    feeds = {"x": drawn(2, 6, 10, 8)}
    (ours,) = run(tmp_path / "cleaned" / "model.clean.onnx", feeds)
    np.testing.assert_allclose(ours, reference(source, feeds)[0], rtol=1e-5, atol=1e-4)
    assert found.proof.outputs == {"y": float("inf")}


def test_a_tensor_that_others_read_stays(tmp_path: Path) -> None:
    text = net("n = BatchNormalization (j, s, t, m, v) z = Add (n, j) y = Relu (z)").replace(
        "{", "{ c = Conv <kernel_shape: ints = [1, 1]> (x, f) j = Concat <axis: int = 1> (c, c, c)"
    )
    source = save(tmp_path / "net.onnx", text, NORM | CONVS)
    found, _ = cleaned(source, rewrite=["batch_norm_of_concat"])
    assert found.rows[0] == ("rewrite", "batch_norm_of_concat: 0 replaced")


def test_branches_are_rewritten_too(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]> net (float[1, 6, 4, 4] x, bool c) => (float[1, 6, 1, 1] y)
      <int64[2] axes = {2, 3}> {
      y = If (c) <then_branch = a () => (float[1, 6, 1, 1] p) { p = ReduceMean (x, axes) },
                  else_branch = b () => (float[1, 6, 1, 1] q) { q = ReduceMax (x, axes) }> }"""
    found, _ = cleaned(save(tmp_path / "net.onnx", text), rewrite=["mean_to_pool"])
    assert found.rows[0] == ("rewrite", "mean_to_pool: 1 replaced")


def test_an_operator_that_is_too_new_is_one_line(tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", net(GELU, opset=18))
    with pytest.raises(
        ConfigError, match=r"clean.rewrite=gelu: the operator needs opset 20, .*set clean.opset=20"
    ):
        cleaned(source, rewrite=["gelu"])
    _, model = cleaned(source, rewrite=["gelu"], opset=20)
    assert kinds(model) == ["Gelu"]


def test_the_settings_name_all_rewrites() -> None:
    for name, rules in (("rewrite", SAME), ("approximate", APPROXIMATE)):
        assert limit_of(CleanConfig, name).holds([*rules])
        assert not limit_of(CleanConfig, name).holds(["no_rewrite"])
