"""Reports what ONNX Runtime really runs: types, shapes and time of every kernel, from a profile.

ONNX Runtime saves its optimized graph without types or shapes, so the file does not distinguish an 8-bit
MaxPool from a float one. A few profiled runs do: every kernel reports its time and the types and shapes of
its inputs and outputs. A prepacked weight is missing from that report; its shape comes from the saved graph.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qatkit_verify.feeds import noise_feeds
from qatkit_verify.files import no_room
from qatkit_verify.onnx_file import Node, OnnxFile, read_onnx
from qatkit_verify.session import open_session

RUNS = 5  # profiled runs; the first is dropped
_SUFFIX = "_kernel_time"
_NAME = re.compile(r'"name" :"(.*)","args"')  # one event per line; quotes in it are escaped from 1.31 on
CONVS = frozenset(
    {
        "Conv",
        "ConvInteger",
        "ConvTranspose",
        "FusedConv",
        "NhwcFusedConv",
        "QLinearConv",
        "QLinearConvTranspose",
    }
)
MATMULS = frozenset(
    {
        "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat",
        "MatMulNBits", "QGemm", "QLinearMatMul",
    }
)  # fmt: skip
# 8-bit operators whose names lack the prefix QLinear; DynamicQuantizeMatMul quantizes float activations itself.
_FROM_FLOAT_TO_INT8 = ("QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")


@dataclass(frozen=True)
class Kernel:
    """A kernel in a profile; element types have ONNX Runtime's names ("uint8", "float")."""

    input_types: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    microseconds: float  # median over runs, or another quantile


@dataclass(frozen=True)
class Executed:
    """A node that ran; `macs` are the multiply-accumulates for one image, the time is that of the batch."""

    name: str
    op: str
    precision: str
    macs: int
    microseconds: float


def executed(
    path: str | Path,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
    given: Any = None,
    images: int = 1,
) -> list[Executed]:
    """Returns the nodes that ONNX Runtime runs for a file here with all optimizations, in their order.

    Args:
        path: an ONNX file.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
        given: a batch by input name, for files with dynamic shapes; None: noise.
        images: number of images in the batch.

    Raises:
        ConfigError: ONNX Runtime cannot load the file, or `given` is None and an axis after the first is
            dynamic.
        OSError: the disk is full.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimized.onnx"
        open_session(path, threads=threads, options=options, optimized_path=saved)
        graph, ran = read_onnx(saved), profiled(saved, options=options, threads=threads, given=given)
    return [
        Executed(node.name, node.op_type, precision(node.op_type, ran[node.name]),
                 _macs(node, ran[node.name], graph) // images, ran[node.name].microseconds)
        for node in graph.nodes
        if node.name in ran
    ]  # fmt: skip


def profiled(
    saved: Path,
    *,
    options: Mapping[str, str] | None,
    threads: int,
    given: Any,
    runs: int = RUNS,
    quantile: float = 0.5,
) -> dict[str, Kernel]:
    """Profiles an optimized graph without further optimization, and returns its kernels by node name.

    The time of a kernel is the given quantile over the runs. Without `given`, the inputs are noise.
    """
    prefix = saved.with_name("profile")
    session = open_session(
        saved, threads=threads, optimize=False, options=options, profile_prefix=prefix, arena=True
    )
    feed = noise_feeds(session, given, seed=0)
    for _ in range(runs):
        session.run(None, feed)
    return kernels(events(Path(session.end_profiling())), quantile)


def _macs(node: Node, kernel: Kernel, graph: OnnxFile) -> int:
    made = {name: one for one in graph.nodes for name in one.outputs}
    if node.op_type in CONVS:
        index = 3 if node.op_type.startswith("QLinear") else 1
        name = node.inputs[index]
        while name not in graph.shapes and name in made:
            name = made[name].inputs[0]  # before a DequantizeLinear, or a change of layout
        return conv_macs(node.op_type, kernel, graph.shapes.get(name))
    if node.op_type in MATMULS:
        return matmul_macs(kernel, transposed=bool(node.ints.get("transA", 0)))
    return 0


def conv_macs(op_type: str, kernel: Kernel, weight: Sequence[int] | None) -> int:
    """Returns the multiply-accumulates of a convolution for the profiled batch; 0 if a shape is unknown."""
    if weight is None or not kernel.output_shapes or not kernel.input_shapes:
        return 0
    grid = kernel.input_shapes[0] if "Transpose" in op_type else kernel.output_shapes[0]
    return math.prod(grid) * math.prod(weight[1:])


def matmul_macs(kernel: Kernel, *, transposed: bool = False) -> int:
    """Returns the multiply-accumulates of a matrix product for the profiled batch; 0 if a shape is unknown.

    `transposed` says whether the first operand is transposed.
    """
    if not kernel.output_shapes or not kernel.input_shapes:
        return 0
    return math.prod(kernel.output_shapes[0]) * kernel.input_shapes[0][-2 if transposed else -1]


def events(file: Path) -> Any:
    """Returns the events that ONNX Runtime's profiler wrote.

    Raises:
        OSError: the disk was full.
    """
    text = file.read_text(encoding="utf-8", errors="replace")  # a full disk may cut a character in two
    try:
        return json.loads(text)
    except ValueError as error:
        full = no_room(file)
        if full is not None:
            raise full from error
    return json.loads(_NAME.sub(lambda found: f'"name" :{json.dumps(found[1])},"args"', text))


def kernels(found: Sequence[Mapping[str, Any]], quantile: float) -> dict[str, Kernel]:
    """Returns the kernels in the events of a profile, by node name.

    The time of a kernel is the given quantile over the runs, without the first one if there are several.
    """
    reports: dict[str, list[Mapping[str, Any]]] = {}
    for event in found:
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            reports.setdefault(event["name"].removesuffix(_SUFFIX), []).append(event)
    by_name = {}
    for name, runs in reports.items():
        inputs, outputs = runs[0]["args"]["input_type_shape"], runs[0]["args"]["output_type_shape"]
        times = [run["dur"] for run in runs[1:] or runs]
        by_name[name] = Kernel(
            tuple(kind for tensor in inputs for kind in tensor),
            tuple(tuple(shape) for tensor in inputs for shape in tensor.values()),
            tuple(tuple(shape) for tensor in outputs for shape in tensor.values()),
            float(np.quantile(times, quantile)),
        )
    return by_name


def precision(op_type: str, kernel: Kernel | None) -> str:
    """Returns the precision of a node: int8 | float | weight-only | other (indices, booleans, unknown)."""
    if op_type == "MatMulNBits":
        return "weight-only"
    if op_type.startswith("QLinear") or op_type in _FROM_FLOAT_TO_INT8:
        return "int8"
    if op_type in ("Shape", "Size"):
        return "other"  # reads no values
    first = kernel.input_types[0] if kernel is not None and kernel.input_types else ""
    if first in ("uint8", "int8"):
        return "int8"
    return "float" if first.startswith(("float", "double", "bfloat")) else "other"
