"""Infers the types and shapes of all tensors again after changes."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from qatkit.export.clean.graphs import graphs
from qatkit.export.quiet import quiet

_IN_MEMORY = 1 << 30  # largest number of bytes for symbolic inference, which copies all weights


def fill_shapes(model: ir.Model) -> list[str]:
    """Infers types and shapes with onnx, and those still missing with ONNX Runtime's symbolic shape inference.

    Symbolic inference is left out for models with 1 GiB of weights or more. The returned line counts the tensors with
    known shapes before and after.
    """
    before = _known(model)
    for graph in graphs(model.graph):
        for node in graph:
            for value in node.outputs:
                if not node.domain and not value.is_graph_output():
                    value.shape = None
    infer(model)
    if _known(model) < _all(model) and _bytes(model) < _IN_MEMORY:
        _fill_symbolic(model)
    known, total = _known(model), _all(model)
    return [f"{known} of {total} tensors have shapes (before: {before})"]


def infer(model: ir.Model) -> None:
    """Infers types and shapes where onnx can."""
    with contextlib.suppress(Exception), quiet():  # errors about operators that onnx does not know
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _fill_symbolic(model: ir.Model) -> None:
    """Gives tensors without shapes the shapes that symbolic inference finds."""
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        with quiet(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            ir.save(model, path)
            found = SymbolicShapeInference.infer_shapes(onnx.load(str(path)), auto_merge=True)
    except Exception:  # symbolic inference knows fewer operators than onnx, and needs sympy
        return
    told = {info.name: info for info in found.graph.value_info}
    for node in model.graph:
        for value in node.outputs:
            if value.shape is None and value.name in told:
                ir.serde.deserialize_value_info_proto(told[value.name], value)


def _results(model: ir.Model) -> list[ir.Value]:
    return [value for node in model.graph for value in node.outputs if value.name]


def _known(model: ir.Model) -> int:
    return sum(value.shape is not None for value in _results(model))


def _all(model: ir.Model) -> int:
    return len(_results(model))


def _bytes(model: ir.Model) -> int:
    held = (value.const_value for graph in graphs(model.graph) for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)
