"""Is the INT8 file really fast? An audit of the graph that ONNX Runtime runs, node by node.

A QDQ file only asks for integer kernels. Whether an operator gets one is decided when ONNX Runtime loads the
file, silently: one wrong pair, and a convolution runs in float with its weights dequantized on every run,
slower than the float model. The audit optimizes and profiles the file as a user's session would, names every
node's precision, looks each float node up in the file to say why, and counts multiply-accumulates.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import onnx

from qatkit.verify.graph_view import MATRIX_OPS, SHAPE_OPS, GraphView
from qatkit.verify.profile import Kernel, Optimized, macs, precision, run_optimized
from qatkit.verify.results import Audit, NodeAudit, RuntimeDequantize
from qatkit.verify.tensorrt_pairs import asks_for_int8, broken_pairs
from qatkit.verify.why_float import EIGHT_BIT_OPS, layernorm_blocker, surrounded, why_float, why_float_other

_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_LARGE_CONSTANT = 1 << 16  # elements; below, dequantizing a constant on every run costs microseconds
_LAYOUT_OPS = ("Transpose", "Reshape", "ReorderInput", "ReorderOutput")  # what ONNX Runtime adds by itself
_FUSED_SUFFIX = re.compile(r"(_token_\d+|_nchwc|/duplicated|/\w+Fusion/?|/)$")


def audit(
    int8_path: str | Path,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
    allow_float: Collection[str] = (),
    input_shape: Sequence[int] | None = None,
    for_onnxruntime: bool = True,
) -> Audit:
    """Audits `int8_path` as ONNX Runtime runs it at level ALL on this machine.

    Args:
        int8_path: the INT8 QDQ file.
        options: session config entries of the backend.
        threads: intra-op threads.
        allow_float: names or globs of operators left float on purpose: node names of the file, or module
            paths above them ("encoder.layers.*.mlp"). They are listed, but are no problem.
        input_shape: [N, C, H, W]; by default the file's own with a dynamic batch taken as 1.
        for_onnxruntime: False for a file that another runtime executes (`Backend.for_onnxruntime`): judged by
            what it asks for (`qatkit.verify.tensorrt_pairs`), since ONNX Runtime's kernels say nothing about it.

    Raises:
        ConfigError: ONNX Runtime can't load the file.
    """
    source = GraphView.load(int8_path)
    optimized = run_optimized(int8_path, options=options, threads=threads, input_shape=input_shape)
    kind = _Judge if for_onnxruntime else _FileJudge
    judge = kind(source, optimized, options or {}, allow_float)
    nodes = tuple(judge.node(node) for node in optimized.graph.nodes if node.op_type not in _PAIRS)
    counts: dict[str, Counter[str]] = {}
    for entry in nodes:
        counts.setdefault(entry.op, Counter())[entry.precision] += 1
    dequantized = tuple(_runtime_dequantize(optimized.graph)) if for_onnxruntime else ()
    kinds = Counter(node.op_type for node in optimized.graph.nodes)
    problems = [_line(entry, dequantized) for entry in nodes if entry.problem]
    problems += judge.others() + _dequantize_lines(
        dequantized, {entry.name for entry in nodes if entry.problem}
    )
    return Audit(
        nodes=nodes,
        ops={op: dict(sorted(counts[op].items())) for op in sorted(counts)},
        quantize=kinds["QuantizeLinear"],
        dequantize=kinds["DequantizeLinear"],
        transposes=kinds["Transpose"],
        runtime_dequantize=dequantized,
        macs=sum(entry.macs for entry in nodes),
        int8_macs=sum(entry.macs for entry in nodes if entry.precision == "int8"),
        problems=tuple(problems),
        for_onnxruntime=for_onnxruntime,
    )


def allowed(name: str, patterns: Iterable[str]) -> bool:
    """True when a pattern names the operator `name` or a module path above it."""
    return any(fnmatch.fnmatchcase(name, pattern + tail) for pattern in patterns for tail in ("", "/*", ".*"))


class Origin:
    """Finds the operator of the INT8 file that a node of the optimized graph came from."""

    def __init__(self, source: GraphView) -> None:
        self._source = source
        self._by_name = {node.name: node for node in source.nodes if node.name}
        self._by_weight: dict[str, list[onnx.NodeProto]] = {}
        for node in source.nodes:
            weight = source.weight_of(node) if node.op_type in MATRIX_OPS else None
            if weight is not None:
                self._by_weight.setdefault(weight.name, []).append(node)

    def find(self, node: onnx.NodeProto, weight: str | None) -> onnx.NodeProto | None:
        """By name, by the name without what fusions append, by output tensor, by weight; None if new."""
        name = node.name.removeprefix("fused ")
        names = [name]
        while (shorter := _FUSED_SUFFIX.sub("", names[-1])) != names[-1]:
            names.append(shorter)
        found = next((self._by_name[name] for name in names if name in self._by_name), None)
        if found is None:
            tensors = [*names, *node.output]  # an NCHWc node is named after the tensor it makes
            found = next((self._source.producer[t] for t in tensors if t in self._source.producer), None)
        if node.op_type in MATRIX_OPS and (found is None or found.op_type not in MATRIX_OPS):
            return self._matrix(found, weight)
        return found if found is None or found.op_type not in _PAIRS else None

    def _matrix(self, found: onnx.NodeProto | None, weight: str | None) -> onnx.NodeProto | None:
        """The matrix operator that owns `weight`, or stands before `found` (its activation, its bias Add)."""
        owners = self._by_weight.get(weight or "", [])
        if len(owners) == 1:
            return owners[0]
        for depth, node in enumerate(self._source.back(found.output[0]) if found is not None else ()):
            if node.op_type in MATRIX_OPS:
                return node
            if depth == 4:
                break
        return None


class _Judge:
    """Turns nodes of the optimized graph into `NodeAudit` entries."""

    def __init__(
        self,
        source: GraphView,
        optimized: Optimized,
        options: Mapping[str, str],
        allow_float: Collection[str],
    ) -> None:
        self._source, self._graph, self._kernels = source, optimized.graph, optimized.kernels
        self._options, self._allow = options, allow_float
        self._origin = Origin(source)

    def origin(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The operator of the file behind `node`."""
        weight = self._graph.weight_of(node) if node.op_type in MATRIX_OPS else None
        return self._origin.find(node, weight.name if weight is not None else None)

    def node(self, node: onnx.NodeProto) -> NodeAudit:
        kernel = self._kernels.get(node.name)
        origin, kind = self.origin(node), self.precision(node, kernel)
        permitted = allowed(origin.name if origin is not None else node.name, self._allow)
        if node.op_type in MATRIX_OPS:
            reason, problem = self._matrix(node, origin, kind, permitted)
        else:
            reason, problem = self._other(node, origin, kind, permitted)
        return NodeAudit(
            node.name,
            node.op_type,
            node.domain,
            kind,
            origin.name if origin is not None else None,
            reason,
            problem,
            macs(node, kernel, self._graph),
            kernel.microseconds if kernel is not None else None,
        )

    def precision(self, node: onnx.NodeProto, kernel: Kernel | None) -> str:
        """What `node` computes in."""
        return precision(node, kernel)

    def _matrix(
        self, node: onnx.NodeProto, origin: onnx.NodeProto | None, kind: str, permitted: bool
    ) -> tuple[str, bool]:
        if kind == "weight-only":
            return "weights of 4 or 8 bits, activations in float", False
        weight = self._source.weight_of(origin) if origin is not None else None
        if kind == "int8":
            in_float = weight is not None and self._source.element_type(weight.name) == onnx.TensorProto.FLOAT
            if in_float and weight is not None and weight.dequantize is None:
                return "its weight is float in the file: ONNX Runtime quantized it itself, per tensor", True
            return "", False
        if permitted:
            return "left float on purpose", False
        if origin is None:
            constant = self._graph.weight_of(node) is not None
            return (
                "not found in the file" if constant else "activation by activation, made by ONNX Runtime",
                constant,
            )
        problem = weight is not None or not any(
            reader is None or reader.op_type != "DequantizeLinear"
            for reader in (self._source.producer.get(name) for name in origin.input[:2])
        )
        return why_float(self._source, origin, node.op_type, self._options), problem

    def _other(
        self, node: onnx.NodeProto, origin: onnx.NodeProto | None, kind: str, permitted: bool
    ) -> tuple[str, bool]:
        if kind != "float":
            return "", False
        if permitted:
            return "left float on purpose", False
        if origin is None or (origin.op_type != node.op_type and node.op_type in _LAYOUT_OPS):
            return "inserted by ONNX Runtime", False
        asked = origin.op_type in EIGHT_BIT_OPS and surrounded(self._source, origin)
        return why_float_other(self._source, origin, node.op_type), asked

    def others(self) -> list[str]:
        """One line for every LayerNorm that was left in pieces: x - ReduceMean(x), then its variance."""
        lines = []
        for node in self._graph.nodes:
            follower = self._centred(node)
            if follower is None or allowed(node.name, self._allow):
                continue
            became = (
                "became a SimplifiedLayerNormalization"
                if follower.op_type == "SimplifiedLayerNormalization"
                else "stayed ReduceMean, Sub, ..."
            )
            origin = self.origin(node)
            blocker = (
                layernorm_blocker(self._source, origin.input[0]) if origin is not None else "unknown pattern"
            )
            lines.append(f"LayerNorm at '{node.name}' not fused: it {became}; {blocker}")
        return lines

    def _centred(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The reader of `node` that takes the variance, when `node` is x - ReduceMean(x)."""
        if node.op_type != "Sub":
            return None
        mean = next(
            (above for above in self._graph.back(node.input[1]) if above.op_type not in SHAPE_OPS), None
        )
        if (
            mean is None
            or mean.op_type != "ReduceMean"
            or self._root(mean.input[0]) != self._root(node.input[0])
        ):
            return None
        readers = [reader for reader, _ in readers_past_shapes(self._graph, node.output[0])]
        return next((r for r in readers if r.op_type in ("SimplifiedLayerNormalization", "Pow", "Mul")), None)

    def _root(self, tensor: str) -> str:
        """What `tensor` is made of, above shape operators and DequantizeLinear."""
        for node in self._graph.back(tensor):
            if node.op_type != "DequantizeLinear" and node.op_type not in SHAPE_OPS:
                break
            tensor = node.input[0]
        return tensor


class _FileJudge(_Judge):
    """Judges the file itself; of the profiled graph it takes the multiply-accumulates."""

    def _matrix(
        self, node: onnx.NodeProto, origin: onnx.NodeProto | None, kind: str, permitted: bool
    ) -> tuple[str, bool]:
        if permitted:
            return "left float on purpose", False
        if origin is None:
            return "not found in the file", True
        reason = asks_for_int8(self._source, origin)
        return reason, bool(reason) and self._source.weight_of(origin) is not None

    def _other(
        self, node: onnx.NodeProto, origin: onnx.NodeProto | None, kind: str, permitted: bool
    ) -> tuple[str, bool]:
        return "", False

    def precision(self, node: onnx.NodeProto, kernel: Kernel | None) -> str:
        origin = self.origin(node) if node.op_type in MATRIX_OPS else None
        if origin is not None:
            return "float" if asks_for_int8(self._source, origin) else "int8"
        return precision(node, kernel)

    def others(self) -> list[str]:
        return broken_pairs(self._source)


def _runtime_dequantize(graph: GraphView) -> Iterable[RuntimeDequantize]:
    """Every constant that a DequantizeLinear of the optimized graph turns into float on each run."""
    for node in graph.nodes:
        if node.op_type != "DequantizeLinear" or node.input[0] not in graph.initializers:
            continue
        tensor = graph.initializers[node.input[0]]
        reader, name = next(iter(readers_past_shapes(graph, node.output[0])), (None, ""))
        matrix = reader is not None and reader.op_type in MATRIX_OPS
        is_bias = matrix and reader is not None and list(reader.input[2:3]) == [name]
        kind = "bias" if is_bias else "weight" if matrix else "constant"
        yield RuntimeDequantize(
            tensor.name, kind, 4 * math.prod(tensor.dims), reader.name if reader is not None else "output"
        )


def readers_past_shapes(graph: GraphView, tensor: str) -> list[tuple[onnx.NodeProto, str]]:
    """The computing readers of `tensor`, past shape operators, each with the name of the tensor it reads."""
    found = []
    for reader in graph.consumers.get(tensor, []):
        if reader.op_type in SHAPE_OPS:
            found += readers_past_shapes(graph, reader.output[0])
        else:
            found.append((reader, tensor))
    return found


def _line(entry: NodeAudit, dequantized: Sequence[RuntimeDequantize]) -> str:
    size = sum(item.bytes for item in dequantized if item.feeds == entry.name and item.kind == "weight")
    tail = f"; its weight ({_size(size)}) is dequantized on every run" if size else ""
    return f"{entry.precision} {entry.op} '{entry.source or entry.name}': {entry.reason}{tail}"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _dequantize_lines(dequantized: Sequence[RuntimeDequantize], explained: Collection[str]) -> list[str]:
    """Lines for run-time dequantization that no float operator's line has told already."""
    return [
        f"{item.kind} '{item.name}' ({_size(item.bytes)}) is dequantized on every run for '{item.feeds}'"
        for item in dequantized
        if item.feeds not in explained and (item.kind == "weight" or item.bytes >= 4 * _LARGE_CONSTANT)
    ]
