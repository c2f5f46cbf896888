"""Tests of the upper bound of an input's ids, inferred from the Gathers, OneHots or Equals that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper
from onnx_models import Array, save

from qatkit.importing.inputs import file_inputs
from qatkit.importing.read import read

_INT64, _FLOAT = TensorProto.INT64, TensorProto.FLOAT
TABLES: dict[str, Array] = {
    "large": np.zeros((50, 4), np.float32),
    "small": np.zeros((7, 4), np.float32),
    "wide": np.zeros((4, 30), np.float32),
    "flat": np.array([1, -1], np.int64),
    "steps": np.arange(6)[None],
    "last": np.array([2], np.int64),
    "two": np.array(2, np.int64),
    "depth": np.array([9], np.int64),
    "ends": np.array([0, 1], np.float32),
}


def _node(kind: str, inputs: str, output: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs.split(), [output], f"/{kind}_{output}", **attributes)


@pytest.mark.parametrize(
    ("nodes", "kind", "below"),
    [
        ([_node("Gather", "large x")], _INT64, 50),
        ([_node("Gather", "wide x", axis=1)], _INT64, 30),
        ([_node("Gather", "wide x", axis=-1)], _INT64, 30),
        ([_node("Gather", "large x", "a"), _node("Gather", "small x")], _INT64, 7),
        ([_node("Reshape", "x flat", "a"), _node("Gather", "large a")], _INT64, 50),
        ([_node("Cast", "x", "a", to=_INT64), _node("Gather", "small a")], _FLOAT, 7),
        ([_node("OneHot", "x depth ends", axis=-1)], _INT64, 9),
        ([_node("Unsqueeze", "x last", "a"), _node("Equal", "a steps")], _INT64, 6),
        ([_node("Equal", "steps x")], _INT64, 6),
        ([_node("Equal", "x two")], _INT64, None),
        ([_node("Add", "x two", "a"), _node("Gather", "large a")], _INT64, None),
        ([_node("Gather", "x two")], _INT64, None),
        ([_node("Cast", "x", "y", to=_FLOAT)], _INT64, None),
    ],
)
def test_ids_are_below_the_rows_of_their_smallest_table(
    nodes: list[NodeProto], kind: int, below: int | None, tmp_path: Path
) -> None:
    path = save(tmp_path / "ids.onnx", nodes, {"x": (kind, ["n", 5])}, ["y"], TABLES)
    (found,) = file_inputs(path, read(path), ())
    assert found.below == below and found.names == ("n", "")


def test_a_table_of_a_constant_node_in_a_branch_counts(tmp_path: Path) -> None:
    rows = helper.make_tensor("rows", _FLOAT, [11, 2], np.zeros(22, np.float32))
    branches = [
        helper.make_graph(
            [
                helper.make_node("Constant", [], [f"t{name}"], value=rows),
                _node("Gather", f"t{name} x", f"y{name}"),
            ],
            name,
            [],
            [helper.make_empty_tensor_value_info(f"y{name}")],
        )
        for name in ("then", "else")
    ]
    node = helper.make_node("If", ["c"], ["y"], "/If", then_branch=branches[0], else_branch=branches[1])
    path = save(tmp_path / "if.onnx", [node], {"x": (_INT64, ["n"]), "c": (TensorProto.BOOL, [])}, ["y"])
    assert [one.below for one in file_inputs(path, read(path), ())] == [11, None]
