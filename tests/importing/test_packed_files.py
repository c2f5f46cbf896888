"""Tests of given ONNX files that are written back with quantized weights and float activations.

Their outputs are compared with NumPy, the float file and the converted module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx_models import INT64, save, sqnr
from packed import by_reference, dequantized
from small_nets import (
    Case,
    Net,
    attention,
    begin_again,
    conditions,
    dense_block,
    floats,
    gemms,
    groups,
    norm_behind_matmul,
    residual,
    saved,
    transposed,
)
from written import difference, outputs, same, write

from qatkit.config.schema import OverrideConfig
from qatkit.quant.backends import WEIGHT_ONLY, Backend
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel

BLOCKS = PerBlock(32)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    begin_again()


def weights(dtype: str, granularity: Granularity = BLOCKS, symmetric: bool = False) -> Backend:
    spec = replace(WEIGHT_ONLY.weight, dtype=dtype, granularity=granularity, symmetric=symmetric)
    return replace(WEIGHT_ONLY, weight=spec)


IMAGES, ROWS = {"x": (2, 3, 16, 16)}, {"x": (4, 8)}
CASES = {
    "convolutions": (Case(residual, {"MatMulNBits": 1}, IMAGES), weights("int4"), 20),
    "groups": (Case(groups, {}, IMAGES, opset=11), weights("int3", PerBlock(16), True), 12),
    "transposed": (Case(transposed, {}, IMAGES), weights("int4"), 20),
    "norms alone": (Case(dense_block, {"MatMulNBits": 1}, IMAGES), weights("int4"), 15),
    "branches": (Case(conditions, {}, IMAGES), weights("int4"), 15),
    "Gemm": (Case(gemms, {"MatMulNBits": 3}, ROWS), weights("int4", PerBlock(16)), 20),
    "Gemm, 2 bits": (Case(gemms, {"MatMulNBits": 3}, ROWS), weights("int2", PerBlock(16)), 2),
    "Gemm, 8 bits": (Case(gemms, {"Gemm": 3}, ROWS), weights("int8", PerChannel(0)), 40),
    "norm behind": (Case(norm_behind_matmul, {"MatMulNBits": 2}, ROWS), weights("int4"), 15),
    "norm behind, 8 bits": (Case(norm_behind_matmul, {"Gemm": 1, "MatMul": 1}, ROWS), weights("int8"), 40),
    "attention": (Case(attention, {"MatMulNBits": 5}, {"x": (2, 5, 16)}), weights("int4", PerChannel(0)), 12),
}


@pytest.mark.parametrize("case", CASES)
def test_edited_file_computes_its_dequantized_weights(case: str, tmp_path: Path) -> None:
    built, backend, least = CASES[case]
    source, feeds = saved(built, tmp_path)
    written = write(source, feeds, backend=backend)
    same(written, feeds)
    arrays = {name: value.numpy() for name, value in feeds.items()}
    found, exact = outputs(written.path, feeds, optimized=True), outputs(source, feeds, optimized=True)
    for one, wanted, given in zip(found, by_reference(written.path, arrays), exact, strict=True):
        assert sqnr(wanted, one) > 110
        assert sqnr(given, one) > least
    kinds = Counter(node.op_type for node in onnx.load(str(written.path)).graph.node)
    assert {kind: kinds[kind] for kind in built.kernels} == dict(built.kernels)
    assert not difference(source, written.path).pairs


def test_norm_without_an_operator_before_it_stays_float(tmp_path: Path) -> None:
    source, feeds = saved(Case(dense_block, {}), tmp_path)
    written = write(source, feeds, backend=weights("int4"))
    kinds = [Counter(n.op_type for n in onnx.load(str(path)).graph.node) for path in (source, written.path)]
    assert kinds[0]["BatchNormalization"] == kinds[1]["BatchNormalization"]


def test_operator_that_an_override_leaves_float_is_as_given(tmp_path: Path) -> None:
    source, feeds = saved(Case(gemms, {}, ROWS), tmp_path)
    overrides = {"/Gemm_2": OverrideConfig(float=True)}
    written = write(source, feeds, backend=weights("int4"), overrides=overrides)
    same(written, feeds)
    assert difference(source, written.path).changed == {"/Gemm_0", "/Gemm_4"}


def words(folder: Path) -> Path:
    """Writes a model that looks up ids [n, t], and the same ids flattened, in a table.

    The last MatMul multiplies by a transposed copy of the table.
    """
    net = Net()
    table = net.constant(floats(50, 72))
    found = net.add("Gather", table, "ids")
    made = net.add("MatMul", found, net.constant(floats(72, 72)))
    turned = net.constant(net.constants[table].T.copy())
    row = net.add("Reshape", "ids", net.constant(np.array([-1])))
    ends = [net.add("MatMul", made, turned), net.add("Gather", table, row)]
    path = folder / "float.onnx"
    return save(path, net.nodes, {"ids": (INT64, ["n", "t"])}, ends, net.constants)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_tables_are_looked_up_packed_in_a_given_file(dtype: str, tmp_path: Path) -> None:
    source = words(tmp_path)
    feeds = {"ids": torch.randint(0, 50, (3, 7))}
    written = write(source, feeds, backend=weights(dtype))
    same(written, feeds)
    other = {"ids": np.array([[1, -2, 49, 0]])}
    found = outputs(written.path, {"ids": torch.from_numpy(other["ids"])}, optimized=True)
    for one, wanted in zip(found, by_reference(written.path, other), strict=True):
        assert one.shape == wanted.shape and sqnr(wanted, one) > 110
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(written.path)).graph.initializer}
    assert not [name for name, one in held.items() if one.dtype == np.float32 and one.size >= 50 * 72]
    assert len([one for one in held.values() if one.dtype == np.uint8 and one.shape[:1] == (50,)]) < 4


def test_weights_lie_within_half_a_step_of_the_given_ones(tmp_path: Path) -> None:
    source, feeds = saved(Case(gemms, {}, ROWS), tmp_path)
    written = write(source, feeds, backend=weights("int4", PerBlock(16)))
    model = onnx.load(str(written.path))
    held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    given = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(source)).graph.initializer}
    node = next(one for one in model.graph.node if one.name == "/Gemm_2")
    packed, scale, zero = (held[name] for name in node.input[1:4])
    found = dequantized(packed, scale, zero, 4, 12)
    assert (np.abs(found - given["c2"]) <= 0.501 * scale[:, :1]).all()
