"""Resolves selectors to operators and tensors of a graph (`qatkit.config.selectors`, `docs/overrides.md`).

An operator has the name of its module or call (`site`). In a model imported from an ONNX file, the name of a node of
the file also selects all operators recorded inside that node. An exact name has precedence over patterns and prefixes,
so names that contain brackets or colons, or begin like a selector (`op/`), need no quoting here.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from qatkit.config.selectors import CLASS, EXPRESSION, INPUT, ONLY, TENSOR, ends_of, shown
from qatkit.graph import operators
from qatkit.graph.nodes import facts, op_class, owner, site
from qatkit.graph.signature import unique
from qatkit_verify.errors import ConfigError, did_you_mean, near_matches

FILE_NODES = "file_nodes"  # key in a graph's meta: the node of an imported file for each module path
IN_INT8 = "in_int8"  # key in a graph's meta: the sites of the SiLUs that each selector opened
_OPERATORS = ("call_module", "call_function", "call_method")
_SHOWN = 5


@dataclass(frozen=True)
class FileNode:
    """A node of an imported ONNX file.

    Attributes:
        name: the name of the node.
        op_type: the type of its operator.
        inputs, outputs: names of its tensors; "" for optional tensors that are left out.
        weight: the index of the input that is the weight, for operators that have one.
        axis: the axis of the weight's output channels.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    weight: int = 1
    axis: int = 0


def input_nodes(names: Sequence[str], of_file: Sequence[str]) -> dict[str, FileNode]:
    """Returns the inputs of a file by their names in the graph, where special characters are replaced (`unique`)."""
    if len(names) == len(of_file) == 1:
        return {names[0]: FileNode(of_file[0], "", (), (of_file[0],))}
    known = dict(zip(unique(of_file), of_file, strict=True))
    return {one: FileNode(known[one], "", (), (known[one],)) for one in names if one in known}


def file_node(node: fx.Node) -> FileNode | None:
    """Returns the node of the imported file that `node` belongs to; None if there is none."""
    known = getattr(node.graph.owning_module, "meta", {}).get(FILE_NODES, {})
    path = owner(node) or site(node)
    while known and path not in known and "." in path:
        path = path.rpartition(".")[0]  # passes name the nodes that they make from it NAME.WHAT
    found: FileNode | None = known.get(path)
    return found


def names_in_file(graph_module: fx.GraphModule, sites: Iterable[str]) -> list[str]:
    """Returns sites, followed by the names of their nodes in the imported file where the two differ."""
    known, listed = graph_module.meta.get(FILE_NODES, {}), list(sites)
    return list(dict.fromkeys((*listed, *(known[one].name for one in listed if one in known))))


def operators_of(graph: fx.Graph, kind: str | None = None) -> list[fx.Node]:
    """Returns the operators of a graph in graph order: those of the class `kind`, or all of them."""
    calls = [n for n in graph.nodes if n.op in _OPERATORS]
    return [n for n in calls if kind in (None, op_class(n))]


def matched(
    graph: fx.Graph, selector: str, kind: str | None = None, key: str = "backend.overrides"
) -> list[fx.Node]:
    """Returns the operators that a selector chooses, in graph order; with `kind`, only those of this class.

    Raises:
        ConfigError: it chooses no operator (which is allowed for `backend.only`); the message has similar
            names.
    """
    calls = operators_of(graph, kind)
    found = _chosen(graph, calls, selector, key)
    if not found and not selector.startswith(ONLY):  # `only` may leave nothing out
        near = _near(selector, calls)
        raise ConfigError(key, selector, reason=f"the pattern matches no {kind or 'operator'}{near}")
    return found


def _chosen(graph: fx.Graph, calls: list[fx.Node], selector: str, key: str) -> list[fx.Node]:
    if selector.startswith(ONLY):
        inside = _union(graph, json.loads(selector.removeprefix(ONLY)), "backend.only")
        return [n for n in calls if n not in inside and not _ends_one(n, inside)]
    names = {n: _names(n) for n in calls}
    exact = [n for n in calls if selector in names[n]]
    if exact:
        return exact
    if ends := ends_of(selector):
        between = _between(graph, ends, key)
        return [n for n in calls if n in between]
    if selector.startswith(CLASS):
        wanted = selector.removeprefix(CLASS)
        return [n for n in calls if wanted in _types(n)]
    matches = _reader(selector)
    return [n for n in calls if any(map(matches, names[n]))]


def _names(node: fx.Node) -> tuple[str, ...]:
    of_file = file_node(node)
    return (site(node),) if of_file is None else (site(node), of_file.name)


def _types(node: fx.Node) -> set[str]:
    """Returns the names after `op/` that select an operator: its class, and its type in an imported file."""
    known = {record.name for record in operators.operators()}
    of_file = file_node(node)
    return ({op_class(node)} & known) | ({of_file.op_type} if of_file is not None else set())


def _reader(selector: str) -> Callable[[str], Any]:
    """Returns a function that returns whether a name matches the selector, a regular expression or a glob."""
    if selector.startswith(EXPRESSION):
        return re.compile(selector.removeprefix(EXPRESSION)).fullmatch
    return lambda name: fnmatch.fnmatchcase(name, selector)


def _near(selector: str, calls: Iterable[fx.Node]) -> str:
    listed = list(calls)
    names = [name for n in listed for name in _names(n)]
    types = [f"{CLASS}{one}" for one in sorted({one for n in listed for one in _types(n)})]
    return did_you_mean(selector, types if selector.startswith(CLASS) else [*names, *types])


def _ends_one(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Returns whether a node is an activation or a no-op after an operator in `inside`."""
    kind = facts(node)
    ends = kind.activation is not None or kind.name in ("pass", "outputs")
    return ends and bool(node.all_input_nodes) and node.all_input_nodes[0] in inside


def _union(graph: fx.Graph, selectors: Iterable[str], key: str) -> set[fx.Node]:
    return {node for one in selectors for node in matched(graph, one, key=key)}


def _between(graph: fx.Graph, ends: dict[str, Any], key: str) -> set[fx.Node]:
    """Returns every operator on a path from an operator of `from` to one of `to`, including both.

    Raises:
        ConfigError: there is no such path; the message has similar names of operators that are reached.
    """
    name = ends.get("name")
    key = f"backend.subgraphs.{name}" if name is not None else key
    first, last = (_union(graph, ends[end], f"{key}.{end}") for end in ("from", "to"))
    forward = _reached(first, lambda node: node.users)
    found = forward & _reached(last, lambda node: node.all_input_nodes)
    if not found:
        reached = [n for n in graph.nodes if n in forward and n.op in _OPERATORS]
        behind = [site(n) for n in reached if n not in first]
        near = near_matches(str(ends["to"][0]), behind, _SHOWN)
        other = f" (only to others, such as {near})" if behind else " or to any other operator"
        listed = ", ".join(map(str, ends["from"]))
        reason = f"no path from {listed} leads here{other}"
        raise ConfigError(f"{key}.to", ", ".join(ends["to"]), reason=reason)
    return found


def _reached(start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, open_nodes = set[fx.Node](), list(start)
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            open_nodes += step(node)
    return found


@dataclass(frozen=True)
class Tensors:
    """The tensors that a selector chooses.

    Attributes:
        makers: nodes whose outputs are chosen: operators and inputs of the model.
        readers: operators whose weights are chosen.
    """

    makers: list[fx.Node]
    readers: list[fx.Node]


def chosen_tensors(graph: fx.Graph, selector: str, key: str = "backend.overrides") -> Tensors:
    """Returns the tensors that `tensor/NAME` or `input/K/SELECTOR` chooses.

    Raises:
        ConfigError: it has another form, or chooses no tensor; the message has similar names, or the
            operator's inputs.
    """
    if selector.startswith(TENSOR):
        return _by_name(graph, selector, selector.removeprefix(TENSOR), key)
    number, _, rest = selector.removeprefix(INPUT).partition("/")
    if not number.isdecimal() or not rest:
        raise ConfigError(key, selector, f"a selector {INPUT}K/SELECTOR, such as {INPUT}0/conv1")
    makers, readers = list[fx.Node](), list[fx.Node]()
    for node in matched(graph, rest, key=key):
        found = _input_of(graph, node, int(number), key, selector)
        (readers if found is node else makers).append(found)
    return Tensors(list(dict.fromkeys(makers)), readers)


def is_of_tensors(graph: fx.Graph, selector: str) -> bool:
    """Returns whether a selector chooses tensors: it has their prefix and is not the name of an operator."""
    prefixed = selector.startswith((TENSOR, INPUT))
    return prefixed and not any(selector in _names(n) for n in operators_of(graph))


def _by_name(graph: fx.Graph, selector: str, name: str, key: str) -> Tensors:
    makers = {n: _made_by(n) for n in graph.nodes if n.op in (*_OPERATORS, "placeholder")}
    weights = {n: _weight_of(n) for n in makers if facts(n).weighted or op_class(n) == "embedding"}
    known = {one for one in (*makers.values(), *weights.values()) if one}
    wanted = {name} if name in known else {one for one in known if _reader(name)(one)}
    if not wanted:
        near = did_you_mean(selector, [f"{TENSOR}{one}" for one in known])
        raise ConfigError(key, selector, reason=f"the pattern matches no tensor{near}")
    last = {
        made: n for n, made in makers.items() if made in wanted
    }  # if several nodes are one node of a file, the last one computes its output
    return Tensors(list(last.values()), [n for n, weight in weights.items() if weight in wanted])


def _made_by(node: fx.Node) -> str:
    """Returns the name of the tensor that a node computes."""
    of_file = file_node(node)
    if of_file is None or not of_file.outputs:
        return site(node)
    return next((one for one in of_file.outputs if one), site(node))


def _weight_of(node: fx.Node) -> str:
    """Returns the name of an operator's weight; "" if its node in an imported file has no such input."""
    of_file = file_node(node)
    if of_file is None:
        return f"{site(node)}.weight"
    return of_file.inputs[of_file.weight] if of_file.weight < len(of_file.inputs) else ""


def _input_of(graph: fx.Graph, node: fx.Node, number: int, key: str, selector: str) -> fx.Node:
    """Returns the node that computes an input of an operator; the operator itself if that input is its weight."""
    of_file, weighted = file_node(node), facts(node).weighted
    if of_file is None:
        given: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), given.append)
        if number < len(given):
            return given[number]
        if weighted and number == 1:
            return node
        count = len(given) + weighted
        raise ConfigError(key, selector, reason=_no_input(site(node), number, count))
    if number >= len(of_file.inputs):
        count = len(of_file.inputs)
        raise ConfigError(key, selector, reason=_no_input(of_file.name, number, count))
    if number == of_file.weight and weighted:
        return node
    name = of_file.inputs[number]
    nodes: Iterable[fx.Node] = graph.nodes
    found = [n for n in nodes if n.op in (*_OPERATORS, "placeholder") and _made_by(n) == name]
    if not found:
        what = f"('{name}') is a constant" if name else "is omitted"
        reason = f"input {number} of {of_file.name} {what}, so it has no range"
        raise ConfigError(key, selector, reason=reason)
    return found[-1]


def _no_input(name: str, number: int, count: int) -> str:
    if count < 2:
        return f"{name} has no input {number}; " + (
            "its only input is input 0" if count else "it has no inputs"
        )
    return f"{name} has no input {number}; it has inputs 0 to {count - 1}"


def record_of(selector: str, settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the record of a selector for the report: its settings and the names of what it selected."""
    listed = list(dict.fromkeys(names))
    return {"selector": shown(selector), "settings": settings, "count": len(listed), "names": listed}
