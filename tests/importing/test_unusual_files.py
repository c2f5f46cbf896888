"""Tests of files that few exporters write: import (checked with ONNX Runtime), PTQ and writing back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import unusual_ends
import unusual_fused
import unusual_layers
import unusual_operators
import unusual_weights
from onnx_models import in_onnxruntime, sqnr
from small_nets import begin_again
from unusual import FILES, written_down
from written import difference, outputs, same, write

from qatkit.importing import import_onnx, prove_import

assert {unusual_ends, unusual_fused, unusual_layers, unusual_operators, unusual_weights}  # each fills FILES


@pytest.mark.parametrize("title", FILES)
def test_an_unusual_file_comes_back_in_int8(title: str, tmp_path: Path) -> None:
    begin_again()
    source, made = written_down(FILES[title], tmp_path)
    exact = in_onnxruntime(source, made.feeds, made.fixed)
    prove_import(import_onnx(source, fixed=made.fixed), made.feeds)
    feeds = {name: torch.from_numpy(np.asarray(value)) for name, value in made.feeds.items()}
    written = write(source, feeds, fixed=made.fixed)
    same(written, feeds, steps=made.steps)
    found = outputs(written.path, feeds, optimized=False)
    for name, wanted, got in zip(made.outputs, exact, found, strict=True):
        assert wanted.dtype == got.dtype, name
        assert wanted.shape == got.shape, name
        if wanted.dtype.kind == "f" and wanted.size:
            assert sqnr(wanted, got) > made.least, name
    before, after = onnx.load(str(source)).graph, onnx.load(str(written.path)).graph
    constants = {one.name for one in before.initializer} | {*(made.fixed or {})}
    assert [one for one in before.input if one.name not in constants] == list(after.input)
    assert [one.name for one in after.output] == list(made.outputs)
    operators = [node.op_type for node in after.node]
    assert operators.count("QuantizeLinear") >= made.pairs
    if not made.inlined:
        difference(source, written.path)
