"""Profiles the graph that ONNX Runtime really runs, and the inputs that its kernels really receive.

`qatkit_verify.kernels` reads the reports of kernels; this module provides the nodes that they belong to, as a
graph. The saved graph itself is profiled, with optimizations off, so that reports and nodes match name by
name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qatkit.verify.graph_view import stored, weight_of, with_initializers
from qatkit_verify.errors import ConfigError
from qatkit_verify.kernels import CONVS, MATMULS, RUNS, Kernel, conv_macs, matmul_macs, profiled
from qatkit_verify.session import open_session


@dataclass(frozen=True)
class Optimized:
    """The optimized graph, with the reports of its kernels by node name."""

    graph: ir.Graph
    kernels: Mapping[str, Kernel]


def run_optimized(
    path: str | Path,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
    input_shape: Sequence[int] | Mapping[str, Any] | None = None,
    runs: int = RUNS,
    quantile: float = 0.5,
) -> Optimized:
    """Optimizes `path` at level ALL and profiles it, on noise or on the given batch.

    Args:
        path: an ONNX file.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
        input_shape: the shape of the input, [N, C, H, W], or a batch by input name; by default the file's own
            shapes, with 1 for a dynamic batch.
        runs: the number of profiled runs, 2 or more.
        quantile: the quantile over the runs that is reported as a kernel's time.

    Raises:
        ConfigError: the file does not load, or has other dynamic dimensions and no `input_shape` was given.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimized.onnx"
        open_session(path, threads=threads, options=options, optimized_path=saved)
        model = ir.external_data.load_to_model(ir.load(saved))
        _name_nodes(model.graph)
        ir.save(model, saved)
        try:
            found = profiled(
                saved, options=options, threads=threads, given=input_shape, runs=runs, quantile=quantile
            )
        except ConfigError as error:
            raise ConfigError("onnx file", path, reason=error.problem) from error
    return Optimized(with_initializers(model).graph, found)


def _name_nodes(graph: ir.Graph) -> None:
    """Gives every node a unique name, since nodes that ONNX Runtime inlines from functions have none."""
    taken: set[str] = set()
    for index, node in enumerate(graph):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{index}"
        taken.add(node.name)


def macs(node: ir.Node, kernel: Kernel | None) -> int:
    """Returns the multiply-accumulates of a matrix operator for the profiled batch; 0 for other operators."""
    if kernel is None:
        return 0
    if node.op_type in CONVS:
        weight = weight_of(node)
        tensor = stored(weight.value) if weight is not None else None
        return conv_macs(node.op_type, kernel, None if tensor is None else tensor.shape.numpy())
    if node.op_type in MATMULS:
        return matmul_macs(kernel, transposed=bool(node.attributes.get_int("transA", 0)))
    return 0
