"""Extracts the nodes that compute a weight from parameters into a program of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.nodes import called, module_of
from qatkit.graph.phase import inference
from qatkit.graph.placement import constants
from qatkit.quant.computed_weights import tensor_at


@dataclass(frozen=True)
class WeightOrigin:
    """The origin of a weight or bias.

    Attributes:
        value: the current value of the weight.
        leaves: names of the parameters and buffers that the weight depends on.
        program: the module that computes the weight from these; None if the weight is the single leaf itself, or
            depends on no parameter.
        key: a key that is equal for weights computed in the same way from the same tensors; None if the weight
            depends on no parameter.
    """

    value: Tensor
    leaves: tuple[str, ...]
    program: fx.GraphModule | None
    key: Any


class Constants:
    """The values of a graph that depend on no input, each computed once, on demand."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.nodes = constants(graph_module.graph)
        self._values: dict[fx.Node, Any] = {}
        self._keys: dict[fx.Node, Any] = {}
        self._numbers: dict[Any, str] = {}
        self._met: dict[int, int] = {}  # position of each tensor, by id, in the order of first use
        self._run = fx.Interpreter(graph_module)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node in self.nodes

    def tensor(self, node: Any) -> Tensor | None:
        """Returns the value of a node if it is a constant floating-point tensor, else None."""
        if node not in self:
            return None
        value = self.value(node)
        return value if isinstance(value, Tensor) and value.is_floating_point() else None

    def value(self, node: fx.Node) -> Any:
        """Returns the value of a constant node."""
        for one in self.behind(node):
            if one not in self._values:
                self._values[one] = self._computed(one)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return tensor_at(self.graph_module, str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "call_module":
            with inference(module_of(node)):
                return module_of(node)(*args, **kwargs)
        with torch.no_grad():
            return getattr(self._run, node.op)(node.target, args, kwargs)

    def add(self, before: fx.Node, what: str | Callable[..., Tensor], *args: Any) -> fx.Node:
        """Inserts a new constant before `before`: a function, or a Tensor method by name, called on constants."""
        with before.graph.inserting_before(before):
            call = before.graph.call_method if isinstance(what, str) else before.graph.call_function
            new = call(what, args)  # type: ignore[arg-type]
        new.meta["site"] = str(before.meta.get("site", before.name))
        self.nodes.add(new)
        return new

    def behind(self, node: fx.Node) -> list[fx.Node]:
        """Returns `node` and all nodes that it depends on, each after its inputs."""
        found: dict[fx.Node, None] = {}
        open_nodes = [(node, False)]
        while open_nodes:
            one, ready = open_nodes.pop()
            if ready:
                found[one] = None
            elif one not in found:
                open_nodes.append((one, True))
                open_nodes.extend((n, False) for n in one.all_input_nodes if n not in found)
        return list(found)

    def source(self, node: fx.Node) -> WeightOrigin:
        """Returns the origin of a constant: its value, its parameters and the program that computes it."""
        value, behind = self.value(node), self.behind(node)
        leaves = [n for n in behind if n.op == "get_attr"]
        names = tuple(str(n.target) for n in self._inputs(leaves))
        direct = next((n for n in leaves if _same_memory(value, self._values[n])), None)
        if any(called(n) in ("detach", "detach_") for n in behind):
            direct = None  # no gradient reaches it, while it would reach the parameter itself
        if direct is not None:
            return WeightOrigin(self._values[direct], (str(direct.target),), None, id(self._values[direct]))
        owned = [n for n in behind if n.op == "call_module"]
        if not owned and not any(isinstance(self._values[n], nn.Parameter) for n in leaves):
            return WeightOrigin(value, names, None, None)
        return WeightOrigin(value, names, self._program(node, behind), self._key(node, behind))

    def _inputs(self, leaves: Iterable[fx.Node]) -> list[fx.Node]:
        """Returns one node per tensor, in the order in which the tensors were first used.

        All programs that read the same tensors have them in the same order, also in another run: a checkpoint stores
        the optimizer's state in the order of the parameters, so a resumed run needs the same order.
        """
        found = {id(self._values[n]): n for n in leaves}
        for tensor in found:
            self._met.setdefault(tensor, len(self._met))
        return [found[tensor] for tensor in sorted(found, key=self._met.__getitem__)]

    def _program(self, node: fx.Node, behind: Iterable[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        leaves = [n for n in behind if n.op == "get_attr"]
        inputs = {
            id(self._values[n]): graph.placeholder(f"leaf_{i}") for i, n in enumerate(self._inputs(leaves))
        }
        for one in behind:
            is_leaf = one.op == "get_attr"
            new[one] = inputs[id(self._values[one])] if is_leaf else graph.node_copy(one, new.__getitem__)
        graph.output(new[node])
        return fx.GraphModule(self.graph_module, graph, "Program")

    def _key(self, node: fx.Node, behind: Iterable[fx.Node]) -> Any:
        for one in behind:
            given = fx.map_arg((one.args, one.kwargs), lambda n: self._keys[n])
            what = id(self._values[one]) if one.op == "get_attr" else str(one.target)
            same = (one.op, what, str(given))
            self._keys[one] = self._numbers.setdefault(same, f"%{len(self._numbers)}")
        return self._keys[node]


def _same_memory(one: Tensor, other: Any) -> bool:
    """Returns whether two tensors are equal views of the same memory."""
    return isinstance(other, Tensor) and (
        one is other
        or (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one.data_ptr() == other.data_ptr()
            and one.numel() > 0
        )
    )


def common_owner(names: Iterable[str]) -> str:
    """Returns the path of the innermost module that contains all named tensors; "" is the model itself."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
