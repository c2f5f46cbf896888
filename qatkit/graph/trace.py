"""From an nn.Module to the one graph: torch.fx with the model's own modules as nodes.

Every node gets a `site`, the name by which overrides, reports and ONNX tensors call it: the module's path
for modules ("layer1.0.conv1"), the enclosing module's path and the operator for functions
("layer1.0.add"; a second one in the same module is "layer1.0.add_1").
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.capture.model import capture
from qatkit.graph.capture.sizes import drawn_output
from qatkit.graph.nodes import (
    Outputs,
    called,
    classifies_in_training,
    has_auxiliary_heads,
    known_type,
    module_of,
    op_class,
)
from qatkit.graph.phase import inference
from qatkit.graph.signature import Example, flatten, graph_inputs, leaf_names, leaves
from qatkit.graph.untraceable import with_twins
from qatkit.quant.qat_layers import with_the_same_parameters
from qatkit_verify.errors import ConfigError

_HINT = "rewrite that line without Python control flow over tensors, or wrap the function with torch.fx.wrap"

_COPIED = (bool, int, float, str, dict, list, tuple, set, Tensor, nn.Module, type(None))
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tracer(fx.Tracer):
    """Leaves: torch.nn's modules, what is one of them in all but its constructor, and StochasticDepth (its
    function drops at inference if traced in train mode).
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return known_type(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """What the model's forward has a default for (a mask, a flag) is that default, and no input."""
        function, given = super().create_args_for_root(*args, **kwargs)
        for i, value in enumerate(given):
            node = getattr(value, "node", None)
            if isinstance(node, fx.Node) and node.args:
                given[i] = node.args[0]
                self.graph.erase_node(node)
        return function, given


def trace(model: nn.Module, example: Example | None = None) -> fx.GraphModule:
    """The graph of a copy of `model`; a graph of ours is returned as it is.

    With an example the model is run (`qatkit.graph.capture`); without one it is traced symbolically, which follows
    neither sizes nor changes in place.

    Raises:
        ConfigError: the model has control flow that depends on data; names the module and the line.
    """
    if is_traced(model) or (isinstance(model, fx.GraphModule) and example is None):
        return cast(fx.GraphModule, model)
    if example is not None:
        return _captured(model, example)
    training, model, tracer = model.training, with_twins(copy_of(model)), Tracer()
    if classifies_in_training(model):
        model.train()  # torchvision's GoogLeNet and Inception call their auxiliary heads in training only
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ConfigError("model.name", type(model).__name__, _why(error, tracer)) from error
    _call_batch_norms(graph, model, model)
    names, auxiliary = _flatten_outputs(graph, model)
    graph_module = fx.GraphModule(model, graph, type(model).__name__)
    graph_module.meta["outputs"] = names
    inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    graph_module.meta["inputs"] = inputs if len(inputs) > 1 else ("input",)
    if auxiliary:
        _gather_outputs(graph_module)
    _read_results(graph_module)
    graph_module.train(training)
    name_sites(graph_module.graph)
    _drop_assertions(graph_module)
    return graph_module


def is_traced(model: nn.Module) -> bool:
    """Whether `model` is a graph of ours; one of others (a feature extractor) is a model like any other."""
    return isinstance(model, fx.GraphModule) and "outputs" in getattr(model, "meta", {})


@torch.inference_mode(False)  # whatever the caller is in: what is made here will be trained
def _captured(model: nn.Module, example: Example) -> fx.GraphModule:
    duplicate = with_twins(copy_of(model))
    graph_module = capture(duplicate, example)
    _call_batch_norms(graph_module.graph, duplicate, graph_module)
    # The auxiliary heads of torchvision's segmentation models, of GoogLeNet and of Inception.
    if getattr(model, "aux_classifier", None) is not None or classifies_in_training(model):
        if len(graph_module.meta["outputs"]) > 1:
            _gather_outputs(graph_module)
        graph_module.meta["outputs"] = ("output",)
    name_sites(graph_module.graph)
    tidy(graph_module)
    return graph_module.train(model.training)


def copy_of(model: nn.Module) -> nn.Module:
    """A copy; computed tensors (of weight_norm's hook, in a cache) are copied as values, what can't be is shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            inside = value.values() if isinstance(value, dict) else value
            for one in inside if isinstance(value, (dict, list, tuple)) else (value,):
                if isinstance(one, Tensor) and not one.is_leaf:
                    memo[id(one)] = one.detach().clone()
            if not isinstance(value, _COPIED) and not _can_be_copied(value):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def _can_be_copied(value: Any) -> bool:
    """Not a scripted function, a lock, a generator, whatever their own copy raises."""
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def _call_batch_norms(graph: fx.Graph, model: nn.Module, home: nn.Module) -> None:
    """F.batch_norm with the statistics of a BatchNorm whose type has a forward of its own (timm's calls its
    activation): that module of `model`, as the plain BatchNorm that it is derived from, is called instead, in `home`.
    """
    for node in [n for n in graph.nodes if n.target is F.batch_norm]:
        mean = node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")
        if not isinstance(mean, fx.Node) or mean.op != "get_attr":
            continue
        path = str(mean.target).rpartition(".")[0]
        module = model.get_submodule(path)
        kind = next((k for k in type(module).__mro__ if k in _BATCH_NORMS), None)
        if kind is not None and path:
            home.set_submodule(path, with_the_same_parameters(module, kind))
            with graph.inserting_before(node):
                new = graph.call_module(path, (node.all_input_nodes[0],))
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _flatten_outputs(graph: fx.Graph, model: nn.Module) -> tuple[tuple[str, ...], bool]:
    """Makes the output one node or a tuple of nodes; their names, and whether all but the first are auxiliary."""
    end = next(n for n in reversed(graph.nodes) if n.op == "output")
    found = end.args[0]
    if isinstance(found, fx.Node) and hasattr(found.target, "_fields"):  # a named tuple is made by a node
        found = found.args
    if isinstance(found, fx.Node):
        return ("output",), False
    if isinstance(found, Mapping):  # torchvision's segmentation models, feature pyramids
        names, nodes = tuple(map(str, found)), tuple(found.values())
    else:
        named = [(path, leaf) for path, leaf in leaves(found) if isinstance(leaf, fx.Node)]
        names, nodes = leaf_names(path for path, _ in named), tuple(leaf for _, leaf in named)
    auxiliary = has_auxiliary_heads(model, found)
    end.args = (nodes[0] if len(nodes) == 1 else nodes,)
    return (("output",) if len(nodes) == 1 or auxiliary else names), auxiliary and len(nodes) > 1


def _gather_outputs(graph_module: fx.GraphModule) -> None:
    end = next(n for n in reversed(graph_module.graph.nodes) if n.op == "output")
    graph_module.add_submodule("auxiliary_outputs", Outputs())
    with graph_module.graph.inserting_before(end):
        nodes = cast("tuple[fx.Node, ...]", end.args[0])
        end.args = (graph_module.graph.call_module("auxiliary_outputs", nodes),)
    graph_module.recompile()


def _read_results(graph_module: fx.GraphModule) -> None:
    """`x.add_(y); f(x)` → `x1 = x.add_(y); f(x1)`: torch.fx drops a call whose result nobody reads.

    Views of x that are read afterwards are not followed.
    """
    order = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        if not _in_place(node) or not node.all_input_nodes:
            continue
        written = node.all_input_nodes[0]
        for user in [u for u in written.users if order[u] > order[node]]:
            user.replace_input_with(written, node)


def _in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first input; `x += y` is left out, as its result is always read."""
    if node.op == "call_module":
        return bool(getattr(module_of(node), "inplace", False))
    name = called(node)
    return node.op in ("call_method", "call_function") and (
        node.kwargs.get("inplace") is True
        or op_class(node) == "shortcut"
        or (name.endswith("_") and not name.endswith("__"))
    )


def name_sites(graph: fx.Graph, prefix: str = "") -> None:
    """Writes `site` into the meta of every node that has none.

    The tracer's own record of modules goes: torch.export would read it, and it is wrong after `inline`.
    """
    # A module's path is its first call's name, whatever functions and second calls come before it.
    paths = [str(node.target).split(".") for node in graph.nodes if node.op == "call_module"]
    taken = {prefix + ".".join(parts[: i + 1]) for parts in paths for i in range(len(parts))}
    called_once: set[str] = set()
    named = graph_inputs(graph.owning_module) if graph.owning_module is not None else ("input",)
    inputs = itertools.chain(named, itertools.repeat("input"))
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None) or {}
        if node.op in ("call_module", "get_attr"):
            base = prefix + str(node.target)
        elif node.op == "placeholder":
            base = next(inputs)
        else:
            owner = list(stack.values())[-1][0] if stack else ""
            called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "op")
            base = prefix + ".".join(p for p in (owner, called.strip("_")) if p)
        if node.op != "call_module" or base in called_once:
            base = next(name for name in _numbered(base) if name not in taken)
        called_once.add(base)
        taken.add(node.meta.setdefault("site", base))


def _numbered(name: str) -> Iterator[str]:
    """`name`, `name`_1, `name`_2, ..."""
    yield name
    yield from (f"{name}_{i}" for i in itertools.count(1))


def propagate(graph_module: fx.GraphModule, example: Example) -> None:
    """Runs `example` in inference mode and leaves each node's result, on "meta", in its meta: shapes and types alone,
    so Convs and Linears need not be computed (`qatkit.graph.capture.sizes`).
    """

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            n.meta["value"] = result.to("meta") if isinstance(result, Tensor) else result
            return result

        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            drawn = drawn_output(self.fetch_attr(target), args, kwargs)
            return super().call_module(target, args, kwargs) if drawn is None else drawn

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            # Some functions (torchvision's Swin3d) write into the lists they are given.
            args = tuple(list(a) if isinstance(a, list) else a for a in args)
            return super().call_function(target, args, kwargs)

    with inference(graph_module):
        Recorder(graph_module).run(*flatten(example))


def inline(node: fx.Node, module: nn.Module, path: str = "", inputs: Sequence[Any] = ()) -> fx.Node:
    """Replaces a call of a leaf by the traced body of `module`, whose submodules live at the leaf's path.

    For a function `path` says where they live, beside what is there, and `inputs` what `module` is called with.
    """
    owner = node.graph.owning_module
    assert owner is not None
    path, inputs = path or str(node.target), inputs or node.args
    tracer = Tracer()
    tracer.proxy_buffer_attributes = True  # what a twin computes from its buffers is part of the graph
    body = tracer.trace(module)
    name_sites(body, f"{path}.")
    placeholders = [n for n in body.nodes if n.op == "placeholder"]
    value_map: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with node.graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "output":
                break
            if inner.op != "placeholder":
                new = node.graph.node_copy(inner, lambda n: value_map[n])
                if inner.op in ("call_module", "get_attr"):
                    new.target = f"{path}.{inner.target}"
                value_map[inner] = new
    if node.op == "call_module":
        owner.set_submodule(path, module)
    else:
        _adopt(owner.get_submodule(path), module)
    result: fx.Node = value_map[inner.args[0]]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return result


def _adopt(home: nn.Module, module: nn.Module) -> None:
    """Hangs the children and buffers of `module` into `home`."""
    for name, child in module.named_children():
        home.add_module(name, child)
    for name, value in module.named_buffers(recurse=False):
        home.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


def tidy(graph_module: fx.GraphModule) -> None:
    """Drops dead nodes and the modules nobody calls, and writes the code anew."""
    for node in reversed(list(graph_module.graph.nodes)):  # first what was read of a module that was replaced
        pure = node.op == "get_attr" or (node.op in ("call_function", "call_method") and not node.is_impure())
        if pure and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()


def _drop_assertions(graph_module: fx.GraphModule) -> None:
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target is torch._assert:
            graph_module.graph.erase_node(node)
    tidy(graph_module)


def _why(error: Exception, tracer: Tracer) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{'torch'}/fx/" not in f.filename]
    frames = [f for f in frames if "torch/nn/modules/module.py" not in f.filename and f.filename != __file__]
    where = f"{frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`" if frames else "an unknown line"
    stack = list(getattr(tracer, "module_stack", {}).values())
    inside = f"in module '{stack[-1][0]}' " if stack and stack[-1][0] else ""
    return f"cannot be traced {inside}at {where}: {str(error).splitlines()[0]}; {_HINT}"
