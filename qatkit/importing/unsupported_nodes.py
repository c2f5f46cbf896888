"""Finds the nodes of a file that have no PyTorch equivalent, and why. "Values" are those of the model's inputs.

unknown operators                     operators that are not in the table, including contrib and custom ones
Loop, Scan, a computed If             what runs, or how often, depends on values
NonZero, NonMaxSuppression, Unique    the size of the output depends on values
Reshape, Slice, TopK, ...             with a size, an axis or a count that is computed from values
strings, sequences, optional values   PyTorch has no such tensors
readers of a tensor whose size        unless a recorded graph can run them for any size (a Conv, an activation)
depends on values
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from qatkit.export.rewrite import subgraphs
from qatkit.importing.island_graph import STANDARD, no_tensors, read_by, takes_any_size
from qatkit.importing.operators.table import Array, known_places

_MEASURES = ("Shape", "Size")
_LOOPS = ("Loop", "Scan", "SequenceMap")
_SIZED_BY_VALUES = ("NonZero", "NonMaxSuppression", "Unique", "Compress", "StringSplit")
# Operators of the domain com.microsoft whose output sizes depend on values.
_SIZED_ELSEWHERE = ("Tokenizer", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")
# What a value depends on: nothing, shapes of the inputs, values of the inputs.
_CONSTANT, _SIZES, _VALUES = range(3)


class UnsupportedNodes:
    """The nodes without a PyTorch equivalent, in a graph and in the branches of Ifs with an equivalent.

    Args:
        graph: the graph, with shapes inferred.
        fixed: values of inputs that are constants.
        unsupported: the reasons, found so far, why nodes have no PyTorch equivalent, by first output of the node.

    Attributes:
        why: the reasons why nodes have no PyTorch equivalent, as clauses, by node.
    """

    def __init__(self, graph: ir.Graph, fixed: Mapping[str, Array], unsupported: Mapping[str, str]) -> None:
        self.why: dict[ir.Node, str] = {}
        self._unsupported = unsupported
        self._depends: dict[ir.Value, int] = {}
        self._open: set[ir.Value] = set()  # values whose size depends on values
        self._others = no_tensors(graph)
        for value in graph.inputs:
            self._depends[value] = _CONSTANT if value.name in fixed else _VALUES
        shapes = [value.shape for value in graph.inputs if value.shape is not None]
        self._symbols = {size.value for shape in shapes for size in shape if isinstance(size, ir.SymbolicDim)}

    def depends_on_values(self, value: ir.Value | None) -> bool:
        """Returns whether a value depends on values of the inputs, not only on their shapes."""
        return self._on(value) == _VALUES

    def is_computed(self, node: ir.Node) -> bool:
        """Returns whether an output of a node depends on values of the inputs."""
        return any(self.depends_on_values(value) for value in node.outputs)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Records that `new` has the values of `old`."""
        self._depends[new] = self._on(old)

    def is_tensor(self, value: ir.Value) -> bool:
        """Returns whether a value is a tensor of numbers, as far as its type is known."""
        kind = value.type
        plain = kind is None or (isinstance(kind, ir.TensorType) and kind.dtype != ir.DataType.STRING)
        return plain and value not in self._others

    def judge(self, graph: ir.Graph) -> None:
        """Finds the nodes without a PyTorch equivalent, in a graph and in the branches of Ifs with an equivalent."""
        for node in graph:
            reads = read_by(node)
            depends = max((self._on(value) for value in reads), default=_CONSTANT)
            if node.op_type in _MEASURES and node.domain in STANDARD and reads[0] not in self._open:
                depends = min(depends, _SIZES)
            reason = self._reason(node, depends)
            if reason:
                self.why[node] = reason
                depends = depends and _VALUES
                opened = depends == _VALUES and self._sizes_depend(node)
            elif node.op_type == "If":
                branches = subgraphs(node)
                for branch in branches:
                    self.judge(branch)
                results = [value for branch in branches for value in branch.outputs]
                depends = max([self._on(node.inputs[0]), *map(self._on, results)])
                opened = any(value in self._open for value in results)
            else:
                opened = any(value in self._open for value in reads)
            for value in node.outputs:
                self._depends[value] = depends
                if opened and not self._is_closed(value):
                    self._open.add(value)

    def _on(self, value: ir.Value | None) -> int:
        """Returns what a value depends on: nothing, shapes or values of the inputs."""
        return _CONSTANT if value is None else self._depends.get(value, _CONSTANT)

    def _reason(self, node: ir.Node, depends: int) -> str:
        first = next((str(value.name) for value in node.outputs if value.name), "")
        if first in self._unsupported:
            return self._unsupported[first]
        standard = node.domain in STANDARD
        if standard and node.op_type in _LOOPS:
            return f"{node.op_type} has no PyTorch equivalent"
        if standard and node.op_type == "If" and self._on(node.inputs[0]) == _VALUES:
            return "its condition depends on values of the inputs"
        if not all(self.is_tensor(value) for value in (*node.inputs, *node.outputs) if value is not None):
            return "it has strings, sequences or optional values, for which PyTorch has no type"
        if depends != _VALUES:
            return ""
        if standard and node.op_type in _SIZED_BY_VALUES:
            return "the size of its output depends on values of the inputs"
        for place in known_places(node.op_type) if standard else ():
            if place < len(node.inputs) and self._on(node.inputs[place]) == _VALUES:
                return f"its input {place} depends on values of the inputs, but PyTorch needs a fixed number there"
        if any(value in self._open for value in node.inputs) and not takes_any_size(node):
            return "the size of its input depends on values of the inputs"
        return ""

    def _sizes_depend(self, node: ir.Node) -> bool:
        """Returns whether output sizes of a region's node may depend on values; False for unknown operators."""
        if any(value in self._open for value in read_by(node)):
            return True
        if node.domain not in STANDARD:
            return node.op_type in _SIZED_ELSEWHERE
        if node.op_type in (*_LOOPS, "If", *_SIZED_BY_VALUES) or "stopwords" in node.attributes:
            return True
        if any(v in self._others for v in node.inputs if v is not None):
            return True
        places = known_places(node.op_type)
        return any(self._on(v) == _VALUES for p, v in enumerate(node.inputs) if p in places)

    def _is_closed(self, value: ir.Value) -> bool:
        """Returns whether shape inference knows all sizes of a value, as numbers or as sizes of the inputs."""
        sizes = value.shape
        return sizes is not None and all(isinstance(s, int) or s.value in self._symbols for s in sizes)
