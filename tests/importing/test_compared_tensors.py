"""Tests of comparing the tensors of a written-back file with those of its simulation, whatever its inputs are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import island_nets
import numpy as np
import pytest
import torch
from island_nets import IMAGE, floats
from onnx import helper
from onnx_models import FLOAT, INT64, Array, save
from written import write

from qatkit.analysis.runtime_tensors import RuntimeTensors, compared_with_file
from qatkit.export.converted_reference import ConvertedReference
from qatkit.importing.tensor_names import pairs_in_file
from qatkit.records.analysis import ACTIVATION


def _two_inputs(path: Path) -> Path:
    """Writes a model from ids and a vector whose first output is an integer, with a Transpose after a MatMul."""
    nodes = [
        helper.make_node("ArgMax", ["scores"], ["best"], "/best", axis=1),
        helper.make_node("Gather", ["table", "ids"], ["rows"], "/rows"),
        helper.make_node("MatMul", ["rows", "a"], ["mixed"], "/mixed"),
        helper.make_node("Transpose", ["mixed"], ["turned"], "/turned", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["turned", "b"], ["column"], "/column"),
        helper.make_node("Squeeze", ["column", "last"], ["flat"], "/flat"),
        helper.make_node("Gemm", ["vector", "c"], ["projected"], "/projected"),
        helper.make_node("Relu", ["projected"], ["positive"], "/positive"),
        helper.make_node("Add", ["flat", "positive"], ["sum"], "/sum"),
        helper.make_node("Gemm", ["sum", "d"], ["scores"], "/scores"),
    ]
    constants = {
        "table": floats(20, 8),
        "a": floats(8, 6),
        "b": floats(5, 1),
        "c": floats(7, 6),
        "d": floats(6, 6),
    }
    inputs = {"ids": (INT64, ["N", 5]), "vector": (FLOAT, ["N", 7])}
    # A reader comes after the node it reads.
    return save(
        path, nodes[1:] + nodes[:1], inputs, ["best", "scores"], {**constants, "last": np.array([-1])}
    )


_X = {"x": IMAGE}
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Array]]] = {
    "two inputs, integers first": (_two_inputs, {"ids": np.arange(10).reshape(2, 5), "vector": floats(2, 7)}),
    "a Loop": (island_nets.loop, _X),
    "an If": (island_nets.condition, _X),
    "boxes": (island_nets.boxes, _X),
    "int32 ids": (island_nets.hashes, {"ids": np.arange(12, dtype=np.int32).reshape(2, 6)}),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_a_given_file_are_those_of_its_simulation(case: str, tmp_path: Path) -> None:
    make, given = CASES[case]
    feeds = {name: torch.from_numpy(value) for name, value in given.items()}
    written = write(make(tmp_path / "m.onnx"), feeds)
    graph = written.module.graph
    pairs = pairs_in_file(written.model, graph, written.path)
    runtime = RuntimeTensors(written.path, ConvertedReference(written.converted), threads=1, pairs=pairs)
    batch = feeds if len(feeds) > 1 else next(iter(feeds.values()))
    found = compared_with_file(graph, runtime, [batch])
    rows = [row for row in found.rows if row.kind == ACTIVATION]
    compared = [row for row in rows if row.runtime is not None]
    assert not found.notes and found.first is None and len(compared) >= min(len(rows), 2)
    for row in compared:
        assert row.runtime is not None and row.simulated is not None
        assert row.runtime.mse == pytest.approx(row.simulated.mse, rel=1e-3), row.site
