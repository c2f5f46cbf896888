"""Tests of the reason given for an INT8 file that is larger than its float file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, Array, save
from written import write

from qatkit.export.larger_file import why_larger


def _kinds(path: Path, kind: int) -> int:
    """Returns the size in bytes of a file's matrices of one type."""
    tensors = onnx.load(str(path)).graph.initializer
    return sum(tensor.ByteSize() for tensor in tensors if tensor.data_type == kind and len(tensor.dims) == 2)


def _computed(path: Path) -> Path:
    """Writes a model whose weight is the product of a column and a row."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("Mul", ["column", "row"], ["weight"], "/Outer"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], "/MatMul"),
    ]
    constants: dict[str, Array] = {
        "column": draw.normal(size=(128, 1)).astype(np.float32),
        "row": draw.normal(size=(1, 128)).astype(np.float32),
    }
    return save(path, nodes, {"x": (FLOAT, ["n", 128])}, ["y"], constants)


def _shared(path: Path) -> Path:
    """Writes a model whose weight is also read by a float operator."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["y"], "/MatMul"),
        helper.make_node("ReduceMax", ["x"], ["largest"], "/Max", keepdims=0),
        helper.make_node("Mul", ["weight", "largest"], ["z"], "/Mul"),
    ]
    constants = {"weight": draw.normal(size=(128, 128)).astype(np.float32)}
    return save(path, nodes, {"x": (FLOAT, ["n", 128])}, ["y", "z"], constants)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_computed, "weights that the float file computes from smaller constants"),
        (_shared, "weights that float operators read as well, so both copies are needed"),
    ],
)
def test_a_larger_file_has_its_reason(make: object, reason: str, tmp_path: Path) -> None:
    assert callable(make)
    file = make(tmp_path / "float.onnx")
    done = write(file, {"x": torch.randn(4, 128)})
    more = done.path.stat().st_size - file.stat().st_size
    integers = _kinds(done.path, onnx.TensorProto.INT8)
    told = why_larger(file, done.path)
    assert more > 0 and integers > 128 * 128 and told is not None
    assert told.startswith(f"the INT8 file is {more / 1e3:.0f} kB larger than the float file: ")
    assert f"{integers / 1e3:.0f} kB are integers of {reason}" in told
    assert why_larger(done.path, file) is None
