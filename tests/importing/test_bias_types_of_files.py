"""Tests that a given ONNX file is written back with biases of each type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_nets import Case, begin_again, depthwise, gemms, saved, transposed
from written import same, write

from qatkit.quant.backends import FBGEMM
from qatkit.quant.spec import BIAS_TYPES

KINDS = {"int32": np.int32, "int16": np.int16, "int8": np.int8, "float": np.float32}
NETS = {
    "depthwise": Case(depthwise, {}),
    "gemms": Case(gemms, {}, {"x": (4, 8)}),
    "transposed": Case(transposed, {}),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("dtype", BIAS_TYPES)
def test_a_given_file_has_biases_of_the_type(dtype: str, net: str, tmp_path: Path) -> None:
    begin_again()
    source, feeds = saved(NETS[net], tmp_path)
    written = write(source, feeds, backend=replace(FBGEMM, weight=replace(FBGEMM.weight, bias_dtype=dtype)))
    same(written, feeds)
    graph = onnx.load(str(written.path)).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) > 2:
            pair = makers.get(node.input[2])
            held = constants[node.input[2] if pair is None else pair.input[0]]
            found.append(held.dtype)
            assert pair is None or pair.domain == ("com.microsoft" if dtype == "int16" else "")
    assert set(found) == {np.dtype(KINDS[dtype])} and len(found) > 1
