"""Builds the operator for a weight: its type, its path in the model and the names of its parameters.

If nothing else is called in the module that has the weight, the operator replaces this module, and the parameters
keep their names. Otherwise the operator becomes a child of the module that calls the function, at the
function's site ("attn.linear").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from qatkit.graph.nodes import op_class, site
from qatkit.graph.weights.cut import Constants, WeightOrigin, common_owner
from qatkit.quant.computed_weights import COMPUTED, Computed, tensor_at

Kind = type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d] | type[nn.Linear]


class OperatorBuilder:
    """Builds the operators of a graph; weights computed in the same way from the same tensors share one program."""

    def __init__(self, constants: Constants) -> None:
        self.constants, self.graph_module = constants, constants.graph_module
        self._programs: dict[Any, fx.GraphModule] = {}

    def call(
        self,
        node: fx.Node,
        kind: Kind,
        x: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None = None,
        **settings: Any,
    ) -> fx.Node:
        """Inserts a call of a new operator before `node`; the caller replaces `node` by it.

        Args:
            node: the node that the operator is for.
            kind: the type of the operator.
            x: the input of the operator.
            weight: the node of the constant weight, [out, in, ...].
            bias: the node of the constant bias, [out], or None.
            settings: further arguments of a Conv's constructor.
        """
        sources = {"weight": self.constants.source(weight)}
        if bias is not None:
            sources["bias"] = self.constants.source(bias)
        own = {one for c in (weight, bias) if c is not None for one in self.constants.behind(c)}
        path, module = self._path(node, sources["weight"], own), _empty(kind, sources, settings)
        path = self._own(path, module, sources)
        with node.graph.inserting_before(node):
            new = node.graph.call_module(path, (x,))
        new.meta["site"] = path
        return new

    def hang(self, node: fx.Node, module: nn.Module, x: fx.Node, weight: fx.Node) -> fx.Node:
        """Inserts a call of `module` before `node`; the module already has the constant `weight` as a parameter."""
        path = self._path(node, self.constants.source(weight), self.constants.behind(weight))
        self._own(path, module, {})
        with node.graph.inserting_before(node):
            new = node.graph.call_module(path, (x,))
        new.meta["site"] = path
        return new

    def attribute(self, before: fx.Node, path: str) -> fx.Node:
        """Inserts a node that reads a parameter of the model before `before`; it counts as a constant."""
        with before.graph.inserting_before(before):
            new = before.graph.get_attr(path)
        new.meta["site"] = path
        self.constants.nodes.add(new)
        return new

    def _path(self, node: fx.Node, weight: WeightOrigin, own: Collection[fx.Node]) -> str:
        owner, enclosing = common_owner(weight.leaves), site(node).rpartition(".")[0]
        inside = enclosing and f"{owner}.".startswith(f"{enclosing}.")
        for path in (enclosing if inside else "", owner):
            if path and self._free(path, node, own):
                return path
        return free_path(self.graph_module, site(node))

    def _free(self, path: str, node: fx.Node, own: Collection[fx.Node]) -> bool:
        """Returns whether only `node`, the computation of its weight and bias, and paddings use the module at `path`.

        If this is true, the paddings are renamed so that the path becomes free.

        Args:
            path: the path of the module.
            node: the node that is replaced.
            own: the nodes that compute the weight and the bias.
        """
        given = (n for n in node.all_input_nodes if n in self.constants)
        own = {*own, *(one for n in given for one in self.constants.behind(n))}
        inside = [n for n in node.graph.nodes if n is not node and _is_inside(n, path)]
        others = [n for n in inside if n not in own or any(u is not node and u not in own for u in n.users)]
        if any(n.op == "call_module" or op_class(n) != "pad" for n in others):
            return False
        for pad in others:
            pad.meta["site"] = f"{path}_{site(pad)[len(path) + 1 :]}"
        return True

    def _own(self, path: str, module: nn.Module, sources: Mapping[str, WeightOrigin]) -> str:
        """Puts the operator at its path, with the tensors that its programs read, and returns the path."""
        graph_module, modules = self.graph_module, dict(self.graph_module.named_modules())
        if isinstance(module, Computed):
            module.leaves, home = {}, modules.get(path)
            for name, source in sources.items():
                if source.program is not None:
                    taken = {n for n in ("weight", "bias") if n not in sources or sources[n].program is None}
                    module.leaves[name] = tuple(
                        self._adopt(module, home, path, leaf, taken) for leaf in source.leaves
                    )
                    program = self._programs.setdefault(source.key, source.program)
                    module.add_module(f"{name}_program", program)
        if path in modules:
            graph_module.set_submodule(path, module.train(modules[path].training))
        else:
            graph_module.add_submodule(path, module.train(graph_module.training))
        return path

    def _adopt(
        self, module: nn.Module, home: nn.Module | None, path: str, leaf: str, taken: Collection[str]
    ) -> str:
        """Gives `module` a tensor of the model and returns its name there.

        Args:
            module: the new operator.
            home: the module that the operator replaces, or None. Its tensors keep their names.
            path: the path of the operator.
            leaf: the name of the tensor in the model.
            taken: names that the operator itself uses.
        """
        tensor = tensor_at(self.graph_module, leaf)
        if home is not None and leaf.startswith(f"{path}."):
            name = leaf[len(path) + 1 :]
            first, dot, _ = name.partition(".")
            if dot and first not in module._modules:
                module.add_module(first, home._modules[first])
            if dot:
                return name
        else:
            name = leaf.removeprefix(f"{path.rpartition('.')[0]}.").replace(".", "_")
        while name in taken or (name not in ("weight", "bias") and _means_another(module, name, tensor)):
            name += "_"
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor
        return name


def _is_inside(node: fx.Node, path: str) -> bool:
    """Returns whether the name of a node, or the module or tensor that it uses, is inside the module at `path`."""
    names = [site(node)] + [str(node.target)] * (node.op in ("call_module", "get_attr"))
    return any(f"{name}.".startswith(f"{path}.") for name in names)


def _means_another(module: nn.Module, name: str, tensor: Tensor) -> bool:
    """Returns whether a module has an attribute of this name that is not `tensor`."""
    return hasattr(module, name) and getattr(module, name) is not tensor


def _empty(kind: Kind, sources: Mapping[str, WeightOrigin], settings: Mapping[str, Any]) -> nn.Module:
    """Returns an operator with the sizes of its weight; it has only parameters that are not computed."""
    value, bias = sources["weight"].value, sources.get("bias")
    inputs = value.shape[1] * int(settings.get("groups", 1))
    make: Any = kind
    sizes = (inputs, len(value)) if kind is nn.Linear else (inputs, len(value), tuple(value.shape[2:]))
    made: Any = make(*sizes, bias=bias is not None, device="meta", **settings)
    if any(source.program is not None for source in sources.values()):
        made.__class__ = COMPUTED[kind]
    for name in ("weight", "bias"):
        source = sources.get(name)
        computed = source is not None and source.program is not None
        made._parameters[name] = None if source is None or computed else _parameter(source)
        if computed:
            del made._parameters[name]
    return cast(nn.Module, made)


def _parameter(source: WeightOrigin) -> nn.Parameter:
    """Returns the parameter for a weight, frozen if the value depends on no parameter."""
    value: Tensor = source.value
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=False)


def free_path(graph_module: fx.GraphModule, path: str) -> str:
    """Returns `path`, with underscores appended while its module has an attribute of that name."""
    owner, _, name = path.rpartition(".")
    home: Any = dict(graph_module.named_modules()).get(owner, nn.Module())
    while hasattr(home, name):
        name += "_"
    return f"{owner}.{name}" if owner else name
