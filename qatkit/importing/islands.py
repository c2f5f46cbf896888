"""Groups the nodes of a file that have no PyTorch equivalent (`unsupported_nodes`) into regions.

Such nodes form one region if they read each other's results without a PyTorch node in between. Only tensors of
numbers can cross the border of a region. If two such nodes exchange other values (strings, sequences), the nodes
between them therefore belong to the region too. A region also contains copies of the nodes that compute the
constants and sizes that it reads. In the graph, each region becomes one node of the domain `DOMAIN`, and its nodes
are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from qatkit.export.rewrite import subgraphs
from qatkit.importing.island import Border, Region, serialized
from qatkit.importing.island_graph import (
    STANDARD,
    holders,
    inside,
    one_image,
    operator_name,
    output_dtypes,
    reached,
    read_by,
    splits,
)
from qatkit.importing.operators.table import Array
from qatkit.importing.read import name_of, read
from qatkit.importing.unsupported_nodes import UnsupportedNodes
from qatkit_verify.errors import ConfigError

DOMAIN = "qatkit.island"
RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
)  # fmt: skip


def cut_islands(
    file: Path, model: ir.Model, fixed: Mapping[str, Array], unsupported: Mapping[str, str], any_batch: bool
) -> list[Region]:
    """Replaces each region of a model by one node, whose attribute is the index of the region in the result.

    Args:
        file: the file, for messages.
        model: the model with shapes inferred; changed in place.
        fixed: values of inputs that are constants.
        unsupported: the reasons, found so far, why nodes have no PyTorch equivalent, by first output of the node.
        any_batch: whether the module accepts several images per run although the file accepts one.

    Returns:
        The regions.

    Raises:
        ConfigError: an input of the file or an output of a region is not a tensor of numbers, a region draws random
            numbers or exceeds 2 GB, or the type of one of its inputs is unknown.
    """
    cutter = _Cutter(file, model, fixed, unsupported, any_batch)
    cutter.found.judge(model.graph)
    cutter.cut(model.graph)
    return cutter.regions


class _Cutter:
    def __init__(
        self,
        file: Path,
        model: ir.Model,
        fixed: Mapping[str, Array],
        unsupported: Mapping[str, str],
        any_batch: bool,
    ) -> None:
        self.file, self.model, self.fixed = file, model, fixed
        self.any_batch = any_batch
        self.regions: list[Region] = []
        self.found = UnsupportedNodes(model.graph, fixed, unsupported)
        self.why = self.found.why
        self.dtypes: dict[str, ir.DataType] | None = None
        self.replaced: dict[ir.Value, ir.Value] = {}
        for value in model.graph.inputs:
            if value.name not in fixed and not self.found.is_tensor(value):
                raise self._refused(f"input '{value.name}' is not a tensor of numbers")

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError("onnx", self.file, reason=reason)

    def cut(self, graph: ir.Graph) -> None:
        """Replaces the regions of a graph, and of the branches of each If that is not in a region itself."""
        groups = self._groups(graph)
        found = [(nodes, *self._region(graph, nodes)) for nodes in groups]
        for nodes, region, inputs, outputs in found:
            if outputs:
                self._replace(graph, nodes, region, inputs, outputs)
        for node in reversed(list(graph)):  # constants that only regions read
            unread = not any(value.uses() or value.is_graph_output() for value in node.outputs)
            if node in self.why and unread:
                graph.remove(node, safe=True)
        graph.sort()
        for node in graph:
            if node.op_type == "If" and node.domain in STANDARD:
                for branch in subgraphs(node):
                    self.cut(branch)

    def _groups(self, graph: ir.Graph) -> list[list[ir.Node]]:
        """Returns the regions of a graph: nodes without a PyTorch equivalent that read each other's results.

        No path leads from a region through a PyTorch node back into the same region.
        """
        while True:
            stage = self._stages(graph)
            between = self._between(graph, stage)
            if not between:
                break
            reason = "it is between nodes with strings, sequences or optional values"
            self.why |= dict.fromkeys(between, reason)
        groups: dict[ir.Node, list[ir.Node]] = {}
        for node in graph:
            if node not in self.why:
                continue
            group = [node]
            for maker in self._makers(node, graph):
                if maker in self.why and stage[maker] == stage[node]:
                    other = groups[maker]
                    if other is not group:
                        group = [*other, *group]
                        groups |= dict.fromkeys(group, group)
            groups |= dict.fromkeys(group, group)
        order = {node: i for i, node in enumerate(graph)}
        distinct = {id(group): sorted(group, key=order.__getitem__) for group in groups.values()}
        return list(distinct.values())

    def _makers(self, node: ir.Node, graph: ir.Graph) -> list[ir.Node]:
        """Returns the nodes of the graph whose results a node reads.

        For a node of a region, nodes that compute only sizes or constants are left out, since the region copies them.
        """
        values = (
            self._needed([node])[0] if node in self.why and self.found.is_computed(node) else read_by(node)
        )
        found = [value.producer() for value in values]
        return [maker for maker in found if maker is not None and maker.graph is graph]

    def _stages(self, graph: ir.Graph) -> dict[ir.Node, int]:
        """Returns for each node the largest number of changes from a region to PyTorch on a path to it.

        There is no PyTorch node between region nodes of the same stage.
        """
        stage: dict[ir.Node, int] = {}
        for node in graph:
            steps = [
                stage[maker] + (maker in self.why and node not in self.why and self.found.is_computed(maker))
                for maker in self._makers(node, graph)
            ]
            stage[node] = max(steps, default=0)
        return stage

    def _between(self, graph: ir.Graph, stage: Mapping[ir.Node, int]) -> set[ir.Node]:
        """Returns the PyTorch nodes between two region nodes that exchange a value that cannot leave a region."""
        found: set[ir.Node] = set()
        for node in graph:
            for value in read_by(node) if node in self.why and self.found.is_computed(node) else ():
                maker = value.producer()
                if (
                    self.found.is_tensor(value)
                    or maker is None
                    or maker not in stage
                    or stage[maker] == stage[node]
                ):
                    continue
                after, before = reached(graph, maker, forward=True), reached(graph, node, forward=False)
                found |= {one for one in after & before if one not in self.why}
        return found

    def _needed(self, nodes: Sequence[ir.Node]) -> tuple[list[ir.Value], list[ir.Node], dict[str, ir.Value]]:
        """Returns what nodes read from outside: values, nodes that compute sizes and constants, and initializers."""
        made = {value for node in nodes for value in node.outputs}
        border: dict[ir.Value, None] = {}
        copied: dict[ir.Node, None] = {}
        constants: dict[str, ir.Value] = {}

        def need(value: ir.Value) -> None:
            maker = value.producer()
            if value in made:
                return
            if self.found.depends_on_values(value):
                border[value] = None
            elif maker is None:
                constants[str(value.name)] = value
            elif maker not in copied:
                for one in read_by(maker):
                    need(one)
                copied[maker] = None

        for node in nodes:
            for value in read_by(node):
                need(value)
        return list(border), list(copied), constants

    def _region(
        self, graph: ir.Graph, nodes: Sequence[ir.Node]
    ) -> tuple[Region | None, list[ir.Value], list[ir.Value]]:
        owner = {inner: node for node in graph for inner in (node, *inside(node))}
        inputs, copied, constants = self._needed(nodes)
        members = set(nodes)
        outputs = [
            value
            for node in nodes
            for value in node.outputs
            if value.is_graph_output()
            or any(self._leaves(node, owner.get(user), members) for user, _ in value.uses())
        ]
        if not outputs:
            return None, [], []
        for value in outputs:
            if not self.found.is_tensor(value):
                raise self._refused(f"output '{value.name}' is not a tensor of numbers")
        for inner in (one for node in nodes for one in (node, *inside(node))):
            if inner.op_type in RANDOM:
                reason = f"{inner.op_type} draws random numbers, so no two runs would be equal"
                raise self._refused(f"node '{name_of(inner)}': {reason}")
        order = {node: i for i, node in enumerate(graph)}
        ordered = sorted((*copied, *nodes), key=lambda node: order.get(node, -1))
        borders = tuple(self._border(value) for value in inputs)
        results = tuple(Border(str(value.name), None, one_image(value)) for value in outputs)
        region = Region(
            name_of(nodes[0]),
            self.why[nodes[0]],
            tuple(dict.fromkeys(operator_name(node) for node in nodes)),
            tuple(next(str(value.name) for value in node.outputs if value.name) for node in nodes),
            borders,
            results,
            self._serialized(ordered, borders, inputs, results, constants),
            self.any_batch and splits(inputs, outputs),
            holders(nodes),
        )
        return region, inputs, outputs

    def _leaves(self, maker: ir.Node, reader: ir.Node | None, members: set[ir.Node]) -> bool:
        """Returns whether `reader` needs a result of `maker` as an output of the region `members`.

        Other regions need no constants and sizes, since they copy the nodes that compute them.
        """
        copied = reader in self.why and not self.found.is_computed(maker)
        return reader is not None and reader not in members and not copied

    def _border(self, value: ir.Value) -> Border:
        dtype = value.dtype
        if dtype is None:
            dtype = self._found_dtypes().get(str(value.name))
        if dtype is None:
            raise self._refused(f"the type of '{value.name}' is not known")
        return Border(str(value.name), np.dtype(dtype.numpy()), one_image(value))

    def _found_dtypes(self) -> dict[str, ir.DataType]:
        """Returns the types of values that onnx cannot infer, by name, as ONNX Runtime infers them."""
        if self.dtypes is None:
            nodes = self.model.graph
            names = {value.name for node in nodes for value in node.outputs if value.dtype is None}
            whole = read(self.file)
            wanted = [value for node in whole.graph for value in node.outputs if value.name in names]
            whole.graph.outputs[:] = wanted
            self.dtypes = output_dtypes(whole)
        return self.dtypes

    def _serialized(
        self,
        nodes: Sequence[ir.Node],
        borders: Sequence[Border],
        inputs: Sequence[ir.Value],
        outputs: Sequence[Border],
        constants: Mapping[str, ir.Value],
    ) -> bytes:
        given = [
            (border, None if value.shape is None else len(value.shape))
            for border, value in zip(borders, inputs, strict=True)
        ]
        initializers = [self._initializer(name, value) for name, value in constants.items()]
        try:
            return serialized(self.model, nodes, given, [one.name for one in outputs], initializers)
        except ValueError as error:
            reason = f"node '{name_of(nodes[-1])}' and its constants exceed 2 GB, the most that ONNX Runtime can load"
            raise self._refused(reason) from error

    def _initializer(self, name: str, value: ir.Value) -> onnx.TensorProto:
        if name in self.fixed:
            return numpy_helper.from_array(self.fixed[name], name)
        if value.const_value is None:
            raise self._refused(f"the constant '{name}' has no value in the file")
        found = ir.to_proto(value.const_value)
        found.name = name
        return found

    def _replace(
        self,
        graph: ir.Graph,
        nodes: Sequence[ir.Node],
        region: Region | None,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
    ) -> None:
        assert region is not None
        index = [ir.AttrInt64("index", len(self.regions))]
        self.regions.append(region)
        given = [self.replaced.get(value, value) for value in inputs]
        new = ir.Node(DOMAIN, "Island", given, index, name=region.name, num_outputs=len(outputs))
        graph.insert_before(nodes[0], new)
        for old, value in zip(outputs, new.outputs, strict=True):
            value.shape, value.type, value.name = old.shape, old.type, old.name
            self.found.replace(old, value)
            self.replaced[old] = value
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        graph.remove(list(nodes), safe=True)
