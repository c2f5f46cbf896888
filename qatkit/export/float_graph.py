"""Checks that a float ONNX file has operators that can be quantized, and upgrades its graph to an opset."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import version_converter

from qatkit.verify.graph_view import element_type, operand, weight, weight_of, weighted_ops, with_initializers
from qatkit_verify.errors import ConfigError, one_line

_ASYMMETRIC = 10  # the last opset whose Resize (and Upsample) has no coordinate_transformation_mode
_REPLACED = {
    "Upsample": "Resize",
    "Scatter": "ScatterElements",
}  # the converter replaces these operators by operators with new names
_RECURRENT = ("LSTM", "GRU", "RNN")
_IR_VERSION = 7  # the IR version of opset 13; since version 4, weights need not be inputs


def float_graph(path: Path, model: ir.Model, opset: int) -> ir.Model:
    """Returns the model at `opset` or higher.

    Args:
        path: the file from which the model was read, for messages.
        model: the model, with its weights in memory.
        opset: the opset to which a model of a lower opset is upgraded.

    Raises:
        ConfigError: the model has no operators with float32 weights to quantize, it has such operators in branches or
            loops even after constant folding, ONNX Runtime cannot load it for this folding, or it cannot be upgraded.
    """
    folded = _folded(path, model) if _branched(model.graph) else None
    if folded is not None and (hidden := _branched(folded.graph)):
        own = f"this one has some inside {hidden} nodes"
        allowed = f"a model with its Conv, Gemm and MatMul nodes in the main graph; {own}"
        raise ConfigError("onnx", path, allowed)
    before = model.opset_imports.get("", 0)
    if before < opset:
        model = upgraded(path, ir.to_proto(model), before, opset)
        model.graph.sort()
    model.ir_version = max(model.ir_version, _IR_VERSION)
    if not _has_weights(model if folded is None else folded):
        kinds = "Conv, Gemm, MatMul, LSTM, GRU or RNN with float32 weights"
        raise ConfigError(
            "onnx", path, f"a model that has operators to quantize ({kinds}); this one has none"
        )
    return model


def _has_weights(model: ir.Model) -> bool:
    """Returns whether an operator of the main graph has constant float32 weights to quantize, in any form."""
    lifted = with_initializers(model.clone())
    found = [weight_of(node) for node in lifted.graph if node.op_type in weighted_ops()]
    found += [weight(operand(node, 1)) for node in lifted.graph if node.op_type in _RECURRENT]
    return any(w is not None and element_type(w.value) == ir.DataType.FLOAT for w in found)


def _branched(graph: ir.Graph) -> str:
    """Returns the type of an If, Loop or Scan that contains operators to quantize; "" if there is none."""
    return next((node.op_type for node in graph if any(map(_holds_matrix, _graphs(node)))), "")


def _folded(path: Path, model: ir.Model) -> ir.Model:
    """Returns the model after constant folding, which moves a branch that is always taken into the main graph."""
    from qatkit.export.for_ort_tools import (
        prepared,
    )  # it imports ONNX Runtime's tools, which only few files need

    with tempfile.TemporaryDirectory() as folder:
        ir.save(model, Path(folder) / "model.onnx")
        try:
            return prepared(Path(folder) / "model.onnx")
        except ConfigError as error:
            raise ConfigError("onnx", path, reason=error.problem) from error


def _graphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the branches and bodies of an If, Loop or Scan."""
    return [item.as_graph() for item in node.attributes.values() if item.type == ir.AttributeType.GRAPH]


def _holds_matrix(graph: ir.Graph) -> bool:
    return any(node.op_type in weighted_ops() for node in ir.traversal.RecursiveGraphIterator(graph))


def upgraded(path: Path, model: onnx.ModelProto, before: int, opset: int) -> ir.Model:
    """Returns a model upgraded from opset `before` to `opset`.

    Raises:
        ConfigError: the model cannot be upgraded; the message names the file at `path`.
    """
    model.ir_version = max(
        model.ir_version, _IR_VERSION
    )  # otherwise the converter looks for weights among the inputs
    try:
        found = ir.from_proto(version_converter.convert_version(model, opset))
    except Exception as error:
        reason = f"onnx cannot upgrade the model from opset {before} to {opset} ({one_line(error)})"
        raise ConfigError("onnx", path, reason=reason) from error
    _restore_names(model, found.graph)
    if before <= _ASYMMETRIC:
        _keep_asymmetric(found.graph)
    return found


def _restore_names(model: onnx.ModelProto, graph: ir.Graph) -> None:
    """Gives nodes that the converter inserted, and their outputs, the names of those that they replace.

    If the numbers of inserted and replaced nodes differ, they cannot be matched, and nothing changes.
    """
    made = {value.name for node in graph for value in node.outputs}
    lost = [node for node in model.graph.node if node.op_type in _REPLACED and node.output[0] not in made]
    known = {name for node in model.graph.node for name in node.output}
    new = [n for n in graph if n.op_type in _REPLACED.values() and n.outputs[0].name not in known]
    if len(new) == len(lost):
        for before, after in zip(lost, new, strict=True):
            after.name, after.outputs[0].name = before.name, before.output[0]


def _keep_asymmetric(graph: ir.Graph) -> None:
    """Gives each Resize the modes of old opsets, where the converter sets none and today's defaults would apply."""
    for node in graph:
        if node.op_type != "Resize" or "coordinate_transformation_mode" in node.attributes:
            continue
        node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
        if "nearest_mode" not in node.attributes:
            node.attributes.add(ir.AttrString("nearest_mode", "floor"))
