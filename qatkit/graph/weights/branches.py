"""Merges summed branches of one input into one convolution, whose weight is computed from the branches' weights.

    bn(conv3x3(x)) + bn(conv1x1(x)) + bn(x)       →  F.conv2d(x, w, b)      w, b: arithmetic on their parameters
    conv1x1(conv3x3(conv1x1(pad(x)))) + conv(x)   →  the same

Deployment runs only that convolution, so its weight is the one to quantize. Gradients reach each branch through the
arithmetic (`qatkit.graph.weights.lift` makes an operator of it). BatchNorms of the branches keep their statistics,
since no branch runs on its own.

Two kinds of branches are merged: those of a block that the model itself merges for evaluation
(`qatkit.graph.capture.training_paths`), and any sum of several operators of one input, if the convolution costs no
more than the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.capture.training_paths import PATHS, listed
from qatkit.graph.node_arguments import arguments, shape_of
from qatkit.graph.nodes import OWNER, called, module_of, op_class, parameter_reads, site
from qatkit.graph.pass_result import PassResult
from qatkit.graph.trace import tidy
from qatkit.graph.weights.cut import Constants
from qatkit.graph.weights.kernels import (
    CONVOLUTIONS,
    Call,
    Kernel,
    Settled,
    Source,
    added,
    convolved,
    itself,
    normalized,
    padded,
)
from qatkit.graph.weights.operator import free_path
from qatkit.quant.computed_weights import tensor_at

_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_APART = "the model merges these branches for evaluation, but they stay separate in the file: qatkit cannot merge them"


@dataclass(frozen=True)
class Region:
    """The nodes between one input and one output.

    Attributes:
        x: the input node.
        nodes: the nodes in graph order; the last one is the output.
    """

    x: fx.Node
    nodes: tuple[fx.Node, ...]


def merge_branches(graph_module: fx.GraphModule, *, fold: bool = False, merged: bool = False) -> PassResult:
    """Merges branches of a graph in place; new nodes except the convolutions have no value in their meta.

    `changed` in the result is the number of new convolutions. Blocks with several convolutions that only the model's
    own code can merge are listed in the graph's notes; their branches stay separate.

    Args:
        graph_module: a traced and propagated graph.
        fold: whether BatchNorms are folded into the weights of their branches now, unless other branches or operators
            read the same parameters.
        merged: whether the merged weights are stored as new parameters, so that the branches are no longer needed.
    """
    merging = _Merging(graph_module, fold=fold, merged=merged)
    result, apart = PassResult(graph_module), list[str]()
    for path in graph_module.meta.get(PATHS, ()):
        inside = _inside(graph_module.graph, path)
        found = sum(merging.merge(node, inside) for node in reversed(inside))
        result.changed += found
        if not found and sum(_kind(node) == "conv" for node in inside) > 1:
            apart.append(path)
    if apart:
        graph_module.meta["notes"] = [*graph_module.meta["notes"], (listed(apart), _APART)]
    for node in reversed(list(graph_module.graph.nodes)):
        if (
            _kind(node) == "add" and OWNER not in node.meta
        ):  # inside a node of an imported file nothing is merged
            result.changed += merging.merge(node)
    if result.changed:
        tidy(graph_module)
    return result


def _inside(graph: fx.Graph, path: str) -> list[fx.Node]:
    """Returns the nodes that were recorded within a module."""
    return [n for n in graph.nodes if not path or f"{site(n)}.".startswith(f"{path}.")]


class _Merging:
    """The merging of one graph."""

    def __init__(self, graph_module: fx.GraphModule, *, fold: bool, merged: bool) -> None:
        self.graph_module, self.fold, self.merged = graph_module, fold, merged
        self.constants = Constants(graph_module)
        self.reads = parameter_reads(graph_module.graph)

    def merge(self, last: fx.Node, inside: Sequence[fx.Node] | None = None) -> bool:
        """Replaces the branches that end at `last` by a convolution of their input; returns whether it did.

        Args:
            last: the last node of the branches.
            inside: the nodes of the block that `last` belongs to, which is merged at any cost; None for other sums.
        """
        if not last.users or _kind(last) is None:
            return False
        for region in _regions(last, inside):
            kernel = self._kernel(region, bare=inside is not None)
            if kernel is not None and (inside is not None or self._costs_no_more(kernel, region)):
                self._replace(region, kernel)
                return True
        return False

    def _kernel(self, region: Region, *, bare: bool) -> Kernel | None:
        """Returns a region as one convolution; None if it is not one.

        Args:
            bare: whether the input itself may be a branch. If not, this is allowed only if a BatchNorm follows the
                sum: a residual stream would otherwise be quantized.
        """
        shape = shape_of(region.x)
        if shape is None or not 3 <= len(shape) <= 5:
            return None
        bare = bare or all(_kind(user) == "norm" for user in region.nodes[-1].users)
        values: dict[fx.Node, Kernel | None] = {region.x: itself(shape[1], len(shape) - 2)}
        for node in region.nodes:
            given = [one for one in (values[a] for a in _inputs(node)) if one is not None]
            if len(given) < len(_inputs(node)):
                return None
            values[node] = getattr(self, f"_{_kind(node)}")(node, *given)
            if not bare and _kind(node) == "add" and any(one.weight is None for one in given):
                return None
        kernel = values[region.nodes[-1]]
        return kernel if kernel is not None and kernel.weight and kernel.before == kernel.after else None

    def _conv(self, node: fx.Node, given: Kernel) -> Kernel | None:
        rank = len(given.size)
        weight, bias, settings = self._convolution(node)
        if (
            weight is None
            or self._tensor(weight) is None
            or (bias is not None and self._tensor(bias) is None)
        ):
            return None
        shape = tuple(cast(Tensor, self._tensor(weight)).shape)
        if len(shape) != rank + 2:
            return None
        stride, dilation = (_per_axis(settings[name], rank) for name in ("stride", "dilation"))
        if settings["padding"] == "same":
            whole = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
            before, after = tuple(w // 2 for w in whole), tuple(w - w // 2 for w in whole)
        else:
            before = after = _per_axis({"valid": 0}.get(settings["padding"], settings["padding"]), rank)
        return convolved(
            given, Kernel(weight, shape, bias, settings["groups"], stride, before, after), dilation
        )

    def _convolution(self, node: fx.Node) -> tuple[Source | None, Source | None, dict[str, Any]]:
        """Returns weight, bias and settings of a convolution that is called as a module or as a function."""
        if node.op == "call_module":
            module: Any = module_of(node)
            bias = None if module.bias is None else f"{node.target}.bias"
            return f"{node.target}.weight", bias, {name: getattr(module, name) for name in _SETTINGS}
        call: dict[str, Any] = (
            dict(zip(("input", "weight", "bias", *_SETTINGS), node.args, strict=False)) | node.kwargs
        )
        return (
            call.get("weight"),
            call.get("bias"),
            {name: call.get(name, d) for name, d in _SETTINGS.items()},
        )

    def _norm(self, node: fx.Node, given: Kernel) -> Kernel:
        module, path = module_of(node), str(node.target)
        kernel = normalized(given, module, path)
        held = [one for one in (given.weight, given.bias) if isinstance(one, str)]
        tensors = [*module.parameters(), *(cast(Tensor, self._tensor(one)) for one in held)]
        alone = all(self.reads[id(one)] == 1 for one in tensors)
        if not self.fold or not alone or not isinstance(given.weight, str | None):
            return kernel
        weight, bias = cast(Source, kernel.weight), cast(Source, kernel.bias)
        return replace(kernel, weight=Settled(weight), bias=Settled(bias))

    def _add(self, _: fx.Node, one: Kernel, other: Kernel | None = None) -> Kernel | None:
        return one if other is None else added(one, other)

    def _pad(self, node: fx.Node, given: Kernel) -> Kernel | None:
        call = arguments(node, F.pad)
        zeros = call["mode"] == "constant" and all(isinstance(a, int) and a >= 0 for a in call["pad"])
        return padded(given, call["pad"]) if zeros else None

    def _same(self, _: fx.Node, given: Kernel) -> Kernel:
        return given

    def _tensor(self, source: Source) -> Tensor | None:
        """Returns the value of a tensor of the model or a constant of the graph; None for other sources."""
        if isinstance(source, str):
            return tensor_at(self.graph_module, source)
        return self.constants.tensor(source)

    def _costs_no_more(self, kernel: Kernel, region: Region) -> bool:
        """Returns whether the convolution needs no more products per output position than the branches."""
        counts = [
            cast(Tensor, self._tensor(cast(Source, self._convolution(node)[0]))).numel()
            for node in region.nodes
            if _kind(node) == "conv"
        ]
        norms = sum(_kind(node) == "norm" for node in region.nodes)
        return math.prod(kernel.shape) <= sum(counts) + norms * kernel.shape[0]

    def _replace(self, region: Region, kernel: Kernel) -> None:
        last, made = region.nodes[-1], dict[Any, fx.Node]()
        name = CONVOLUTIONS[len(kernel.size) - 1].__name__
        path = ".".join(filter(None, (site(last).rpartition(".")[0], name)))
        weight, bias = (
            None if one is None else self._emit(last, Settled(one) if self.merged else one, made, path)
            for one in (kernel.weight, kernel.bias)
        )
        with last.graph.inserting_before(last):
            new = last.graph.call_function(
                CONVOLUTIONS[len(kernel.size) - 1],
                (region.x, weight, bias, kernel.stride, kernel.before, 1, kernel.groups),
            )
        new.meta = {"site": path, "value": last.meta.get("value")}
        last.replace_all_uses_with(new)
        for node in reversed(region.nodes):
            last.graph.erase_node(node)

    def _emit(self, before: fx.Node, source: Any, made: dict[Any, fx.Node], path: str) -> Any:
        """Inserts the node of a source before `before` and returns it; returns nodes, numbers and None unchanged."""
        if not isinstance(source, str | Call | Settled):
            return source
        if source not in made:
            made[source] = self._emitted(before, source, made, path)
        return made[source]

    def _emitted(
        self, before: fx.Node, source: str | Call | Settled, made: dict[Any, fx.Node], path: str
    ) -> fx.Node:
        if isinstance(source, Call):
            args = [self._emit(before, one, made, path) for one in source.args]
            return self.constants.add(before, source.function, *args)
        if isinstance(source, Settled):
            node = self._emit(before, source.source, made, path)
            leaves = [n for n in self.constants.behind(node) if n.op == "get_attr"]
            trains = any(self.constants.value(leaf).requires_grad for leaf in leaves)
            value = self.constants.value(node).clone()
            name = self._free(f"{path}_{'bias' if value.ndim == 1 else 'weight'}")
            owner, _, last = name.rpartition(".")
            home = self.graph_module.get_submodule(owner)
            home.register_parameter(last, nn.Parameter(value, trains))
            source = name
        with before.graph.inserting_before(before):
            new = before.graph.get_attr(source)
        new.meta["site"] = source
        self.constants.nodes.add(new)
        return new

    def _free(self, path: str) -> str:
        """Returns a free path for a parameter: its name, in the innermost existing module on `path`."""
        owner, _, name = path.rpartition(".")
        modules = dict(self.graph_module.named_modules())
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        return free_path(self.graph_module, f"{owner}.{name}" if owner else name)


def _regions(last: fx.Node, inside: Sequence[fx.Node] | None) -> list[Region]:
    """Returns the regions that end with `last`, if they have at least two nodes that are convolutions or sums.

    In a block, these are all such regions, largest first; elsewhere, only the smallest region that ends with `last`.
    """
    order = {node: i for i, node in enumerate(last.graph.nodes)}
    found, nodes, front = list[Region](), list[fx.Node](), {last}
    while front:
        latest = max(front, key=order.__getitem__)
        if latest is not last and len(front) == 1:
            found.append(Region(latest, tuple(reversed(nodes))))
            if inside is None or latest not in inside:
                break
        if _kind(latest) is None or (latest is not last and any(user not in nodes for user in latest.users)):
            break
        nodes.append(latest)
        front = (front - {latest}) | set(_inputs(latest))
    weighted = [r for r in found if sum(_kind(n) in ("conv", "add") for n in r.nodes) > 1]
    return weighted[::-1] if inside is not None else weighted[:1]


def _kind(node: fx.Node) -> str | None:
    """Returns the kind of a node: "conv", "norm", "add", "pad" or "same"; None for anything else."""
    if node.op == "call_module":
        module = module_of(node)
        if type(module) in _MODULES and "weight" in module._parameters and op_class(node) == "conv":
            return "conv" if module.padding_mode == "zeros" else None
        if op_class(node) == "batch_norm" and module.running_var is not None:
            return "norm"
        return "same" if isinstance(module, nn.Identity) else None
    if node.target in CONVOLUTIONS:
        return "conv"
    if node.target is F.pad:
        return "pad" if op_class(node) == "pad" else None
    if called(node) == "add" and len(node.args) == 2 and not node.kwargs:
        return "add" if all(isinstance(a, fx.Node) or a == 0 for a in node.args) else None
    return None


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs, other than parameters, of a node that `_kind` knows."""
    return [a for a in node.args[: 2 if _kind(node) == "add" else 1] if isinstance(a, fx.Node)]


def _per_axis(value: Any, rank: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return given * rank if len(given) == 1 else given
