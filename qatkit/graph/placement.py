"""Placement: decides which tensors of the graph are quantized; `prepare` inserts their quantizers.

Three facts are found for each node:

    int8(n)      n's output is an 8-bit tensor: a Conv's always, an Add's when all of its inputs are, a
                 reshape's when its input is
    demanded(n)  some 8-bit Conv, Linear or MatMul reads n (for some backends also: an Add after a Conv, as its
                 shortcut)
    a point      where a FakeQuantize is inserted: after int8 nodes with a range of their own, and after demanded
                 nodes that are not int8 (then only the readers that demand it read the quantized tensor, and a
                 parallel residual stream stays float); it moves up through operators that only move values

The point after a ReLU absorbs it if nothing else reads the ReLU's input and the range can start at zero, which
requires a zero point. A backend may compute activations together with the operator before them (`Backend.fuses`).
Then the activation stays, and the point comes after it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from torch import fx

from qatkit.graph.node_arguments import shape_of
from qatkit.graph.nodes import (
    carries_float,
    facts,
    fused_activation,
    is_float_tensor,
    owner,
    site,
)
from qatkit.graph.operators import operators
from qatkit.quant.backends import Backend, OpRule
from qatkit.quant.fake_quantize import Bounds
from qatkit_verify.errors import ConfigError, did_you_mean

_FLOAT = OpRule("never")


@dataclass
class Point:
    """The position in the graph where a FakeQuantize will be inserted.

    Attributes:
        node: the node whose output is quantized.
        readers: the nodes that read the quantized tensor; other readers keep the float tensor.
        absorbed: the ReLU or ReLU6 after `node` that the quantization to `bounds` replaces; None if there is
            none.
        bounds: the lower and the upper end of the range; None for an end that is not known.
        fixed: whether `bounds` is the whole range, so that nothing has to be observed.
        axis: the axis of the tensor over which the readers sum products; blocks of a number format lie along it.
        further: whether an earlier point quantizes the same tensor along another axis.
    """

    node: fx.Node
    readers: list[fx.Node]
    absorbed: fx.Node | None = None
    bounds: Bounds = (None, None)
    fixed: bool = False
    axis: int = -1
    further: bool = False

    @property
    def tensor(self) -> str:
        """The name of the quantized tensor in ranges and reports."""
        if not self.further:
            return site(self.node)
        return f"{site(self.node)}_along{self.axis % len(shape_of(self.node) or (1,))}"

    @property
    def name(self) -> str:
        return f"{self.tensor}_quant"


@dataclass
class Placement:
    """The result of the placement.

    Attributes:
        points: the points in graph order.
        weighted: the Conv and Linear nodes with quantized weights; they run in int8, unless their rule is "weight".
        reasons: (site, reason) of operators that could have been int8 but stay float.
        int8: the nodes whose output is an 8-bit tensor.
    """

    points: list[Point] = field(default_factory=list)
    weighted: list[fx.Node] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    int8: set[fx.Node] = field(default_factory=set)


def place(graph: fx.Graph, backend: Backend, forced_float: Collection[fx.Node]) -> Placement:
    """Decides which tensors of a graph are quantized.

    Args:
        graph: a propagated graph (`trace.propagate`).
        backend: the backend, whose rules decide.
        forced_float: nodes that stay float whatever the rules are.

    Raises:
        ConfigError: the backend has a rule for a class that the table of operators does not know.
    """
    return Placer(graph, backend).place(forced_float)


class Placer:
    """A placer for repeated decisions on one graph; it looks up the records of the nodes only once.

    Raises:
        ConfigError: see `place`.
    """

    def __init__(self, graph: fx.Graph, backend: Backend) -> None:
        known = {record.name for record in operators()}
        if unknown := sorted(backend.rules.keys() - known):
            near = did_you_mean(unknown[0], known)
            reason = f"the backend has a rule for '{unknown[0]}', which is not an operator class{near}"
            raise ConfigError("backend.target", backend.name, reason=reason)
        self.nodes = list(graph.nodes)
        self.backend = backend
        self.facts = {n: facts(n) for n in self.nodes}
        self.constant = constants(graph)
        self.fused = {n: fused_activation(n, backend.fuses) for n in self.nodes}
        self.activations = {name for fused in backend.fuses.values() for name in fused}

    def place(self, forced_float: Collection[fx.Node]) -> Placement:
        """Returns the placement in which the nodes in `forced_float` stay float."""
        self.forced_float = forced_float
        self.int8: dict[fx.Node, bool] = {}
        self.moved: set[fx.Node] = set()
        self.placement = Placement()
        for node in self.nodes:
            self.int8[node] = self._is_int8(node)
        for node in reversed(self.nodes):
            if self._moves_for_demand(node):
                self.moved.add(node)
        for node in self.nodes:
            if self._is_weighted(node):
                self.placement.weighted.append(node)
            point = self._point(node)
            if point is not None:
                self.placement.points += self._along_axes(point)
        self.placement.int8 = {node for node, is_int8 in self.int8.items() if is_int8} | self.moved
        return self.placement

    def rule(self, node: fx.Node) -> OpRule:
        if node in self.forced_float or node in self.constant:
            return _FLOAT
        return self.backend.rules.get(self.facts[node].name, _FLOAT)

    def _is_weighted(self, node: fx.Node) -> bool:
        return self.facts[node].weighted and self.rule(node).when in ("always", "weight")

    def _demands(self, reader: fx.Node, node: fx.Node) -> bool:
        multiplies = self.facts[reader].weighted or self.facts[reader].name == "matmul"
        return (multiplies and self.rule(reader).when == "always") or self._shortcut(reader) is node

    def _shortcut(self, node: fx.Node) -> fx.Node | None:
        """Returns the operand of an Add that is the shortcut around a Conv; None if there is none or it is constant.

        The other operand is a Conv that only the Add reads. If both operands are, the second one is the shortcut.
        """
        inputs = node.all_input_nodes
        if self.rule(node).when != "shortcut" or len(inputs) != 2:
            return None
        beside = [n for n in inputs if not (self.facts[n].name == "conv" and len(n.users) == 1)]
        found = inputs[1] if not beside else beside[0] if len(beside) == 1 else None
        return None if found in self.constant else found

    def _is_int8(self, node: fx.Node) -> bool:
        if not carries_float(node):
            return False
        if node.op == "placeholder":
            return self._leads_to_demand(node)
        rule = self.rule(node)
        if not self.facts[node].keeps_range and self._computes_on(node):
            return False
        if rule.when == "always":
            return rule.output
        inputs = [n for n in node.all_input_nodes if carries_float(n)]
        if self.facts[node].name in self.activations:
            inputs = inputs[:1]  # the other inputs are parameters (the slopes of a PReLU)
        if rule.when not in ("inputs", "output") or not inputs:
            return False
        pair = node.args[:2] if self.facts[node].binary else ()
        if len(pair) > 1 and len(set(inputs)) < 2 and pair[0] is not pair[1]:
            return False  # the other operand is a Python number
        if rule.when == "output":
            return True
        float_inputs = [n for n in inputs if not self.int8[n]]
        if float_inputs and len(float_inputs) < len(inputs):
            inputs_in_float = ", ".join(site(n) for n in float_inputs)
            some = "a float input" if len(float_inputs) == 1 else "float inputs"
            reason = f"{self.facts[node].name} stays float because of {some}: {inputs_in_float}"
            self.placement.reasons.append((site(node), reason))
        return not float_inputs

    def _computes_on(self, node: fx.Node) -> bool:
        """Returns whether `node` is a part of a one-operator module, and a later part computes on its result.

        A quantize/dequantize pair cannot be inserted inside such an operator. If the later parts only move or select
        values, the pair comes after them.
        """
        inside = [user for user in node.users if owner(node) and owner(user) == owner(node)]
        return any(not self.facts[user].keeps_range or self._computes_on(user) for user in inside)

    def _moves_for_demand(self, node: fx.Node) -> bool:
        """Returns whether a `node` that moves values of a float tensor should move bytes instead.

        It should if all of its readers demand 8 bits, unless its input has more values than its output.
        """
        if self.facts[node].values != "moved" or self.int8[node] or self.rule(node) is _FLOAT:
            return False
        before = [n for n in node.all_input_nodes if carries_float(n)]
        return (
            len(before) == 1
            and is_float_tensor(before[0])
            and is_float_tensor(node)
            and before[0] not in self.constant
            and before[0].meta["value"].numel() <= node.meta["value"].numel()
            and all(self._demands(u, node) or u in self.moved for u in node.users)
        )

    def _leads_to_demand(self, node: fx.Node) -> bool:
        return any(
            self._demands(user, node)
            or (
                self.facts[user].keeps_range and self.rule(user) is not _FLOAT and self._leads_to_demand(user)
            )
            for user in node.users
        )

    def _point(self, node: fx.Node) -> Point | None:
        if self.int8[node]:
            if self.facts[node].keeps_range:
                return None
            readers = list(node.users)
        else:
            readers = [u for u in node.users if self._demands(u, node) or u in self.moved]
        if node.op == "placeholder":  # an input that is also an output is not quantized for the output
            readers = [user for user in readers if user.op != "output"]
        if node in self.moved:
            return None
        if not readers or not is_float_tensor(node):
            return None
        if self.int8[node] and len(readers) == 1 and self._absorbs(readers[0], node):
            return None  # the point comes after the ReLU
        if self.int8[node] and (fused := self.fused[node]) is not None and self.int8[fused]:
            return None
        return self._absorbing_point(node, readers)

    def _along_axes(self, point: Point) -> list[Point]:
        """Splits a point into one for each axis that its readers sum over, if the activations have a number format."""
        if self.backend.activation.form is None:
            return [point]
        by_axis: dict[int, list[fx.Node]] = {}
        others = list[fx.Node]()
        for reader in point.readers:
            axes = self._summed(reader, point.node)
            for axis in axes:
                by_axis.setdefault(axis, []).append(reader)
            if not axes:
                others.append(reader)
        by_axis.setdefault(next(iter(by_axis), -1), []).extend(others)
        return [
            replace(point, readers=readers, axis=axis, further=index > 0)
            for index, (axis, readers) in enumerate(by_axis.items())
        ]

    def _summed(self, reader: fx.Node, node: fx.Node) -> list[int]:
        """Returns the axes of `node` over which `reader` sums products; two if `node` is both operands, [] if none."""
        name = self.facts[reader].name
        if name in ("conv", "linear"):
            return [1 if name == "conv" else -1]
        axes = (-1, -min(2, len(shape_of(node) or ()))) if name == "matmul" else ()
        return [axis for operand, axis in zip(reader.args, axes, strict=False) if operand is node]

    def _absorbing_point(self, node: fx.Node, readers: list[fx.Node]) -> Point:
        kind = self.facts[node]
        if kind.activation is not None and len(readers) == len(node.users):
            before = node.all_input_nodes[0]
            if self._absorbs(node, before):
                return Point(before, readers, absorbed=node, bounds=kind.activation)
        if kind.fixed is not None:
            return Point(node, readers, bounds=kind.fixed, fixed=True)
        return Point(node, readers)

    def _absorbs(self, activation: fx.Node, before: fx.Node) -> bool:
        """Returns whether `activation` can be absorbed by the quantization of `before`'s output."""
        if self.facts[activation].activation is None or activation in self.forced_float:
            return False
        if not self.backend.activation.has_zero_point:
            return False
        if len(before.users) != 1 or before.op == "placeholder" or self.facts[before].keeps_range:
            return False
        return self.int8[activation] or any(self._demands(u, activation) for u in activation.users)


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on no input: parameters, buffers and values computed only from these."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
