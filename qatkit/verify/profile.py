"""The graph that ONNX Runtime really runs, and what its kernels really receive.

ONNX Runtime saves its optimized graph without types or shapes, so the file alone can't tell an 8-bit MaxPool
from a float one. A few profiled runs do: every kernel reports the types and shapes of its inputs and outputs
and its time. A prepacked weight is missing from that report; its shape comes from the saved graph.
The saved graph itself is profiled, with optimizations off, so that reports and nodes match name by name.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qatkit.verify.graph_view import conv_ops, matmul_ops, stored, weight_of, with_initializers
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, noise_feeds
from qatkit_verify.files import no_room
from qatkit_verify.session import open_session

_RUNS = 5  # profiled runs; the first is dropped
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class Kernel:
    """One kernel's report: element types and shapes as ONNX Runtime names them ("uint8", "float")."""

    input_types: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    microseconds: float  # median over runs, or another quantile


@dataclass(frozen=True)
class Optimized:
    """The optimized graph with its kernels by node name."""

    graph: ir.Graph
    kernels: Mapping[str, Kernel]


def run_optimized(
    path: str | Path,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
    input_shape: Sequence[int] | Mapping[str, Any] | None = None,
    runs: int = _RUNS,
    quantile: float = 0.5,
) -> Optimized:
    """Optimizes `path` at level ALL and profiles it on noise.

    Args:
        path: an ONNX file.
        options: session config entries of the backend.
        threads: intra-op threads.
        input_shape: [N, C, H, W], or a batch by the names of the inputs; by default the file's own shapes with a
            dynamic batch taken as 1.
        runs: that are profiled, 2 or more.
        quantile: of each kernel's times over the runs, that is reported.

    Raises:
        ConfigError: the file doesn't load, or has other dynamic dimensions and no `input_shape` was given.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved, prefix = Path(folder) / "optimized.onnx", Path(folder) / "profile"
        open_session(path, threads=threads, options=options, optimized_path=saved)
        model = ir.load(saved)
        _name_nodes(model.graph)
        ir.save(model, saved)
        session = open_session(saved, threads=threads, optimize=False, options=options, profile_prefix=prefix)
        given = _given(session, path, input_shape)
        for _ in range(runs):
            session.run(None, given)
        events = _events(Path(session.end_profiling()))
    return Optimized(with_initializers(model).graph, _kernels(events, quantile))


def _events(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        full = no_room(file)
        if full is None:
            raise
        raise full from error


def _name_nodes(graph: ir.Graph) -> None:
    """Gives every node a name of its own: what ONNX Runtime inlines from functions has none."""
    taken: set[str] = set()
    for index, node in enumerate(graph):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{index}"
        taken.add(node.name)


def _given(
    session: ort.InferenceSession, path: str | Path, wanted: Sequence[int] | Mapping[str, Any] | None
) -> dict[str, Array]:
    try:
        return noise_feeds(session, wanted, seed=0)
    except ConfigError as error:
        raise ConfigError("onnx file", path, error.allowed) from error


def _kernels(events: Sequence[Mapping[str, Any]], quantile: float) -> dict[str, Kernel]:
    reports: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            reports.setdefault(event["name"].removesuffix(_SUFFIX), []).append(event)
    kernels = {}
    for name, runs in reports.items():
        inputs, outputs = runs[0]["args"]["input_type_shape"], runs[0]["args"]["output_type_shape"]
        times = [run["dur"] for run in runs[1:] or runs]
        kernels[name] = Kernel(
            tuple(kind for tensor in inputs for kind in tensor),
            tuple(tuple(shape) for tensor in inputs for shape in tensor.values()),
            tuple(tuple(shape) for tensor in outputs for shape in tensor.values()),
            float(np.quantile(times, quantile)),
        )
    return kernels


# Take float activations and quantize them themselves, or are named apart from the QLinear family.
_FROM_FLOAT_TO_INT8 = ("QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")


def precision(node: ir.Node, kernel: Kernel | None) -> str:
    """What a node computes in: int8 | float | weight-only | other (indices, booleans, unknown)."""
    if node.op_type == "MatMulNBits":
        return "weight-only"
    if node.op_type.startswith("QLinear") or node.op_type in _FROM_FLOAT_TO_INT8:
        return "int8"
    if node.op_type in ("Shape", "Size"):
        return "other"  # reads no values
    first = kernel.input_types[0] if kernel is not None and kernel.input_types else ""
    if first in ("uint8", "int8"):
        return "int8"
    return "float" if first.startswith(("float", "double", "bfloat")) else "other"


def macs(node: ir.Node, kernel: Kernel | None) -> int:
    """Multiply-accumulates of a matrix operator for the profiled batch; 0 for every other operator."""
    if kernel is None or not kernel.output_shapes or not kernel.input_shapes:
        return 0
    if node.op_type in conv_ops():
        weight = weight_of(node)
        tensor = stored(weight.value) if weight is not None else None
        if tensor is None:
            return 0
        per_position = math.prod(tensor.shape.numpy()[1:])
        grid = kernel.input_shapes[0] if "Transpose" in node.op_type else kernel.output_shapes[0]
        return math.prod(grid) * per_position
    if node.op_type in matmul_ops():
        transposed = node.attributes.get_int("transA", 0)
        depth: int = kernel.input_shapes[0][-2 if transposed else -1]
        return math.prod(kernel.output_shapes[0]) * depth
    return 0
