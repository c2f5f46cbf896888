"""Finds what a model does only in training: functional dropout, custom noise and stochastic depth.

The graph is recorded in inference mode, where functional dropout is off. One run in training mode shows which dropout
calls depend on the model's mode. These become modules of the graph, which are on in training. Random numbers that a
model draws elsewhere in training can't be part of the graph, and are reported.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qatkit.graph.capture.calls import DROPOUTS, dropout_arguments, is_random, where
from qatkit.graph.capture.run import is_leaf, kept_buffers
from qatkit.graph.capture.sizes import drawn_output
from qatkit.graph.signature import Example, call

Place = tuple[str, int]
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class TrainingOnly(nn.Module):
    """Calls a module in training only (stochastic depth, custom noise); returns the input in inference."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x)) if self.training else x


class _Watcher(TorchFunctionMode):
    """A mode that records the rates of functional dropouts and of attention's dropouts by line.

    It also records the lines that draw other random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[Place, list[float]] = defaultdict(list)
        self.random: list[Place] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            given = dropout_arguments(func, args, kwargs)
            self.rates[where()].append(given["p"] if given["training"] else 0.0)
        elif func is F.scaled_dot_product_attention:
            self.rates[where()].append(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        elif is_random(func, args, kwargs) and where() not in self.random:
            self.random.append(where())
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)


def watch(
    model: nn.Module, example: Example, only_training: set[str], drawn: set[str]
) -> tuple[dict[Place, list[float]], list[Place], set[str], set[str]]:
    """Runs `model` once in training mode, with its norms in inference mode.

    The model's state is restored. If the model can't be run in this way, for example because it needs targets, all
    results but the third are empty.

    Args:
        model: the model.
        example: an example input of the model.
        only_training: paths of modules that return their input in inference.
        drawn: paths of modules whose outputs may be drawn instead of computed (`drawn_output`).

    Returns:
        The rates of functional dropouts by line, the lines that draw other random numbers, the paths in
        `only_training` of modules that change the shape of their input, and the names of buffers that change,
        except those of leaves.
    """
    watcher, reshaping = _Watcher(), set[str]()
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.eval()
    quiet = {id(model.get_submodule(path)): path for path in only_training}
    valueless = {id(model.get_submodule(path)) for path in drawn}
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            kept_buffers(model) as changed,
            _leaves_apart(quiet, reshaping, valueless),
            watcher,
        ):
            call(model, example)
    except Exception:  # a forward may raise anything without the targets that it needs in training
        return {}, [], reshaping, set()
    finally:
        for module, mode in modes:
            module.training = mode
    leaves = tuple(f"{path}." for path, module in model.named_modules() if path and is_leaf(module, (), {}))
    own = {name for name in changed if not name.startswith(leaves)}
    return dict(watcher.rates), watcher.random, reshaping, own


@contextlib.contextmanager
def _leaves_apart(quiet: Mapping[int, str], reshaping: set[str], valueless: set[int]) -> Iterator[None]:
    """Keeps the watcher from seeing calls inside leaves and the modules in `quiet`, since they stay modules.

    A module in `quiet` that changes the shape of its input is added to `reshaping`. Outputs of the modules in
    `valueless` may be drawn at random instead of computed.
    """
    original = nn.Module.__call__

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in quiet or is_leaf(module, args, kwargs):
            with torch._C.DisableTorchFunction():
                drawn = drawn_output(module, args, kwargs) if id(module) in valueless else None
                result = original(module, *args, **kwargs) if drawn is None else drawn
                if id(module) in quiet and getattr(result, "shape", None) != args[0].shape:
                    reshaping.add(quiet[id(module)])
                return result
        return original(module, *args, **kwargs)

    nn.Module.__call__ = module_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def drop_reshaping(graph_module: fx.GraphModule, reshaping: set[str]) -> list[tuple[str, str]]:
    """Removes modules that change their input's shape in training (such as patch dropout); returns notes on them."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and node.target in reshaping:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    reason = "changes the shape of its input in training, which the graph and fine-tuning leave out"
    return [(path, reason) for path in sorted(reshaping)]


def follow_mode(graph_module: fx.GraphModule, rates: dict[Place, list[float]]) -> list[Place]:
    """Turns functional dropouts into modules, and removes those that are off in training mode too.

    A dropout that is on in inference too stays. If `rates` is empty (the model could not be run in training
    mode), each dropout becomes a module with the rate of its call. The node of a scaled_dot_product_attention
    gets the rate of its dropout as `meta["dropout"]`.

    Returns the lines of dropouts that are called only in training, so that the graph lacks them.
    """
    left = {place: list(found) for place, found in rates.items()}
    for node in list(graph_module.graph.nodes):
        attention = node.target is F.scaled_dot_product_attention
        if node.op != "call_function" or not (attention or node.target in DROPOUTS):
            continue
        if not attention and node.args[2:] != (False,):
            continue  # it is on in inference too
        found = left.get(node.meta.get("where", ("", 0)), [])
        rate = found.pop(0) if found else (0.0 if rates or attention else node.args[1])
        if attention:
            node.meta["dropout"] = rate
            continue
        if rate:
            stack = list(node.meta["nn_module_stack"].values())
            path = _free(graph_module, ".".join(p for p in (stack[-1][0] if stack else "", "dropout") if p))
            graph_module.add_submodule(path, DROPOUTS[node.target](rate))
            with graph_module.graph.inserting_before(node):
                new = graph_module.graph.call_module(path, (node.args[0],))
            new.meta |= node.meta
            node.replace_all_uses_with(new)
        else:
            node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
    return [place for place, found in left.items() if any(found)]


def _free(graph_module: fx.GraphModule, path: str) -> str:
    """Returns `path`, with a number appended if the graph already has a module at this path."""
    taken, number, found = {name for name, _ in graph_module.named_modules()}, 0, path
    while found in taken:
        number += 1
        found = f"{path}_{number}"
    return found
