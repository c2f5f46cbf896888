"""Tests of the number of channels that can saturate, against brute force, and of the message about it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundles import make, seal
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from third_party_files import File, conv, dynamic, floats, gemm, integers, large, to_float
from third_party_files import bytes_of as some_bytes
from third_party_files import product as multiplied
from third_party_graphs import W, graphs

from qatkit_verify.bundle.manifest import read_manifest
from qatkit_verify.checks import speed
from qatkit_verify.checks.base import OK, OPEN, CheckInputs
from qatkit_verify.int8_operators import Int8Operator, int8_operators
from qatkit_verify.onnx_file import read_onnx

GRAPHS = dict(graphs())


def can(column: NDArray[Any]) -> bool:
    """Returns whether the products of two adjacent weights and some uint8 activations sum to over 16 bits."""
    column = np.append(column, [0] * (len(column) % 2)).astype(int)
    pairs = column.reshape(-1, 2)
    return any(abs(a * w0 + b * w1 + 0.5) > 32768 for w0, w1 in pairs for a, b in product((0, 255), repeat=2))


def saved(file: File, folder: Path, **how: Any) -> Path:
    onnx.save(file.model, folder / "model.onnx", **how)
    return folder / "model.onnx"


def mixed(*shape: int) -> NDArray[np.int8]:
    """Returns weights in which only channels with an odd index along the last axis can overflow."""
    weight = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)
    weight[..., ::2] //= 2
    return weight


WEIGHT = mixed(6, 9)
COLUMNS = sum(can(column) for column in WEIGHT.T)
ALL = sum(can(column) for column in W.T)
X = some_bytes(4, 6)
FILES = {
    "QLinearMatMul": multiplied(X, WEIGHT),
    "QGemm": gemm(X, WEIGHT),
    "QGemm, transB": gemm(X, WEIGHT.T, transB=1),
    "MatMulInteger": integers(X, WEIGHT, xz=np.uint8(3)),
    "MatMulInteger, no zero point": integers(X, WEIGHT),
    "DynamicQuantizeMatMul": dynamic(floats(4, 6), WEIGHT),
    "MatMulInteger, two of one input": dynamic(floats(4, 6), WEIGHT, WEIGHT[:, ::-1].copy()),
    "MatMulIntegerToFloat": to_float(floats(4, 6), WEIGHT),
}


@pytest.mark.parametrize("name", FILES)
def test_products(name: str, tmp_path: Path) -> None:
    found = int8_operators(saved(FILES[name], tmp_path))
    assert 0 < COLUMNS < 9
    assert {(one.channels, one.saturating) for one in found} == {(9, COLUMNS)}
    assert {one.op_type for one in found} == {name.split(",")[0]}
    assert len(found) == (2 if "two" in name else 1)


def test_uint8_weights_asked_for_by_the_session_never_saturate(tmp_path: Path) -> None:
    path = saved(FILES["QGemm"], tmp_path)
    assert int8_operators(path, options={"session.x64quantprecision": "1"}) == []


def test_convolutions(tmp_path: Path) -> None:
    weight = mixed(3, 3, 2, 12).transpose(3, 2, 0, 1).copy()  # channels first, 2 inputs per group
    expected = sum(can(one.transpose(1, 2, 0).ravel()) for one in weight)
    assert 0 < expected < 12
    found = int8_operators(saved(conv(some_bytes(1, 4, 8, 8), weight, group=2), tmp_path))
    assert found == [Int8Operator("conv", "QLinearConv", 12, expected)]
    depthwise = conv(some_bytes(1, 8, 8, 8), large(8, 1, 3, 3), group=8)
    assert int8_operators(saved(depthwise, tmp_path)) == []


def test_other_types_are_none_of_them(tmp_path: Path) -> None:
    assert int8_operators(saved(integers(X, X.T), tmp_path)) == []
    assert int8_operators(saved(integers(WEIGHT.T, WEIGHT, xz=np.int8(0)), tmp_path)) == []
    assert int8_operators(saved(GRAPHS["uint8 x uint8, dynamic"], tmp_path)) == []


def test_a_qdq_file(tmp_path: Path) -> None:
    path = make(tmp_path / "bundle") / "model.onnx"
    stored = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}
    expected = sum(can(column) for column in stored["w"].T)
    assert int8_operators(path) == [Int8Operator("product", "QLinearMatMul", 3, expected)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("an If", {"outer": ALL, "inner": ALL, "b": ALL, "last": ALL}),
        ("a Loop", {"outer": ALL, "inner": ALL}),
        ("an LSTM that cannot saturate", {"lstm": 0}),
        ("attention that cannot saturate", {"attention": 0}),
        ("attention that can saturate", {"attention": 96}),
        ("a weight behind Identity", {"1": ALL}),
        ("a weight in a Constant", {"1": ALL}),
        ("a weight that is fed", {"1": None}),
        ("integers by what is computed", {"1": None}),
        ("a function", {"1": ALL, "a": ALL, "b": ALL}),
    ],
)
def test_bodies_and_computed_weights(name: str, expected: dict[str, int | None], tmp_path: Path) -> None:
    found = int8_operators(saved(GRAPHS[name], tmp_path))
    ends = {one.name.split("/")[-1]: one.saturating for one in found}
    if name == "a function":  # inlined twice, under names that ONNX Runtime chooses
        assert [one.saturating for one in found] == [ALL] * 5
    else:
        assert ends == expected


def test_values_beside_the_file(tmp_path: Path) -> None:
    file = multiplied(X, WEIGHT)
    path = saved(file, tmp_path, save_as_external_data=True, location="values.bin", size_threshold=0)
    assert (tmp_path / "values.bin").is_file()
    assert int8_operators(path) == [Int8Operator("product", "QLinearMatMul", 9, COLUMNS)]
    np.testing.assert_array_equal(read_onnx(path).graph.tensors["w"].int8(tmp_path), WEIGHT)


def test_values_match_onnx_in_every_way_of_storing_them(tmp_path: Path) -> None:
    tensors = [
        numpy_helper.from_array(WEIGHT, "raw"),
        helper.make_tensor("numbers", TensorProto.INT8, WEIGHT.shape, WEIGHT.ravel().tolist()),
        numpy_helper.from_array(np.zeros((0, 3), np.int8), "empty"),
    ]
    graph = helper.make_graph([], "g", [], [], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), tmp_path / "m.onnx")
    found = read_onnx(tmp_path / "m.onnx").graph.tensors
    for one in tensors:
        np.testing.assert_array_equal(found[one.name].int8(tmp_path), numpy_helper.to_array(one))


@pytest.mark.parametrize("location", ["../values.bin", "/etc/passwd", "nothing.bin"])
def test_values_elsewhere_are_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "values.bin").write_bytes(bytes(100))
    tensor = numpy_helper.from_array(WEIGHT, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    graph = helper.make_graph([], "g", [], [], [tensor])
    path = tmp_path / "in" / "m.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString()
    )
    with pytest.raises((ValueError, OSError)):
        read_onnx(path).graph.tensors["w"].int8(path.parent)


def leaves_16_bits(column: NDArray[Any]) -> bool:
    """Returns whether products of two of a channel's weights with int8 activations sum to over 16 bits."""
    ends = [(x * int(w)) for w in column for x in (-128, 127)]
    largest = sorted((max(pair) for pair in zip(ends[::2], ends[1::2], strict=True)), reverse=True)
    least = sorted(min(pair) for pair in zip(ends[::2], ends[1::2], strict=True))
    return sum(largest[:2]) > 32767 or sum(least[:2]) < -32768


@pytest.mark.parametrize("places", [(), (2,), (0, 5)])
def test_int8_by_int8_is_judged_for_arm(places: tuple[int, ...], tmp_path: Path) -> None:
    weight = np.random.default_rng(0).integers(-127, 128, (6, 9)).astype(np.int8)
    weight[list(places), 3] = -128
    weight[0, 4] = -127
    path = saved(integers(WEIGHT.T, weight, xz=np.int8(0)), tmp_path)
    expected = sum(leaves_16_bits(column) for column in weight.T)
    assert expected == (len(places) == 2)
    assert int8_operators(path, signed=True) == [Int8Operator("product", "MatMulInteger", 9, expected)]
    assert int8_operators(path) == []
    assert int8_operators(saved(FILES["QGemm"], tmp_path), signed=True) == []


@pytest.mark.parametrize("here", [False, True])
def test_what_a_bundle_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    monkeypatch.setattr(speed, "saturates_here", lambda: here)
    folder = make(tmp_path / "bundle")

    def found(weight: NDArray[Any]) -> tuple[str, str]:
        model = onnx.load(str(folder / "model.onnx"))
        next(one for one in model.graph.initializer if one.name == "w").CopyFrom(
            numpy_helper.from_array(weight, "w")
        )
        onnx.save(model, str(folder / "model.onnx"))
        seal(folder)
        told = speed.saturation(CheckInputs(folder, read_manifest(folder)))
        return told.verdict, told.seen

    proven = "uint8 x int8: no sum of two products saturates on x86, proven from the integers of 1 operator"
    assert found(np.full((8, 3), 64, np.int8)) == (OK, proven)
    weight = np.full((8, 3), 64, np.int8)
    weight[4:6, 1] = 127
    verdict, seen = found(weight)
    assert verdict == (OPEN if here else OK)
    assert seen.startswith("1 of 1 operator can saturate on x86 without VNNI (product: 1 of 3 channels)")
    assert ("none does on this processor" in seen) == (not here)


def test_a_bundle_that_asks_for_uint8_weights_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path / "bundle")
    manifest = replace(read_manifest(folder), session_options={"session.x64quantprecision": "1"})
    told = speed.saturation(CheckInputs(folder, manifest))
    assert told.verdict == OK
    assert told.seen == (
        "no operator adds products with int8 weights in 16 bits (session.x64quantprecision=1 makes the weights uint8)"
    )
