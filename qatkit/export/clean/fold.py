"""Folds constants, removes no-op nodes and merges duplicates with ONNX Runtime's basic optimizer and onnx_ir.

The optimizer is the one that prepares files for ONNX Runtime's quantization tools (`qatkit.export.for_ort_tools`).
Three kinds of its passes are left out: those that replace ONNX operators by ONNX Runtime's own, those that move the
QuantizeLinear and DequantizeLinear nodes of a quantized file and, with `exact`, those that change rounding.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common

from qatkit.export.clean.graphs import nodes
from qatkit.export.clean.join import join
from qatkit.export.clean.store import UNPACKED, store
from qatkit.export.quiet import quiet
from qatkit_verify.session import open_session

_OWN_OPERATORS = ("GeluFusionL1", "LayerNormFusionL1", "LabelEncoderFusion")
_ROUNDING = (
    "ConvAddFusion",
    "ConvBNFusion",
    "ConvMulFusion",
    "DivMulFusion",
    "GemmSumFusion",
    "MatMulAddFusion",
    "MatMul_BatchNormalization_Fusion",
    "TransposeOptimizer",  # it changes the order of sums
)
_OF_PAIRS = (
    "QDQPropagationTransformer",
    "EnsureUniqueDQForNodeUnit",
    "WeightBiasQuantization",
    "WhereDummyDq",
    "DoubleQDQPairsRemover",
    "ConstantFoldingDQ",
    "TransposeOptimizer",
)
_QUANTIZED = ("QuantizeLinear", "DequantizeLinear")


def fold(model: ir.Model, folder: Path, *, exact: bool, threads: int) -> tuple[ir.Model, list[str]]:
    """Returns the folded model, whose large weights may be stored in `folder`, and lines about changes.

    If folding would insert ONNX Runtime's own operators, only unused nodes and duplicates are removed.

    Args:
        model: a model of any opset.
        folder: a temporary folder, which must exist as long as the returned model is used.
        exact: whether to leave out all passes that change rounding.
        threads: the number of ONNX Runtime's threads.

    Raises:
        ConfigError: ONNX Runtime cannot load the model.
    """
    before = _kinds(model)
    with quiet():
        found = _optimized(model, folder, exact=exact, threads=threads)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(found)
        join(found, exact=exact)
        _clear(found)
    found.producer_name, found.doc_string = model.producer_name, model.doc_string
    found.metadata_props.update(model.metadata_props)
    found.ir_version = max(found.ir_version, model.ir_version)
    if {node.domain for node in nodes(found)} - {node.domain for node in nodes(model)}:
        found = model  # a newer ONNX Runtime may have further passes that insert its own operators
        _clear(found)
    return found, _lines(before, _kinds(found))


def _optimized(model: ir.Model, folder: Path, *, exact: bool, threads: int) -> ir.Model:
    raw, folded = folder / "raw.onnx", folder / "folded.onnx"
    store(model, raw)
    pairs = any(node.op_type in _QUANTIZED for node in nodes(model))
    without = [*_OWN_OPERATORS, *(_ROUNDING if exact else ()), *(_OF_PAIRS if pairs else ())]
    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    open_session(
        raw, threads=threads, optimize=level, optimized_path=folded, without=without, options=UNPACKED
    )
    return ir.load(folded)


def _clear(model: ir.Model) -> None:
    """Removes unused nodes and duplicates."""
    for one in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateHashedInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    ):
        one(model)


def _kinds(model: ir.Model) -> Counter[str]:
    found = Counter(node.op_type for node in nodes(model))
    found[""] = len(model.graph.initializers)
    return found


def _lines(before: Counter[str], after: Counter[str]) -> list[str]:
    """Returns lines about changed numbers of nodes and initializers, in total and by type of node."""
    totals = [(one.total() - one[""], one[""]) for one in (before, after)]
    changed = {kind: after[kind] - before[kind] for kind in sorted({*before, *after}) if kind}
    kinds = ", ".join(f"{kind} {count:+}" for kind, count in changed.items() if count)
    if totals[0] == totals[1] and not kinds:
        return []
    (nodes_before, held_before), (nodes_after, held_after) = totals
    line = f"{nodes_before} nodes to {nodes_after}, {held_before} initializers to {held_after}"
    return [line, kinds] if kinds else [line]
