"""Traces an nn.Module into a torch.fx graph that all passes use, with the model's own modules as nodes.

Every node gets a `site`, its name in overrides, reports and ONNX tensors. For a module it is the module's path
("layer1.0.conv1"). For a function it is the enclosing module's path and the operator ("layer1.0.add"; a second one
in the same module is "layer1.0.add_1").
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.capture.free_axes import Wanted
from qatkit.graph.capture.model import capture
from qatkit.graph.capture.sizes import drawn_output
from qatkit.graph.closures import attributes_of, held_tensors, rebind
from qatkit.graph.nodes import OWNER, Outputs, outputs_in_inference
from qatkit.graph.phase import inference
from qatkit.graph.selectors import FILE_NODES, input_nodes
from qatkit.graph.signature import Example, flatten, graph_inputs
from qatkit.graph.untraceable import with_twins
from qatkit.quant.qat_layers import with_the_same_parameters

_COPIED = (bool, int, float, str, dict, list, tuple, set, Tensor, nn.Module, type(None))
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def trace(model: nn.Module, example: Example, dynamic_axes: Wanted = "none") -> fx.GraphModule:
    """Returns the graph of a copy of `model`, recorded as it runs on `example` (`qatkit.graph.capture`).

    If `model` is already such a graph, it is returned unchanged.

    Args:
        model: the model.
        example: an example input of the model.
        dynamic_axes: see `qatkit.graph.capture.model.capture`.

    Raises:
        ConfigError: the model has control flow that depends on data (the message names the module and the line), or
            the model or an axis of `dynamic_axes` fails as described at `capture`.
    """
    return cast(fx.GraphModule, model) if is_traced(model) else _captured(model, example, dynamic_axes)


def is_traced(model: nn.Module) -> bool:
    """Returns whether `trace` made `model`; other graphs, such as feature extractors, are ordinary models."""
    return isinstance(model, fx.GraphModule) and "outputs" in getattr(model, "meta", {})


@torch.inference_mode(
    False
)  # tensors made here will be trained, so the caller's inference mode must not apply
def _captured(model: nn.Module, example: Example, dynamic_axes: Wanted) -> fx.GraphModule:
    duplicate = with_twins(copy_of(model))
    graph_module = capture(duplicate, example, dynamic_axes)
    _call_batch_norms(graph_module.graph, duplicate, graph_module)
    of_file = getattr(model, FILE_NODES, None)
    if of_file is not None:
        inputs = input_nodes(graph_module.meta["inputs"], getattr(model, "inputs", ()))
        graph_module.meta[FILE_NODES] = {**inputs, **of_file}
    names = graph_module.meta["outputs"]
    kept = outputs_in_inference(model, names)
    if kept is not None and len(names) > kept:
        _gather_outputs(graph_module, kept)
    if kept is not None:
        graph_module.meta["outputs"] = ("output",) if kept == 1 else names[:kept]
    name_sites(graph_module.graph)
    tidy(graph_module)
    return graph_module.train(model.training)


def copy_of(model: nn.Module) -> nn.Module:
    """Returns a copy of a model.

    Computed tensors (such as those of weight_norm's hook, or in a cache) are copied as values, and objects that can't
    be copied are shared. The copy's hooks and other functions refer to the copy.
    """
    memo = what_copies_share(model)
    copied = copy.deepcopy(model, memo)
    rebind(model, copied, memo)
    return copied


def what_copies_share(model: nn.Module) -> dict[int, Any]:
    """Returns the memo for `copy.deepcopy` with copies of computed tensors and the objects to share (`copy_of`)."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in attributes_of(module).values():
            memo |= {id(one): one.detach().clone() for one in held_tensors(value) if not one.is_leaf}
            if not isinstance(value, _COPIED) and not _can_be_copied(value, memo):
                memo[id(value)] = value
    return memo


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    """Returns whether a value can be copied; scripted functions, locks and generators, for example, cannot."""
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _call_batch_norms(graph: fx.Graph, model: nn.Module, home: nn.Module) -> None:
    """Replaces calls of F.batch_norm with a BatchNorm's statistics by module calls.

    Such calls come from subclasses of BatchNorm with a forward of their own (timm's). The called module is added to
    `home`; it is the BatchNorm of `model` converted to the plain type from which it is derived.
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


def _gather_outputs(graph_module: fx.GraphModule, kept: int) -> None:
    end = next(n for n in reversed(graph_module.graph.nodes) if n.op == "output")
    graph_module.add_submodule("auxiliary_outputs", Outputs(kept))
    with graph_module.graph.inserting_before(end):
        nodes = cast("tuple[fx.Node, ...]", end.args[0])
        end.args = (graph_module.graph.call_module("auxiliary_outputs", nodes),)
    graph_module.recompile()


def name_sites(graph: fx.Graph, prefix: str = "") -> None:
    """Writes `site` into the meta of every node that has none, and `OWNER` if it is inside a one-operator module.

    A one-operator module has a type with `one_operator = True`, and its first node has the module's name. The tracer's
    own record of modules is removed, since torch.export would read it and it is wrong after nodes were inlined.
    """
    # The path of a module is the name of its first call, even if functions and second calls come before it.
    paths = [str(node.target).split(".") for node in graph.nodes if node.op == "call_module"]
    taken = {prefix + ".".join(parts[: i + 1]) for parts in paths for i in range(len(parts))}
    called_once: set[str] = set()
    named = graph_inputs(graph.owning_module) if graph.owning_module is not None else ("input",)
    inputs = itertools.chain(named, itertools.repeat("input"))
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None) or {}
        whole = next((prefix + path for path, kind in stack.values() if _is_one_operator(kind)), "")
        if whole:
            node.meta.setdefault(OWNER, whole)
        if node.op in ("call_module", "get_attr"):
            base = prefix + str(node.target)
        elif node.op == "placeholder":
            base = next(inputs)
        else:
            owner, kind = list(stack.values())[-1] if stack else ("", None)
            called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "op")
            first = _is_one_operator(kind) and prefix + owner not in taken
            parts = (owner,) if first else (owner, called.strip("_"))
            base = prefix + ".".join(p for p in parts if p)
        if node.op != "call_module" or base in called_once:
            base = next(name for name in _numbered(base) if name not in taken)
        called_once.add(base)
        taken.add(node.meta.setdefault("site", base))


def _is_one_operator(kind: Any) -> bool:
    return bool(getattr(kind, "one_operator", False))


def _numbered(name: str) -> Iterator[str]:
    """Yields the names NAME, NAME_1, NAME_2, ... for a given name."""
    yield name
    yield from (f"{name}_{i}" for i in itertools.count(1))


def propagate(graph_module: fx.GraphModule, example: Example) -> None:
    """Runs `example` in inference mode and stores each node's result, on the meta device, in the node's meta.

    Only shapes and types are kept, so Convs and Linears need not be computed (`qatkit.graph.capture.sizes`).
    """

    class MetaRecorder(fx.Interpreter):
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
        MetaRecorder(graph_module).run(*flatten(example))


def tidy(graph_module: fx.GraphModule) -> None:
    """Removes dead nodes and modules that are not called, and generates the code again."""
    for node in reversed(list(graph_module.graph.nodes)):  # erase the readers of a replaced module first
        pure = node.op == "get_attr" or (node.op in ("call_function", "call_method") and not node.is_impure())
        if pure and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
