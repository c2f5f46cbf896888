"""Tests of batches by input name, and of the comparison of several outputs, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from qatkit.verify.parity import parity
from qatkit_verify.compare import Output, deciding
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import by_name, feeds, noise_feeds, rows
from qatkit_verify.session import fixed_batch, open_session, run_outputs

A, B, LABELS = np.zeros((4, 3)), np.ones((4, 2)), np.arange(4)


@pytest.mark.parametrize(
    ("names", "batch", "expected"),
    [
        ("x", A, {"x": A}),
        ("x", (A,), {"x": A}),
        ("x", (A, LABELS), {"x": A}),
        ("x", {"x": A, "labels": LABELS}, {"x": A}),
        ("x", ({"x": A}, LABELS), {"x": A}),
        ("x y", (A, B), {"x": A, "y": B}),
        ("x y", [A, B], {"x": A, "y": B}),
        ("x y", ((A, B), LABELS), {"x": A, "y": B}),
        ("x y", {"y": B, "x": A, "labels": LABELS}, {"x": A, "y": B}),
        ("x y", ({"y": B, "x": A}, LABELS), {"x": A, "y": B}),
        ("x y", {"mask": None, "y": B, "x": A}, {"x": A, "y": B}),
        ("pair_left pair_right", {"pair": {"right": B, "left": A}}, {"pair_left": A, "pair_right": B}),
        ("pair_left pair_right", ({"left": A, "right": B},), {"pair_left": A, "pair_right": B}),
    ],
)
def test_a_batch_by_the_names_of_the_inputs(names: str, batch: Any, expected: dict[str, Any]) -> None:
    found = by_name(names.split(), batch)
    assert list(found) == list(expected) and all(found[name] is expected[name] for name in expected)
    assert rows(found) == 4


@pytest.mark.parametrize("batch", [A, (A, B, A), {"x": A}, ((A, B, A), LABELS)])
def test_a_batch_of_another_number_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"2 tensors \(x, y\)"):
        by_name(["x", "y"], batch)


def drawn(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5), 1), ((6, 4, 5), 2), ((6, 5, 3, 3), 1), ((6, 5, 2, 3, 3), 1)]
)
def test_classes_are_told_along_their_axis(shape: tuple[int, ...], axis: int) -> None:
    a, b = drawn(*shape, seed=1), drawn(*shape, seed=2)
    b[:3] = a[:3]
    output = Output(1)
    output.add(a[:4], [b[:4]])
    output.add(a[4:], [b[4:]])
    found = output.comparisons(0.5)[0]
    assert found.agreement == pytest.approx(float((a.argmax(axis) == b.argmax(axis)).mean())) != 1
    assert found.max_abs == pytest.approx(float(np.abs(a - b).max()))
    assert found.mean_steps == pytest.approx(float(np.abs(a - b).mean()) / 0.5)
    assert output.span == pytest.approx(float(np.ptp(a)))


@pytest.mark.parametrize(("shape", "axis"), [((200, 5), 1), ((20, 10, 5), 2), ((20, 5, 4, 4), 1)])
def test_ties_are_decisions_within_half_a_step_of_the_reference(shape: tuple[int, ...], axis: int) -> None:
    a = drawn(*shape, seed=1)
    b = a + drawn(*shape, seed=2) / 3
    output = Output(1)
    output.add(a[:7], [b[:7]])
    output.add(a[7:], [b[7:]])
    places = zip(
        np.moveaxis(a, axis, -1).reshape(-1, 5), np.moveaxis(b, axis, -1).reshape(-1, 5), strict=True
    )
    lost = [x[x.argmax()] - x[y.argmax()] for x, y in places if x.argmax() != y.argmax()]
    for step in (0.1, 0.4, 10.0):
        found = output.comparisons(step)[0]
        assert found.ties == sum(one <= step / 2 for one in lost) / (a.size // 5)
        assert found.held == pytest.approx(1 - sum(one > step / 2 for one in lost) / (a.size // 5))
    assert output.comparisons(0.1)[0].held < output.comparisons(0.4)[0].held < 1  # no extremes


def test_ties_of_outputs_without_classes() -> None:
    sides, integers, broken = Output(1), Output(1), Output(1)
    sides.add(np.array([[[[0.2, -0.2, 3]]]]), [np.array([[[[-1.0, 1, -1]]]])])
    assert sides.comparisons(0.5)[0].agreement == 0 and sides.comparisons(0.5)[0].ties == pytest.approx(2 / 3)
    integers.add(np.arange(8), [np.arange(8) // 2 * 2])
    assert integers.comparisons(100)[0].ties == 0
    broken.add(np.array([[1, np.nan]]), [np.array([[1.0, 0]])])
    assert broken.comparisons(100)[0].held == 0


def test_outputs_without_classes() -> None:
    a, b = drawn(40, seed=1), drawn(40, seed=1) + np.float32(0.2) * (np.arange(40) % 2)
    for_a_value, map_of_one, integers = Output(1), Output(1), Output(1)
    for_a_value.add(a, [b])
    assert for_a_value.comparisons(0.1)[0].agreement == 0.5
    assert for_a_value.comparisons(0.3)[0].agreement == 1
    x, y = drawn(2, 1, 4, 4, seed=3), drawn(2, 1, 4, 4, seed=4)
    map_of_one.add(x, [y])
    assert map_of_one.comparisons(1)[0].agreement == ((x > 0) == (y > 0)).mean()
    integers.add(np.arange(8), [np.arange(8) // 2 * 2])
    assert integers.comparisons(1)[0].agreement == 0.5 and not integers.floats
    assert deciding([for_a_value]) == [0] and deciding([for_a_value, map_of_one, integers]) == [1, 2]


def several(path: Path, batch: int | str = "batch") -> None:
    """Writes a file with logits = 2·x + y (y is table[ids]), squares = x·x and best = argmax(logits)."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 4], np.arange(12, dtype=np.float32))
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["y"]),
        helper.make_node("Mul", ["x", "two"], ["twice"]),
        helper.make_node("Add", ["twice", "y"], ["logits"]),
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
    ]
    floats, ids = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        nodes,
        "several",
        [
            helper.make_tensor_value_info("x", floats, [batch, 4]),
            helper.make_tensor_value_info("ids", ids, [batch]),
        ],
        [
            helper.make_tensor_value_info("squares", floats, [batch, 4]),
            helper.make_tensor_value_info("logits", floats, [batch, 4]),
            helper.make_tensor_value_info("best", ids, [batch]),
        ],
        [table, two],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


class Computed:
    """The model of `several` in NumPy; adds `off` to the logits and 1 to the first `wrong` values of best."""

    def __init__(self, off: float = 0.0, wrong: int = 0) -> None:
        self.off, self.wrong = off, wrong

    def outputs(self, batch: Any) -> tuple[NDArray[Any], ...]:
        x, table = batch["x"], np.arange(12, dtype=np.float32).reshape(3, 4)
        logits = 2 * x + table[batch["ids"]]
        best = logits.argmax(1)
        best[: self.wrong] += 1
        return x * x, logits + np.float32(self.off), best

    def __call__(self, batch: Any) -> NDArray[np.float32]:
        return np.asarray(self.outputs(batch)[0], np.float32)


def test_the_worst_of_several_outputs_is_reported(tmp_path: Path) -> None:
    path, x, ids = tmp_path / "m.onnx", drawn(10, 4, seed=1), np.arange(10) % 3
    several(path)
    exact = parity(Computed(), path, [(x, ids), {"ids": ids, "x": x}], threads=1)
    assert exact.images == 20 and exact.agreement == 1 and exact.optimized.max_steps < 1e-3
    found = parity(Computed(off=0.5, wrong=3), path, [(x, ids)], threads=1)
    logits = Computed(off=0.5).outputs({"x": x, "ids": ids})[1]
    assert found.step == pytest.approx(float(np.ptp(logits)) / 255)
    assert "'logits', the worst of 2 outputs" in found.step_source
    assert found.optimized.max_abs == pytest.approx(0.5, abs=1e-5)
    assert found.optimized.max_steps == pytest.approx(0.5 / found.step, rel=1e-4)
    assert found.agreement == 0.7  # of the integers; the squares are the same


def test_inputs_of_other_types_and_noise_for_them(tmp_path: Path) -> None:
    several(tmp_path / "free.onnx")
    several(tmp_path / "fixed.onnx", batch=2)
    free, fixed = (open_session(tmp_path / f"{name}.onnx", threads=1) for name in ("free", "fixed"))
    assert (fixed_batch(free), fixed_batch(fixed)) == (None, 2)
    given = feeds(free, {"ids": [0, 1, 2], "x": np.ones((3, 4), np.float64)})
    assert {name: value.dtype.name for name, value in given.items()} == {"x": "float32", "ids": "int64"}
    drawn_feeds = noise_feeds(free, None, seed=0, batch=5)
    assert drawn_feeds["x"].shape == (5, 4) and not drawn_feeds["ids"].any()
    assert [one.shape for one in run_outputs(free, drawn_feeds)] == [(5, 4), (5, 4), (5,)]
    assert [one.shape for one in run_outputs(fixed, noise_feeds(fixed, None, seed=0))] == [
        (2, 4),
        (2, 4),
        (2,),
    ]
    with pytest.raises(ConfigError, match="x, ids"):
        noise_feeds(free, (5, 4), seed=0)
