"""The kernels that ONNX Runtime runs for a file, each with the module that it belongs to, or as part of a border.

A border is where a tensor changes its type or its memory layout: kernels that quantize, dequantize and reorder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qatkit.verify.audit import Origin
from qatkit.verify.graph_view import matrix_ops, read_model, weight_of
from qatkit.verify.profile import run_optimized

# Profiled runs, and which quantile of a kernel's times is taken: others' work on the machine adds to it.
_RUNS, _QUIET = 40, 0.25
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
LAYOUT = "layout"  # what ONNX Runtime puts around kernels of another memory layout
_REORDERS = ("ReorderInput", "ReorderOutput")


@dataclass(frozen=True)
class SiteKernel:
    """One kernel.

    Attributes:
        site: that it belongs to; None of a border, and where none is known.
        border: QUANTIZE, DEQUANTIZE or LAYOUT; "" of an operator.
        values: of its output.
        microseconds: of a run, with what the profiler adds.
    """

    site: str | None
    border: str
    values: int
    microseconds: float


def site_kernels(
    path: Path,
    sites: Iterable[str],
    *,
    options: Mapping[str, str],
    threads: int,
    input_shape: Sequence[int] | Mapping[str, Any],
) -> list[SiteKernel]:
    """Profiles a file whose nodes are named after the sites (`qatkit.export.node_names`).

    Args:
        sites: of all nodes of the graph.
        options, threads: as `run_optimized`.
        input_shape: [N, C, H, W], or a batch by the names of the inputs.

    Raises:
        ConfigError: the file does not load.
    """
    origin, known = Origin(read_model(path).graph), set(sites)
    optimized = run_optimized(
        path, options=options, threads=threads, input_shape=input_shape, runs=_RUNS, quantile=_QUIET
    )
    found = []
    for node in optimized.graph:
        kernel = optimized.kernels.get(str(node.name))
        if kernel is None:
            continue
        source = origin.find(node, weight_of(node) if node.op_type in matrix_ops() else None)
        border = _border(node, source)
        site = None if border or source is None else site_of(str(source.name), known)
        values = math.prod(kernel.output_shapes[0]) if kernel.output_shapes else 0
        found.append(SiteKernel(site, border, values, kernel.microseconds))
    return found


def _border(node: ir.Node, source: ir.Node | None) -> str:
    if node.op_type in (QUANTIZE, DEQUANTIZE):
        return str(node.op_type)
    moved = node.op_type in _REORDERS or (node.op_type == "Transpose" and source is None)
    return LAYOUT if moved else ""


def site_of(name: str, sites: set[str]) -> str | None:
    """The site that a node of a file belongs to: "layer1.0.conv1.barrier/Sum" to layer1.0.conv1."""
    where = name.rpartition("/")[0]
    while where and where not in sites:
        where = where.rpartition(".")[0]
    return where or None
