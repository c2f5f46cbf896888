"""Maps the kernels that ONNX Runtime runs for a file to their sites (modules) or to borders.

At a border, a tensor changes its type or its memory layout: the kernel quantizes, dequantizes or reorders it.
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

# The number of profiled runs, and the quantile over them, which is low since other work only adds to times.
_RUNS, _QUIET = 40, 0.25
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
LAYOUT = "layout"  # nodes that ONNX Runtime inserts around kernels with another memory layout
_REORDERS = ("ReorderInput", "ReorderOutput")
_BEHIND = (
    4  # number of successive nodes that are searched for a site: those of an operator, and the next Q/DQ pair
)


@dataclass(frozen=True)
class SiteKernel:
    """A kernel with its site or border, and its time.

    Attributes:
        site: the site that the kernel belongs to; None for a border, or if no site is known.
        border: the kind of border: QUANTIZE, DEQUANTIZE or LAYOUT; "" for an operator.
        values: the number of output values.
        microseconds: the time of a run, including the profiler's overhead.
    """

    site: str | None
    border: str
    values: int
    microseconds: float


def site_kernels(
    path: Path,
    sites: Iterable[str],
    *,
    paths: Mapping[str, str],
    options: Mapping[str, str],
    threads: int,
    input_shape: Sequence[int] | Mapping[str, Any],
) -> list[SiteKernel]:
    """Profiles a file and returns its kernels in graph order.

    Their sites come from `paths` or from the names of the file's nodes (`qatkit.export.node_names`).

    Args:
        path: the file.
        sites: the sites of all nodes of the graph.
        paths: the sites by the names of nodes and tensors of an imported file (`ImportedModel.paths`); empty
            for other files.
        options, threads: as in `run_optimized`.
        input_shape: the shape of the input, [N, C, H, W], or a batch by input name.

    Raises:
        ConfigError: the file does not load.
    """
    known = _Sites(Origin(read_model(path).graph), set(sites), paths)
    optimized = run_optimized(
        path, options=options, threads=threads, input_shape=input_shape, runs=_RUNS, quantile=_QUIET
    )
    found = []
    for node in optimized.graph:
        kernel = optimized.kernels.get(str(node.name))
        if kernel is None:
            continue
        border = _border(node, known.origin(node))
        site = None if border else known.of(node)
        values = math.prod(kernel.output_shapes[0]) if kernel.output_shapes else 0
        found.append(SiteKernel(site, border, values, kernel.microseconds))
    return found


def _border(node: ir.Node, source: ir.Node | None) -> str:
    if node.op_type in (QUANTIZE, DEQUANTIZE):
        return str(node.op_type)
    moved = node.op_type in _REORDERS or (node.op_type == "Transpose" and source is None)
    return LAYOUT if moved else ""


class _Sites:
    """Finds the site that a node of the optimized graph belongs to."""

    def __init__(self, origin: Origin, sites: set[str], paths: Mapping[str, str]) -> None:
        self._origin, self._sites, self._paths = origin, sites, paths

    def origin(self, node: ir.Node) -> ir.Node | None:
        """Returns the node of the file from which `node` was made; None if `node` is new."""
        return self._origin.find(node, weight_of(node) if node.op_type in matrix_ops() else None)

    def of(self, node: ir.Node) -> str | None:
        """Returns the site of a node; None if none is known.

        A node of an imported file may have no site if several nodes form one operator (a SiLU is named after
        its Mul). It then belongs to the site of the first later node that has one.
        """
        nodes = [node]
        for _ in range(_BEHIND if self._paths else 1):
            found = next((site for one in nodes if (site := self._own(one)) is not None), None)
            if found is not None:
                return found
            nodes = [reader for one in nodes for value in one.outputs for reader in value.consumers()]
        return None

    def _own(self, node: ir.Node) -> str | None:
        source = self.origin(node)
        for one in (node,) if source is None else (source, node):
            names = (str(one.name), *(str(value.name) for value in one.outputs))
            path = next((self._paths[name] for name in names if name in self._paths), None)
            if path in self._sites:
                return path
        return None if source is None else site_of(str(source.name), self._sites)


def site_of(name: str, sites: set[str]) -> str | None:
    """Returns the site in a node's name, or None: layer1.0.conv1 for "layer1.0.conv1.barrier/Sum"."""
    where = name.rpartition("/")[0]
    while where and where not in sites:
        where = where.rpartition(".")[0]
    return where or None
