"""Tests of reading profiles in the formats that versions of ONNX Runtime write."""

from __future__ import annotations

from pathlib import Path

import pytest

from qatkit_verify.kernels import events

# Lines of a profile of ONNX Runtime 1.24.1, shortened; this version does not escape the names of nodes.
BEFORE_1_31 = (
    '{"cat" : "Node","pid" :1,"dur" :58,"ph" : "X","name" :"{"node" 0}_kernel_time","args" : {"op_name" : "MatMul"}},\n'
    '{"cat" : "Node","pid" :1,"dur" :6,"ph" : "X","name" :"r"\\_kernel_time","args" : {"op_name" : "Relu"}}\n'
)


def test_names_that_are_not_escaped_are_read(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(f"[\n{BEFORE_1_31}]\n")
    found = events(tmp_path / "profile.json")
    assert [one["name"] for one in found] == ['{"node" 0}_kernel_time', 'r"\\_kernel_time']
    assert [one["args"]["op_name"] for one in found] == ["MatMul", "Relu"]


def test_a_profile_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(f"[\n{BEFORE_1_31}".encode() + b"\xc3")
    with pytest.raises(ValueError, match="Expecting"):
        events(tmp_path / "profile.json")
