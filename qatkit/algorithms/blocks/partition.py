"""Partitions the graph into blocks, by the tensors that are alive between its nodes.

The nodes are in execution order. Between two of them some tensors are alive: computed before and read later.
Where only one tensor is alive, the graph can be cut in two (an articulation point of the dataflow): before
and after a residual block, between two layers of a chain. Inside a residual block two tensors are alive,
inside a gate three.

    blocks(graph, 5)       consecutive nodes with at most 5 quantized Convs and Linears per block, so that the sum of
                           (values alive x tensors alive) over all cuts is least: blocks are cut at bottlenecks
    layers(graph)          each quantized Conv and Linear with the activation after it; other nodes in blocks between

Module names do not matter. Tensors that precede every quantized operator (masks, positions) are alive
everywhere and do not show the structure, so they are not counted. Values that depend only on parameters are
computed where they are read.
Source of the idea: Li et al., "BRECQ", 2021, section 3.2, where blocks are chosen by hand for each family of
models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from qatkit.graph.nodes import facts, module_of, op_class, results
from qatkit.graph.placement import constants
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.qat_layers import QATOperator

# Activations after which a layer's error is measured, if the operator is their only input.
_ACTIVATIONS = frozenset({"relu", "relu6", "silu", "gelu", "hardswish", "leaky_relu"})


@dataclass(frozen=True)
class Block:
    """A block of consecutive nodes.

    Attributes:
        nodes: the nodes in execution order, without constants.
        inputs: the values that are computed before the block and read in it.
        outputs: the values that are computed in the block and read after it, or returned by the graph.
        operators: the quantized Convs and Linears of the block.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    operators: tuple[fx.Node, ...]

    def extract(self) -> fx.GraphModule:
        """Returns the block as a module from its inputs to the tuple of its outputs. Submodules are shared."""
        return extract(self.nodes, self.inputs, self.outputs)


def extract(
    nodes: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Returns a graph of `nodes` that shares their modules and computes the constants that they read."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            for before in node.all_input_nodes:
                copy(before)
            copies[node] = graph.node_copy(node, lambda known: copies[known])
        return copies[node]

    for node in nodes:
        copy(node)
    graph.output(tuple(copies[node] for node in outputs))
    owner = outputs[0].graph.owning_module
    assert owner is not None
    return fx.GraphModule(owner, graph)


def is_learner(node: fx.Node) -> bool:
    """Returns whether a node is a Conv or Linear with a quantized weight."""
    module = module_of(node) if node.op == "call_module" and facts(node).weighted else None
    return isinstance(module, QATOperator) and module.weight_fake_quant is not None


def blocks(graph_module: fx.GraphModule, operators: int) -> list[Block]:
    """Returns the graph in blocks of at most `operators` quantized Convs and Linears, cut at bottlenecks."""
    steps = _steps(graph_module)
    prices = _prices(steps)
    ends = [i for i in range(1, len(steps)) if not is_quantizer(steps[i])] + [len(steps)]
    weights = [0]  # number of quantized operators before each step
    for node in steps:
        weights.append(weights[-1] + is_learner(node))
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for end in ends:
        choices = [
            (best[start][0] + (prices[end] if end < len(steps) else 0.0), start)
            for start in best
            if weights[end] - weights[start] <= operators
        ]
        best[end] = min(choices)
    cuts = [len(steps)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return _between(steps, cuts[::-1])


def layers(graph_module: fx.GraphModule) -> list[Block]:
    """Returns the graph in blocks, each quantized Conv and Linear with its activation in a block of its own."""
    steps = _steps(graph_module)
    cuts = {0, len(steps)}
    for i, node in enumerate(steps):
        if not is_learner(node):
            continue
        end, last = i + 1, node
        while end < len(steps) and _belongs(steps[end], last):
            last = last if is_quantizer(steps[end]) else steps[end]
            end += 1
        cuts |= {i, end}
    return _between(steps, sorted(cuts))


def _belongs(node: fx.Node, last: fx.Node) -> bool:
    """Returns whether a node is a quantizer of `last`, or an activation that is the only reader of `last`."""
    if last not in node.all_input_nodes:
        return False
    return is_quantizer(node) or (op_class(node) in _ACTIVATIONS and len(last.users) == 1)


def _steps(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes that depend on the inputs, in order, without the inputs and the end of the graph."""
    free = constants(graph_module.graph)
    return [n for n in graph_module.graph.nodes if not is_end(n) and n.op != "placeholder" and n not in free]


def is_end(node: fx.Node) -> bool:
    """Returns whether a node only collects the graph's results (`qatkit.graph.nodes.Outputs`)."""
    return node.op == "output" or op_class(node) == "outputs"


def _between(steps: Sequence[fx.Node], cuts: Sequence[int]) -> list[Block]:
    found, yielded = [], set(results(steps[0].graph))
    for start, end in itertools.pairwise(cuts):
        inside = dict.fromkeys(steps[start:end])
        variable = set(steps[:start]) | {n for n in steps[0].graph.nodes if n.op == "placeholder"}
        inputs = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n in variable)
        outputs = [
            n
            for n in inside
            if n in yielded or any(user not in inside and not is_end(user) for user in n.users)
        ]
        if outputs:
            learners = tuple(n for n in inside if is_learner(n))
            found.append(Block(tuple(inside), tuple(inputs), tuple(outputs), learners))
    return found


def _prices(steps: Sequence[fx.Node]) -> list[float]:
    """Returns the cost of a cut before each step: values alive times tensors alive.

    A tensor and its quantized version count as one.
    """
    order = {node: i for i, node in enumerate(steps)}
    behind: set[fx.Node] = set()  # nodes after a quantized operator
    last: dict[fx.Node, int] = {}
    for node in steps:
        if is_learner(node) or any(n in behind for n in node.all_input_nodes):
            behind.add(node)
            root = _root(node)
            last[root] = max([last.get(root, 0), *(order.get(user, len(steps)) for user in node.users)])
    prices = []
    for i in range(len(steps)):
        alive = [node for node, end in last.items() if order[node] < i <= end]
        prices.append(float(sum(map(_values, alive)) * len(alive)))
    return prices


def _root(node: fx.Node) -> fx.Node:
    while is_quantizer(node):
        node = node.all_input_nodes[0]
    return node


def _values(node: fx.Node) -> int:
    def count(value: Any) -> int:
        if isinstance(value, Tensor):
            return math.prod(value.shape)
        return sum(map(count, value)) if isinstance(value, (tuple, list)) else 0

    return count(node.meta.get("value"))
