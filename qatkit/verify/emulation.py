"""A file as a processor without VNNI runs it: what can saturate is emulated, ONNX Runtime runs the rest.

    optimized graph ─ cut before and behind each operator that some input makes saturate ─> stretches
    stretch of nodes ─ one ONNX Runtime session        operator ─ qatkit.verify.int8_kernels

The optimized graph is that of level EXTENDED: its integer operators are what runs, and level ALL changes the layout
in memory alone. Operators whose weights rule saturation out stay in their stretch, whose results are exact on any
processor; on one without VNNI too, since they can't saturate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from qatkit.verify.audit import Origin
from qatkit.verify.graph_view import constant, matrix_ops, read_model, weight_of
from qatkit.verify.int8_kernels import Int8Kernel, int8_kernel
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.session import fixed_batch, in_its_batches, integer_io, open_session

# Told of an operator that can saturate, and of its input.
Observer = Callable[[Int8Kernel, Array], None]
_PRECISE = "session.x64quantprecision"  # ONNX Runtime then multiplies uint8 x uint8, which never saturates
# Multiply uint8 by int8 too, with activations that are quantized as they come, among others. Weights of 7 bits can't
# saturate in whatever order they are paired.
_OTHERS = ("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulInteger", "QAttention")
_SEVEN_BITS = 64


@dataclass
class _Stretch:
    """Nodes that run in one session, which is opened when the types of what it reads are known.

    Attributes:
        nodes: in the order of the graph.
        reads, makes: names of tensors, from others and for others.
    """

    nodes: list[ir.Node]
    reads: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)
    session: ort.InferenceSession | None = None


class Emulation:
    """A quantized file in two forms: exact, and as a processor without VNNI computes it.

    Attributes:
        kernels: every uint8 x int8 operator with constant weights, in the order of the graph.
        others: names of further operators that multiply int8 weights and are not emulated, unless these have 7 bits.
    """

    def __init__(self, path: Path, *, options: Mapping[str, str], threads: int) -> None:
        """Reads and cuts the file.

        Args:
            path: an ONNX file.
            options: session config entries of the backend.
            threads: intra-op threads.

        Raises:
            ConfigError: ONNX Runtime refuses the file.
        """
        self._threads = threads
        self._file = open_session(path, threads=threads, optimize=False, options=options)
        self._ends = integer_io(self._file)
        with tempfile.TemporaryDirectory() as folder:
            saved, level = Path(folder) / "optimized.onnx", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            open_session(path, threads=threads, optimize=level, options=options, optimized_path=saved)
            self._model = read_model(saved)
        origin, graph = Origin(read_model(path).graph), self._model.graph
        found = {} if options.get(_PRECISE) == "1" else {n: int8_kernel(n, _name(origin, n)) for n in graph}
        self._by_node = {node: kernel for node, kernel in found.items() if kernel is not None}
        self.kernels = list(self._by_node.values())
        self.others = [_name(origin, node) for node in graph if node.op_type in _OTHERS and _wide(node)]
        self._parts = self._cut()
        self._done = self._last_read()

    def outputs(
        self, batch: Any, saturate: Collection[str] = (), observe: Observer | None = None
    ) -> tuple[Array, ...]:
        """All outputs for a batch (`qatkit_verify.feeds`).

        Args:
            batch: as the file takes it.
            saturate: names of the kernels that compute as without VNNI; the others are exact.
            observe: told of each kernel that can saturate, in turn.
        """
        given, fixed = feeds(self._file, batch, self._ends), fixed_batch(self._file)

        def run(fed: Mapping[str, Array]) -> tuple[Array, ...]:
            return self._walk(fed, saturate, observe)

        found = in_its_batches(run, given, fixed)
        return found if self._ends is None else tuple(map(self._ends.logits, found))

    def _walk(
        self, given: Mapping[str, Array], saturate: Collection[str], observe: Observer | None
    ) -> tuple[Array, ...]:
        """Part after part, with all tensors between them by name."""
        known = dict(given)
        for index, part in enumerate(self._parts):
            if isinstance(part, _Stretch):
                session = self._session(part, known)
                made = session.run(part.makes, {name: known[name] for name in part.reads})
                known.update(zip(part.makes, map(np.asarray, made), strict=True))
            else:
                kernel, x = self._by_node[part], known[_read(part)[0]]
                if observe is not None:
                    observe(kernel, x)
                known[str(part.outputs[0].name)] = kernel(x, saturate=kernel.name in saturate)
            for name in self._done[index]:
                known.pop(name, None)
        return tuple(known[str(value.name)] for value in self._model.graph.outputs)

    def _cut(self) -> list[_Stretch | ir.Node]:
        """Stretches and operators that can saturate, in the order in which they run."""
        parts: list[_Stretch | ir.Node] = []
        for node in self._model.graph:
            if node in self._by_node and self._by_node[node].can_saturate:
                parts.append(node)
            elif parts and isinstance(parts[-1], _Stretch):
                parts[-1].nodes.append(node)
            else:
                parts.append(_Stretch([node]))
        stretches = [part for part in parts if isinstance(part, _Stretch)]
        for part in stretches:
            inside = set(part.nodes)
            own = {str(value.name) for node in part.nodes for value in node.outputs}
            read = (name for node in part.nodes for name in _read(node) if name not in own)
            part.reads = list(dict.fromkeys(read))
            part.makes = [
                str(value.name)
                for node in part.nodes
                for value in node.outputs
                if value.is_graph_output() or any(reader not in inside for reader in value.consumers())
            ]
        return parts

    def _last_read(self) -> list[list[str]]:
        """Behind each part, the tensors that nobody reads any more."""
        kept = {str(value.name) for value in self._model.graph.outputs}
        last: dict[str, int] = {}
        for index, part in enumerate(self._parts):
            last.update(dict.fromkeys(part.reads if isinstance(part, _Stretch) else _read(part), index))
        found: list[list[str]] = [[] for _ in self._parts]
        for name in last.keys() - kept:
            found[last[name]].append(name)
        return found

    def _session(self, part: _Stretch, known: Mapping[str, Array]) -> ort.InferenceSession:
        if part.session is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "stretch.onnx"
                path.write_bytes(self._proto(part, known).SerializeToString())
                part.session = open_session(path, threads=self._threads, optimize=False)
        return part.session

    def _proto(self, part: _Stretch, known: Mapping[str, Array]) -> onnx.ModelProto:
        """The file of a stretch; ONNX Runtime finds the types of what it makes."""
        constants = {str(v.name): v for n in part.nodes for v in n.inputs if v and v.is_initializer()}
        types = {name: onnx.helper.np_dtype_to_tensor_dtype(known[name].dtype) for name in part.reads}
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in part.nodes],
            "stretch",
            [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
            [onnx.ValueInfoProto(name=name) for name in part.makes],
            [_tensor(name, value) for name, value in constants.items()],
        )
        opsets = [onnx.helper.make_opsetid(*pair) for pair in self._model.opset_imports.items()]
        functions = [ir.to_proto(function) for function in self._model.functions.values()]
        return onnx.helper.make_model(
            graph, opset_imports=opsets, functions=functions, ir_version=self._model.ir_version
        )


def _name(origin: Origin, node: ir.Node) -> str:
    source = origin.find(node, weight_of(node)) if node.op_type in matrix_ops() else None
    return str(node.name if source is None else source.name)


def _wide(node: ir.Node) -> bool:
    """Whether a constant int8 operand needs all 8 bits."""
    found = (constant(value) for value in node.inputs)
    return any(
        v is not None and v.dtype == np.int8 and (np.abs(v.astype(int)) > _SEVEN_BITS).any() for v in found
    )


def _read(node: ir.Node) -> list[str]:
    """The tensors that a node reads, but for constants."""
    return [str(value.name) for value in node.inputs if value is not None and not value.is_initializer()]


def _tensor(name: str, value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None, "an initializer has a value"
    proto = ir.to_proto(value.const_value)
    proto.name = name
    return proto
