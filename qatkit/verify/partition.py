"""Cuts an optimized graph into parts that run one after the other, some here and the rest in ONNX Runtime.

    stretch   nodes that run in one ONNX Runtime session
    kernel    an operator that can saturate (`qatkit.verify.int8_kernels`)
    branches  an If whose branches contain such operators; each branch is cut in the same way

Between the parts, tensors stay as ONNX Runtime produced them, so sequences and types that NumPy lacks work
too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from qatkit.verify.graph_view import constant
from qatkit.verify.int8_kernels import Array, Int8Kernel
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import open_session

# A function that is called with an operator that can saturate, and its input.
Observer = Callable[[Int8Kernel, Array], None]
Known = dict[str, ort.OrtValue]


@dataclass
class Stretch:
    """Nodes that run in one session, which is opened once the types of its inputs are known.

    Attributes:
        nodes: the nodes in graph order.
        reads, makes: the names of tensors that it reads from other parts, and that it produces for other parts.
    """

    nodes: list[ir.Node]
    reads: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)
    session: ort.InferenceSession | None = None


@dataclass
class Branches:
    """An If, and the parts that run if its condition is true and if it is false."""

    node: ir.Node
    branches: tuple[Parts, Parts]


@dataclass(frozen=True)
class Walk:
    """The settings of a run.

    Attributes:
        saturate: the names of the kernels that saturate in this run.
        observe: a function that is called with each kernel that can saturate, and its input; None for none.
    """

    saturate: Collection[str]
    observe: Observer | None


class Parts:
    """A graph, or a branch of an If, that has been cut into parts."""

    def __init__(
        self, graph: ir.Graph, kernels: Mapping[ir.Node, Int8Kernel], model: ir.Model, threads: int
    ) -> None:
        """Cuts before and after each node in `kernels`."""
        self._graph, self._kernels, self._model, self._threads = graph, kernels, model, threads
        self._parts = self._cut()
        self._done = self._last_read()

    def run(self, known: Known, walk: Walk) -> list[ort.OrtValue]:
        """Runs part after part and returns the outputs of the graph.

        `known` has the values of the inputs and, for a branch, of all tensors that it may capture.

        Raises:
            ConfigError: ONNX Runtime cannot run a part.
        """
        known = dict(known)
        for part, done in zip(self._parts, self._done, strict=True):
            if isinstance(part, Stretch):
                known.update(self._stretch(part, known))
            elif isinstance(part, Branches):
                condition = part.node.inputs[0]
                assert condition is not None, "an If has one"
                made = part.branches[int(not _value(condition, known).item())].run(known, walk)
                known.update((str(v.name), one) for v, one in zip(part.node.outputs, made, strict=True))
            else:
                known[str(part.outputs[0].name)] = self._kernel(part, known, walk)
            for name in done:
                known.pop(name, None)
        return [_ort_value(value, known) for value in self._graph.outputs]

    def _kernel(self, node: ir.Node, known: Known, walk: Walk) -> ort.OrtValue:
        def read(value: ir.Value | None) -> Array | None:
            return None if value is None else _value(value, known)

        kernel, x = self._kernels[node].bound(read)
        if walk.observe is not None:
            walk.observe(kernel, x)
        made = kernel(x, saturate=kernel.name in walk.saturate)
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(made))

    def _cut(self) -> list[Stretch | Branches | ir.Node]:
        parts: list[Stretch | Branches | ir.Node] = []
        for node in self._graph:
            if node in self._kernels:
                parts.append(node)
            elif node.op_type == "If" and any(inner in self._kernels for inner in _inside(node)):
                sides = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
                then, other = (Parts(one, self._kernels, self._model, self._threads) for one in sides)
                parts.append(Branches(node, (then, other)))
            elif parts and isinstance(parts[-1], Stretch):
                parts[-1].nodes.append(node)
            else:
                parts.append(Stretch([node]))
        ends = {value.name for value in self._graph.outputs}
        for part in parts:
            if isinstance(part, Stretch):
                inside = set(part.nodes)
                own = {str(value.name) for node in part.nodes for value in node.outputs}
                part.reads = [name for name in dict.fromkeys(_read(part.nodes)) if name not in own]
                part.makes = [
                    str(value.name)
                    for node in part.nodes
                    for value in node.outputs
                    if value.name in ends or any(reader not in inside for reader in value.consumers())
                ]
        return parts

    def _last_read(self) -> list[list[str]]:
        """Returns the names of the tensors that each part is the last to read, without the graph's outputs."""
        kept = {str(value.name) for value in self._graph.outputs}
        last: dict[str, int] = {}
        for index, part in enumerate(self._parts):
            nodes = (
                part.nodes
                if isinstance(part, Stretch)
                else [part.node if isinstance(part, Branches) else part]
            )
            last.update(dict.fromkeys(_read(nodes), index))
        found: list[list[str]] = [[] for _ in self._parts]
        for name in last.keys() - kept:
            found[last[name]].append(name)
        return found

    def _stretch(self, part: Stretch, known: Known) -> Known:
        try:
            if part.session is None:
                part.session = self._session(part, known)
            made = part.session.run_with_ort_values(part.makes, {name: known[name] for name in part.reads})
        except (
            Exception
        ) as error:  # ONNX Runtime raises exceptions of many types for what it does not support
            ends = " to ".join(dict.fromkeys(f"'{_called(part.nodes[i])}'" for i in (0, -1)))
            reason = " ".join(str(getattr(error, "problem", error)).split())
            raise ConfigError(
                "verify.target_isa", "avx2", reason=f"ONNX Runtime cannot run {ends} separately ({reason})"
            ) from error
        return dict(zip(part.makes, made, strict=True))

    def _session(self, part: Stretch, known: Known) -> ort.InferenceSession:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "stretch.onnx"
            path.write_bytes(self._proto(part, known).SerializeToString())
            return open_session(path, threads=self._threads, optimize=False)

    def _proto(self, part: Stretch, known: Known) -> onnx.ModelProto:
        """Returns the model of a stretch; ONNX Runtime infers the types of its outputs."""
        constants = {str(v.name): v for v in _operands(part.nodes) if v.is_initializer()}
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in part.nodes],
            "stretch",
            [onnx.helper.make_value_info(name, _type(known[name].data_type())) for name in part.reads],
            [onnx.ValueInfoProto(name=name) for name in part.makes],
            [_tensor(name, value) for name, value in constants.items()],
        )
        opsets = [onnx.helper.make_opsetid(*pair) for pair in self._model.opset_imports.items()]
        functions = [ir.to_proto(function) for function in self._model.functions.values()]
        return onnx.helper.make_model(
            graph, opset_imports=opsets, functions=functions, ir_version=self._model.ir_version
        )


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Yields the subgraphs that a node runs."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    """Yields all nodes in the subgraphs of a node, at any depth."""
    for graph in bodies(node):
        for inner in graph:
            yield inner
            yield from _inside(inner)


def _operands(nodes: Collection[ir.Node]) -> Iterator[ir.Value]:
    """Yields the tensors that nodes read, including those that their subgraphs capture."""
    for node in nodes:
        yield from (value for value in node.inputs if value is not None)
        for graph in bodies(node):
            own = {*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)}
            yield from (value for value in (*_operands(list(graph)), *graph.outputs) if value not in own)


def _read(nodes: Collection[ir.Node]) -> list[str]:
    """Returns the names of the tensors that nodes read, except for constants."""
    return [str(value.name) for value in _operands(nodes) if not value.is_initializer()]


def _value(value: ir.Value, known: Known) -> Array:
    """Returns the array of a value of the graph, which is constant or already computed."""
    found = constant(value)
    return np.asarray(known[str(value.name)].numpy()) if found is None else found


def _ort_value(value: ir.Value, known: Known) -> ort.OrtValue:
    if str(value.name) in known:
        return known[str(value.name)]
    found = constant(value)
    assert found is not None, "an output that nothing computes is a constant"
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(found))


def _called(node: ir.Node) -> str:
    return str(node.name or next((value.name for value in node.outputs if value.name), node.op_type))


def _type(name: str) -> onnx.TypeProto:
    """Returns the type that ONNX Runtime names, such as "tensor(float)" or "seq(tensor(int64))"."""
    kind, _, inner = name.removesuffix(")").partition("(")
    if kind == "seq":
        return onnx.helper.make_sequence_type_proto(_type(inner))
    if kind == "optional":
        return onnx.helper.make_optional_type_proto(_type(inner))
    return onnx.helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(inner.upper()), None)


def _tensor(name: str, value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None, "an initializer has a value"
    proto = ir.to_proto(value.const_value)
    proto.name = name
    return proto
