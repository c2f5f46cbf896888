"""Tests of example drawings: the check chooses the samples that differ most, and a user's task draws them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qatkit.config.schema import VerifyConfig
from qatkit.records.examples import Panel, Shape, coloured
from qatkit.records.results import Results
from qatkit.tasks.drawing import Drawing, Sample
from qatkit.tasks.regression import Regression
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.examples import ExamplesCheck


class Waves(Drawing):
    """A drawing of a signal in 16 levels, with the outputs of both files as lines."""

    measure = "of the range lies between float and INT8"

    def differs(self, exact: Any, found: Any) -> Any:
        return np.abs(exact - found)[:, 0]

    def panels(self, sample: Sample) -> Sequence[Panel]:
        assert sample.picture is None and sample.label == "W8"
        levels = np.clip(8 + 4 * sample.inputs["x"], 0, 15)[None]
        lines = [Shape(((0, float(one[0])), (4, float(one[0]))), "#ff0000", closed=False) for one in
                 (sample.exact, sample.found)]  # fmt: skip
        return [coloured(f"target {float(sample.target):g}", levels, ["#123456"] * 16, lines)]

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        return [("line", "#ff0000")]


class WaveTask(Regression):
    """A regression task on signals with its own drawing."""

    def drawing(self) -> Drawing:
        return Waves()


def summed(path: Path, weights: Sequence[float]) -> Path:
    """Writes a file that computes the weighted sum of x, [N, 1]."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
        for name, size in (("x", 4), ("y", 1))
    ]
    stored = numpy_helper.from_array(np.array(weights, np.float32)[:, None], "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [stored]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("wanted", [3, 0])
def test_samples_that_differ_most_are_drawn(tmp_path: Path, wanted: int) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    targets = np.arange(20.0)
    batches = [({"x": rows[start : start + 8]}, targets[start : start + 8]) for start in (0, 8, 16)]
    subject = Subject(
        tmp_path,
        {
            "float": summed(tmp_path / "f.onnx", [1, 2, 3, 4]),
            "int8": summed(tmp_path / "i.onnx", [1, 2, 3, 4.5]),
        },
        lambda: batches,
        lambda count: (count,),
        VerifyConfig(threads=1, examples=wanted),
        label="W8",
        task=WaveTask(),
    )
    found = ExamplesCheck().measure(subject, Results("r", "m", str(tmp_path))).examples
    if not wanted:
        assert found is None
        return
    assert found is not None and found.looked_at == 20 and found.legend == (("line", "#ff0000"),)
    order = np.argsort(-np.abs(rows[:, 3]))[:3]
    assert [one.differs for one in found.rows] == pytest.approx(0.5 * np.abs(rows[order, 3]), rel=1e-4)
    assert [one.panels[0].title for one in found.rows] == [f"target {place}" for place in order]
    for one, place in zip(found.rows, order, strict=True):
        heights = [line.points[0][1] for line in one.panels[0].shapes]
        weights = np.array([[1, 2, 3, 4], [1, 2, 3, 4.5]])
        assert heights == pytest.approx(list(weights @ rows[place]), rel=1e-4)
