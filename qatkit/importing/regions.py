"""Maps the nodes of a converted graph to the nodes of the file, and finds the pairs on the edges of the file's graph.

A pair is a QuantizeLinear with its DequantizeLinear, and a barrier keeps ONNX Runtime from fusing nodes across it
(`written_file`). A region is the set of all nodes of the graph that belong to one node of the file. Pairs and
barriers belong to no region. They form the chain of an edge, from the region that computes a value to the region
that reads it. A pair between two nodes of the same region is moved to an input or output edge of the region, across
nodes that only move values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from qatkit.graph.convert.integer_modules import QuantizeDequantize
from qatkit.graph.nodes import facts, module_of, owner, site
from qatkit.graph.quantizers import QUANTIZES, is_quantizer
from qatkit.importing.program import ImportedModel, Step
from qatkit.importing.written_file import BARRIER, Chain, Layout, Pair, refused

INPUT, CONSTANT = "input ", "constant"  # regions that are not nodes of the file


@dataclass(frozen=True)
class Edge:
    """An edge to a region: a value that the region reads.

    Attributes:
        maker: the region that computes the value; "input NAME" for an input of the graph.
        source: the node of the graph that computes the value.
        chain: the pairs and barriers between the two regions.
        place: the node of the graph that reads the value, and the position among its arguments.
    """

    maker: str
    source: fx.Node
    chain: Chain
    place: tuple[fx.Node, int]


class Regions:
    """The regions of a prepared or converted graph.

    Args:
        model: the imported model from which `graph` was made.
        graph: the prepared or converted graph.

    Raises:
        ConfigError: a node of the graph belongs to no node of the file.
    """

    def __init__(self, model: ImportedModel, graph: fx.GraphModule) -> None:
        self.model, self.graph = model, graph
        self.steps = {step.path: step for step in model.program.modules()}
        branched = [step for step in model.program.steps if step.branches]
        self.whole = {
            inner.path: region_of(step)
            for step in branched
            for b in step.branches or ()
            for inner in b.modules()
        }
        names = [str(name) for name in graph.meta.get("inputs", ())]
        given = [n for n in graph.graph.nodes if n.op == "placeholder"]
        named = names if set(names) <= set(model.inputs) and len(names) == len(given) else model.inputs
        self.region: dict[fx.Node, str] = {}
        for node, name in zip(given, named, strict=False):
            self.region[node] = INPUT + name
        self.nodes: dict[str, list[fx.Node]] = {}
        self.part: dict[fx.Node, str] = {}  # the step of each node, including nodes in branches
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.region[node] = CONSTANT
            elif node.op not in ("placeholder", "output") and _link(node) is None:
                path = self.region[node] = self._owner(node)
                if path != CONSTANT:
                    self.nodes.setdefault(path, []).append(node)

    def _owner(self, node: fx.Node) -> str:
        if node.all_input_nodes and all(self.region.get(n) == CONSTANT for n in node.all_input_nodes):
            return CONSTANT
        if not _has_tensors(node.meta.get("value", node)):
            return CONSTANT  # sizes
        for name in (owner(node), site(node), str(node.meta.get(QUANTIZES, ""))):
            parts = name.split(".")
            for count in range(len(parts), 0, -1):
                if (path := ".".join(parts[:count])) in self.steps:
                    self.part[node] = path
                    return self.whole.get(path, path)
        raise refused(
            self.model.file, f"'{site(node)}' of the converted graph belongs to no node of the file"
        )

    def edges(self, path: str) -> list[Edge]:
        """Returns the edges from other regions, in the order of the region's nodes and their arguments."""
        found = []
        for node in self.nodes.get(path, ()):
            for place, argument in enumerate(_arguments(node)):
                source, chain = self.back(argument)
                if self.region[source] not in (path, CONSTANT):
                    inside = self._behind(source, self.region[source])
                    chain = _joined((*inside, *chain, *self._ahead(node, path)))
                    found.append(Edge(self.region[source], source, chain, (node, place)))
        return found

    def loses(self, path: str) -> bool:
        """Returns whether a pair between two nodes of a region cannot be moved to the region's edge."""
        for node in self.nodes.get(path, ()):
            for argument in _arguments(node):
                source, chain = self.back(argument)
                inside = self.region[source] == path and carries(chain)
                if inside and not self._moves_to_end(node, path) and not self._moves_from_start(source, path):
                    return True
        return False

    def _moves_to_end(self, node: fx.Node, path: str) -> bool:
        users = [self._forward(user)[1] for user in node.users]
        inside = [user for user in users if user is not None and self.region.get(user) == path]
        return facts(node).keeps_range and all(self._moves_to_end(user, path) for user in inside)

    def _moves_from_start(self, node: fx.Node, path: str) -> bool:
        if not facts(node).keeps_range or len(node.users) != 1:
            return False
        source, _ = self.back(node.all_input_nodes[0])
        return self.region[source] != path or self._moves_from_start(source, path)

    def outputs(self) -> list[tuple[fx.Node, Chain]]:
        """Returns for each output of the graph the region's node that computes it, and the chain after this node."""
        end = next(n for n in self.graph.graph.nodes if n.op == "output")
        found = []
        for argument in _arguments(end):
            source, chain = self.back(argument)
            found.append((source, _joined((*self._behind(source, self.region[source]), *chain))))
        return found

    def back(self, node: fx.Node) -> tuple[fx.Node, Chain]:
        """Returns the node of a region from which `node` gets its values, and the chain from there to `node`.

        If `node` itself belongs to a region, it is returned with an empty chain.
        """
        chain: list[Pair | Layout | str] = []
        while (links := _link(node)) is not None:
            chain[:0] = links
            node = node.all_input_nodes[0]
        return node, tuple(chain)

    def _ahead(self, node: fx.Node, path: str) -> Chain:
        """Returns the pairs after `node` in its region, across nodes that only move values."""
        chain: list[Pair | Layout | str] = []
        while facts(node).keeps_range and len(node.users) == 1:
            links, user = self._forward(next(iter(node.users)))
            if user is None or self.region.get(user) != path:
                break
            chain += links
            node = user
        return tuple(chain)

    def _forward(self, node: fx.Node) -> tuple[list[Pair | Layout | str], fx.Node | None]:
        chain: list[Pair | Layout | str] = []
        while (links := _link(node)) is not None:
            chain += links
            if len(node.users) != 1:
                return chain, None
            node = next(iter(node.users))
        return chain, node

    def _behind(self, node: fx.Node, path: str) -> Chain:
        """Returns the pairs before `node` in its region, across nodes that only move values."""
        chain: Chain = ()
        while facts(node).keeps_range and node.all_input_nodes:
            source, links = self.back(node.all_input_nodes[0])
            if self.region[source] != path:
                break
            chain, node = (*links, *chain), source
        return chain


def region_of(step: Step) -> str:
    """Returns the region of a node of the file; an If and both of its branches are one region."""
    return step.path or f"If {next(name for name in step.outputs if name)}"


def _joined(chain: Chain) -> Chain:
    """Drops adjacent repetitions from a chain; puts barriers between pairs, which ONNX Runtime would merge."""
    found: list[Pair | Layout | str] = []
    for link in chain:
        if found and found[-1] == link:
            continue
        if found and isinstance(found[-1], Pair) and isinstance(link, Pair):
            found.append(BARRIER)
        found.append(link)
    return tuple(found)


def _link(node: fx.Node) -> Chain | None:
    """Returns the links that a node adds to an edge; None for a node of a region.

    A quantizer of a prepared graph adds none, since it has no scale yet.
    """
    if is_quantizer(node):
        return ()
    if node.op == "call_module" and isinstance(module_of(node), QuantizeDequantize):
        return (pair_of(cast(QuantizeDequantize, module_of(node))),)
    if node.op == "call_function" and node.target is torch.ops.qatkit.barrier:
        return (BARRIER,)
    return () if _fills_up(node) else None


def pair_of(module: QuantizeDequantize) -> Pair:
    """Returns the pair that a converted quantizer becomes in the file."""
    dtype = str(module.zero_point.dtype).removeprefix("torch.")
    ends = None if module.ends is None else (module.ends[0], module.ends[1])
    return Pair(float(module.scale), int(module.zero_point), dtype, ends)


def _fills_up(node: fx.Node) -> bool:
    """Returns whether a node appends zero channels (`qatkit.graph.pad_channels`); the file lacks such nodes."""
    before = node.all_input_nodes[:1]
    return node.target is F.pad and not owner(node) and site(node) == f"{site(before[0])}_pad"


def _has_tensors(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensors, value))
    return isinstance(value, (Tensor, fx.Node))


def _arguments(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes among the arguments of a node, in order and with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's output for the example input; () if the output is not a tensor."""
    value = node.meta.get("value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def carries(chain: Chain) -> bool:
    """Returns whether a chain contains a pair."""
    return any(isinstance(link, Pair) for link in chain)
