"""Audits the graph that ONNX Runtime runs, node by node, to find out whether the INT8 file is really fast.

A QDQ file only asks for integer kernels. ONNX Runtime silently decides whether an operator gets one when it
loads the file. One wrong Q/DQ pair, and a convolution runs in float with its weights dequantized on every
run, slower than in the float model. The audit optimizes and profiles the file as a user's session would,
reports every node's precision, looks up each float node in the file to say why, and counts
multiply-accumulates.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from qatkit.quant.spec import COMPUTED_IN_FLOAT, NARROW_BIAS, SIXTEEN_BITS
from qatkit.records.results import Audit, NodeAudit, RuntimeDequantize
from qatkit.verify.graph_view import (
    Weight,
    back,
    eight_bit_ops,
    element_type,
    made_by,
    matrix_ops,
    operand,
    read_model,
    shape_ops,
    stored,
    weight_of,
)
from qatkit.verify.packed_bits import packed_bits
from qatkit.verify.profile import Optimized, macs, run_optimized
from qatkit.verify.why_float import (
    has_narrow_bias,
    layernorm_blocker,
    surrounded,
    takes_16_bits,
    why_float,
    why_float_other,
    wrong_bias,
)
from qatkit_verify.kernels import Kernel, precision

_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_ON_PURPOSE = "left float on purpose"
_LARGE_CONSTANT = 1 << 16  # elements; dequantizing a smaller constant on every run takes only microseconds
_LAYOUT_OPS = ("Transpose", "Reshape", "ReorderInput", "ReorderOutput")  # inserted by ONNX Runtime itself
_FUSED_SUFFIX = re.compile(r"(_token_\d+|_nchwc|/duplicated|/\w+Fusion/?|/)$")


def audit(
    int8_path: str | Path,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
    allow_float: Collection[str] = (),
    input_shape: Sequence[int] | Mapping[str, Any] | None = None,
    other_runtime: str = "",
) -> Audit:
    """Audits `int8_path` as ONNX Runtime runs it at optimization level ALL on this machine.

    Args:
        int8_path: the INT8 QDQ file.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
        allow_float: names or globs of operators that are float on purpose: node names of the file, or module
            paths above them ("encoder.layers.*.mlp"). They are listed, but not as problems.
        input_shape: [N, C, H, W], or a batch by input name; by default the file's own shapes, with 1 for a
            dynamic batch.
        other_runtime: for a file that another runtime executes, the module that knows what that runtime accepts
            (`Backend.other_runtime`). The file is then judged by its Q/DQ pairs, since ONNX Runtime's kernels
            say nothing about the other runtime.

    Raises:
        ConfigError: ONNX Runtime cannot load the file.
    """
    source = read_model(int8_path).graph
    optimized = run_optimized(int8_path, options=options, threads=threads, input_shape=input_shape)
    given = (source, optimized, options or {}, allow_float)
    judge = _FileJudge(import_module(other_runtime), *given) if other_runtime else _Judge(*given)
    nodes = tuple(judge.node(node) for node in optimized.graph if node.op_type not in _PAIRS)
    dequantized = tuple(_runtime_dequantize(optimized.graph)) if not other_runtime else ()
    kinds = Counter(node.op_type for node in optimized.graph)
    wrong = {entry.name: _line(entry, dequantized) for entry in nodes if entry.problem}
    explained = {
        *wrong,
        *(entry.name for entry in nodes if entry.reason in (_ON_PURPOSE, *COMPUTED_IN_FLOAT)),
    }
    problems = [*wrong.values(), *judge.others(), *_dequantize_lines(dequantized, explained)]
    return Audit(
        nodes=nodes,
        ops=_counts(nodes),
        quantize=kinds["QuantizeLinear"],
        dequantize=kinds["DequantizeLinear"],
        transposes=kinds["Transpose"],
        runtime_dequantize=dequantized,
        macs=sum(entry.macs for entry in nodes),
        int8_macs=sum(entry.macs for entry in nodes if entry.precision == "int8"),
        problems=tuple(problems),
        for_onnxruntime=not other_runtime,
        packed_bits=packed_bits(source),
    )


def _counts(nodes: Iterable[NodeAudit]) -> dict[str, dict[str, int]]:
    """Returns for each operator type how many nodes compute in each precision."""
    counts: dict[str, Counter[str]] = {}
    for entry in nodes:
        counts.setdefault(entry.op, Counter())[entry.precision] += 1
    return {op: dict(sorted(counts[op].items())) for op in sorted(counts)}


def allowed(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a pattern matches the operator `name` or a module path above it."""
    return any(fnmatch.fnmatchcase(name, pattern + tail) for pattern in patterns for tail in ("", "/*", ".*"))


class Origin:
    """Finds the operator of the INT8 file that a node of the optimized graph came from."""

    def __init__(self, source: ir.Graph) -> None:
        self._by_name = {node.name: node for node in source if node.name}
        self._by_output = {value.name: node for node in source for value in node.outputs if value.name}
        self._by_weight: dict[str, list[ir.Node]] = {}
        for node in source:
            weight = weight_of(node) if node.op_type in matrix_ops() else None
            if weight is not None:
                self._by_weight.setdefault(weight.name, []).append(node)

    def find(self, node: ir.Node, weight: Weight | None) -> ir.Node | None:
        """Returns the operator with the name of `node` (without fusion suffixes) or with the same output; else None.

        For a matrix operator, the result is a matrix operator too. If name and output lead to none, `weight`
        or the operators before the one found identify it.
        """
        names = [str(node.name).removeprefix("fused ")]
        while (shorter := _FUSED_SUFFIX.sub("", names[-1])) != names[-1]:
            names.append(shorter)
        found = next((self._by_name[name] for name in names if name in self._by_name), None)
        if found is None:
            # An NCHWc node is named after the tensor that it produces.
            tensors = [*names, *(value.name for value in node.outputs)]
            found = next((self._by_output[t] for t in tensors if t in self._by_output), None)
        if node.op_type in matrix_ops() and (found is None or found.op_type not in matrix_ops()):
            return self._matrix(found, weight)
        return found if found is None or found.op_type not in _PAIRS else None

    def _matrix(self, found: ir.Node | None, weight: Weight | None) -> ir.Node | None:
        """Returns the only matrix operator with this weight.

        If there is no such operator, or there are several, the result is the nearest matrix operator shortly
        before `found`, such as an activation or the Add of a bias.
        """
        owners = self._by_weight.get(weight.name, []) if weight is not None else []
        if len(owners) == 1:
            return owners[0]
        above = back(found.outputs[0]) if found is not None else iter(())
        return next((node for node in islice(above, 5) if node.op_type in matrix_ops()), None)


class _Judge:
    """Turns nodes of the optimized graph into `NodeAudit` entries."""

    def __init__(
        self,
        source: ir.Graph,
        optimized: Optimized,
        options: Mapping[str, str],
        allow_float: Collection[str],
    ) -> None:
        self._source, self._graph, self._kernels = source, optimized.graph, optimized.kernels
        self._options, self._allow = options, allow_float
        self._origin = Origin(source)

    def origin(self, node: ir.Node) -> ir.Node | None:
        """Returns the operator of the file that `node` came from."""
        return self._origin.find(node, weight_of(node) if node.op_type in matrix_ops() else None)

    def node(self, node: ir.Node) -> NodeAudit:
        name = str(node.name)
        kernel = self._kernels.get(name)
        origin, kind = self.origin(node), self.precision(node, kernel)
        source = origin.name or "" if origin is not None else None
        permitted = allowed(source or name, self._allow)
        if node.op_type in matrix_ops():
            reason, problem = self._matrix(node, origin, kind, permitted)
        else:
            reason, problem = self._other(node, origin, kind, permitted)
        return NodeAudit(
            name,
            node.op_type,
            node.domain,
            kind,
            source,
            reason,
            problem,
            macs(node, kernel),
            kernel.microseconds if kernel is not None else None,
        )

    def precision(self, node: ir.Node, kernel: Kernel | None) -> str:
        """Returns the precision in which `node` computes."""
        return precision(node.op_type, kernel)

    def _matrix(self, node: ir.Node, origin: ir.Node | None, kind: str, permitted: bool) -> tuple[str, bool]:
        if kind == "weight-only":
            return "packed weights, activations in float", False
        weight = weight_of(origin) if origin is not None else None
        if kind == "int8":
            in_float = weight is not None and element_type(weight.value) == ir.DataType.FLOAT
            if in_float and weight is not None and weight.dequantize is None:
                return "its weight is float in the file: ONNX Runtime quantized it itself, per tensor", True
            wrong = wrong_bias(origin) if origin is not None else ""
            return wrong, bool(wrong)
        if permitted:
            return _ON_PURPOSE, False
        if origin is not None and takes_16_bits(origin):
            return SIXTEEN_BITS, False
        if origin is not None and weight is not None and has_narrow_bias(origin):
            return NARROW_BIAS, False
        if origin is None:
            constant = weight_of(node) is not None
            return (
                "not found in the file"
                if constant
                else "a product of two activations, inserted by ONNX Runtime",
                constant,
            )
        problem = weight is not None or all(made_by(value, "DequantizeLinear") for value in origin.inputs[:2])
        return why_float(origin, node.op_type, self._options), problem

    def _other(self, node: ir.Node, origin: ir.Node | None, kind: str, permitted: bool) -> tuple[str, bool]:
        if kind != "float":
            return "", False
        if permitted:
            return _ON_PURPOSE, False
        if origin is None or (origin.op_type != node.op_type and node.op_type in _LAYOUT_OPS):
            return "inserted by ONNX Runtime", False
        if takes_16_bits(origin):
            return SIXTEEN_BITS, False
        asked = origin.op_type in eight_bit_ops() and surrounded(origin)
        return why_float_other(origin, node.op_type), asked

    def others(self) -> list[str]:
        """Returns one line for every LayerNorm that was not fused, without those that are float on purpose.

        A LayerNorm is found as x - ReduceMean(x), followed by the variance of the result.
        """
        lines = []
        for node in self._graph:
            follower = self._centred(node)
            if follower is None or allowed(str(node.name), self._allow):
                continue
            became = (
                "became a SimplifiedLayerNormalization"
                if follower.op_type == "SimplifiedLayerNormalization"
                else "stayed ReduceMean, Sub, ..."
            )
            origin = self.origin(node)
            blocker = layernorm_blocker(origin.inputs[0]) if origin is not None else "unknown pattern"
            lines.append(f"LayerNorm at '{node.name}' is not fused: it {became}; {blocker}")
        return lines

    def _centred(self, node: ir.Node) -> ir.Node | None:
        """Returns the reader of `node` that computes the variance if `node` is the x - ReduceMean(x) of a LayerNorm.

        It is None for other nodes, for a norm written by hand in several modules, and for several norms that
        share the difference.
        """
        if node.op_type != "Sub":
            return None
        mean = next((above for above in back(node.inputs[1]) if above.op_type not in shape_ops()), None)
        if mean is None or mean.op_type != "ReduceMean" or _root(mean.inputs[0]) is not _root(node.inputs[0]):
            return None
        readers = [reader for reader, _ in readers_past_shapes(node.outputs[0])]
        scope = _scope(node)
        ends = [r for r in readers if r.op_type == "SimplifiedLayerNormalization" or _scope(r) == scope]
        if _scope(mean) != scope or all(r.op_type in ("Pow", "Mul") for r in ends):
            return None  # hand-written from operators in several places, so it stays as in the model
        if len(ends) > 1 and all(r.op_type == "SimplifiedLayerNormalization" for r in ends):
            return None  # two norms of the same tensor, which share the centred values
        return next((r for r in readers if r.op_type in ("SimplifiedLayerNormalization", "Pow", "Mul")), None)


class _FileJudge(_Judge):
    """Judges the file itself by what another runtime accepts; only MACs and times come from the profiled graph."""

    def __init__(self, runtime: ModuleType, *given: Any) -> None:
        super().__init__(*given)
        self._runtime = runtime

    def _matrix(self, node: ir.Node, origin: ir.Node | None, kind: str, permitted: bool) -> tuple[str, bool]:
        if permitted:
            return _ON_PURPOSE, False
        if origin is None:
            return "not found in the file", True
        reason = self._runtime.asks_for_int8(origin)
        return reason, bool(reason) and weight_of(origin) is not None

    def _other(self, node: ir.Node, origin: ir.Node | None, kind: str, permitted: bool) -> tuple[str, bool]:
        return "", False

    def precision(self, node: ir.Node, kernel: Kernel | None) -> str:
        origin = self.origin(node) if node.op_type in matrix_ops() else None
        if origin is not None:
            return "float" if self._runtime.asks_for_int8(origin) else "int8"
        return precision(node.op_type, kernel)

    def others(self) -> list[str]:
        found: list[str] = self._runtime.broken_pairs(self._source)
        return found


def _scope(node: ir.Node) -> str:
    """Returns the module path in an operator's name; "" if it has none."""
    return str(node.name or "").rpartition("/")[0]


def _root(value: ir.Value | None) -> ir.Value | None:
    """Walks up from `value` through shape operators and DequantizeLinear, and returns the value where this ends."""
    for node in back(value):
        if node.op_type != "DequantizeLinear" and node.op_type not in shape_ops():
            break
        value = node.inputs[0]
    return value


def _runtime_dequantize(graph: ir.Graph) -> Iterable[RuntimeDequantize]:
    """Yields every constant that a DequantizeLinear of the optimized graph turns into float on each run."""
    for node in graph:
        source = operand(node, 0)
        tensor = stored(source) if node.op_type == "DequantizeLinear" else None
        if source is None or tensor is None:
            continue
        reader, value = next(iter(readers_past_shapes(node.outputs[0])), (None, None))
        matrix = reader is not None and reader.op_type in matrix_ops()
        is_bias = matrix and reader is not None and operand(reader, 2) is value
        kind = "bias" if is_bias else "weight" if matrix else "constant"
        feeds = str(reader.name) if reader is not None else "output"
        yield RuntimeDequantize(str(source.name), kind, 4 * tensor.size, feeds)


def readers_past_shapes(value: ir.Value) -> list[tuple[ir.Node, ir.Value]]:
    """Returns the operators that read `value`, also through shape operators, with the values they read."""
    found = []
    for reader in value.consumers():
        if reader.op_type in shape_ops():
            found += readers_past_shapes(reader.outputs[0])
        else:
            found.append((reader, value))
    return found


def _line(entry: NodeAudit, dequantized: Sequence[RuntimeDequantize]) -> str:
    size = sum(item.bytes for item in dequantized if item.feeds == entry.name and item.kind == "weight")
    tail = f"; its weight ({_size(size)}) is dequantized on every run" if size else ""
    return f"{entry.precision} {entry.op} '{entry.source or entry.name}': {entry.reason}{tail}"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _dequantize_lines(dequantized: Sequence[RuntimeDequantize], explained: Collection[str]) -> list[str]:
    """Returns lines for dequantized weights and large constants, except those of `explained` operators."""
    return [
        f"{item.kind} '{item.name}' ({_size(item.bytes)}) is dequantized on every run for '{item.feeds}'"
        for item in dequantized
        if item.feeds not in explained and (item.kind == "weight" or item.bytes >= 4 * _LARGE_CONSTANT)
    ]
