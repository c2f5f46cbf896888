"""Finds blocks that use one path in training and another in evaluation, and parameters used only in training.

A re-parameterized block evaluates with a merged copy of its branches, which is often frozen (`eval_conv` of SPAN). A
graph recorded in inference mode has the copy, and nothing would ever train the branches. Therefore:

1. A run in training mode finds parameters that get a gradient from the outputs and are not in the graph.
2. A block is the innermost module around such a parameter that inference mode calls too.
3. If both paths of a block give the same outputs, the block is recorded in training mode, and the modules inside it
   in inference mode. Otherwise (auxiliary heads) a note names its parameters.

A model whose graph has all parameters that require gradients needs no run in training mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from qatkit.graph.capture.differences import relative_difference
from qatkit.graph.capture.run import kept_buffers, plain_contexts
from qatkit.graph.nodes import called
from qatkit.graph.signature import Example, call, flatten, leaves, unflatten

PATHS = "training_paths"  # in a graph's meta: the paths of the blocks that were recorded in training mode
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_WITHOUT_GRADIENT = ("detach", "detach_", "data")
_ROUNDING = 1e-4  # largest difference between two paths of a block in float32, relative to the largest output
_NAMED = 4  # number of modules that a note names
_ALONE = "used only in the model's training mode, which the graph and fine-tuning leave out"


@dataclass(frozen=True)
class TrainingPaths:
    """The findings of a run in training mode.

    Attributes:
        around: for each parameter that only training mode uses, the path of the innermost module around it that
            inference mode calls too.
        differences: for each of these modules, the relative difference between the outputs of its two paths;
            infinite if its training path fails or returns tensors of another number or shape.
        blocks: paths of the modules whose graph is to be recorded in training mode.
    """

    around: Mapping[str, str]
    differences: Mapping[str, float]
    blocks: tuple[str, ...]


def missing_parameters(model: nn.Module, graph: fx.Graph) -> dict[str, nn.Parameter]:
    """Returns the parameters of `model`, by name, that require gradients and get none in its recorded `graph`."""
    read: set[int] = set()
    for node in _before(next(iter(reversed(graph.nodes)))):
        path = str(node.target)
        if node.op == "call_module":
            read.update(map(id, model.get_submodule(path).parameters()))
        elif node.op == "get_attr":
            owner, _, name = path.rpartition(".")
            read.add(id(getattr(model.get_submodule(owner), name, None)))
    return {name: one for name, one in model.named_parameters() if one.requires_grad and id(one) not in read}


def _before(end: fx.Node) -> set[fx.Node]:
    """Returns the nodes that get a gradient from `end`."""
    found, left = set[fx.Node](), [end]
    while left:
        node = left.pop()
        if node not in found and called(node) not in _WITHOUT_GRADIENT:
            found.add(node)
            left += node.all_input_nodes
    return found


def training_paths(model: nn.Module, example: Example, missing: Mapping[str, nn.Parameter]) -> TrainingPaths:
    """Runs `model` in both modes and leaves it in inference mode; the findings are empty if `missing` is.

    Args:
        model: the model.
        example: an example input of the model.
        missing: the parameters that the graph of inference mode does not train, by name.
    """
    if not missing:
        return TrainingPaths({}, {}, ())
    reached = _reached(model, example, missing)
    _evaluate(model)
    around = _blocks(model, example, reached)
    differences = _differences(model, example, set(around.values())) if around else {}
    _evaluate(model)
    blocks = tuple(path for path, found in differences.items() if found <= _ROUNDING)
    return TrainingPaths(around, differences, blocks)


def follow_paths(model: nn.Module, blocks: Collection[str]) -> None:
    """Puts the modules at `blocks` into training mode, but not norms or the other modules inside them."""
    for path in sorted(blocks, key=len):  # outer modules before the modules that they contain
        block = model.get_submodule(path).train()
        for module in block.modules():
            if module is not block or isinstance(module, _NORMS):
                module.training = False


def notes_of_paths(model: nn.Module, paths: TrainingPaths, missing: Collection[str]) -> list[tuple[str, str]]:
    """Returns notes (modules, reason) on the parameters that stay out of the graph.

    One note is for parameters of modules whose two paths give different outputs of the same shape, and one
    for all others. A note without parameters is left out.

    Args:
        model: the model.
        paths: the findings of the run in training mode.
        missing: names of the parameters that the final graph lacks.
    """
    apart = [name for name in paths.around if name in missing]
    gaps = {name: paths.differences[paths.around[name]] for name in apart}
    inexact = [name for name in apart if _ROUNDING < gaps[name] < float("inf")]
    by_far = [name for name in apart if name not in inexact]
    largest = max((gaps[name] for name in inexact), default=0.0)
    found = []
    for names, reason in (
        (by_far, _ALONE),
        (inexact, f"{_ALONE}; the part used in evaluation differs by {100 * largest:.1g} % of the output"),
    ):
        groups = _groups(model, names)
        if groups:
            found.append((listed(groups), reason))
    return found


def listed(names: Sequence[str]) -> str:
    """Returns the first names as text, followed by the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _evaluate(model: nn.Module) -> None:
    model.train()  # some modules merge their branches when they leave training mode
    model.eval()


def _reached(model: nn.Module, example: Example, missing: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the names of parameters in `missing` that get a gradient from the outputs in training mode.

    There are none if the model can't be run in this way, for example because it needs targets.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.training = False
    try:
        with _apart(model), torch.enable_grad():
            outputs = _leaves(call(model, _copied(example)))
            total = sum(one.float().sum() for one in outputs if one.requires_grad)
            given = torch.autograd.grad(total, list(missing.values()), allow_unused=True)  # type: ignore[arg-type]
    except Exception:  # a forward may raise anything without the targets that it needs in training
        return []
    return [name for name, one in zip(missing, given, strict=True) if one is not None]


def _blocks(model: nn.Module, example: Example, names: Iterable[str]) -> dict[str, str]:
    """Returns, for each parameter, the path of the innermost module around it that inference mode calls."""
    called = {id(model)}

    def note(module: nn.Module, _: Any) -> None:
        called.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        with _apart(model), torch.no_grad():
            call(model, _copied(example))
    finally:
        handle.remove()
    found = {}
    for name in names:
        path = name.rpartition(".")[0]
        while id(model.get_submodule(path)) not in called:
            path = path.rpartition(".")[0]
        found[name] = path
    return found


def _differences(model: nn.Module, example: Example, paths: Collection[str]) -> dict[str, float]:
    """Returns, for each called module, the relative difference between the outputs of its two paths.

    Both paths get the inputs of the module's first call. The difference is infinite if the training path
    fails or returns tensors of another number or shape.
    """
    given: dict[str, tuple[Any, Any]] = {}
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:

            def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                given.setdefault(path, _cloned((args, kwargs)))

            def after(_: nn.Module, __: Any, ___: Any, result: Any, path: str = path) -> None:
                results.setdefault(path, _cloned(result))

            module = model.get_submodule(path)
            stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
        stack.enter_context(_apart(model))
        stack.enter_context(torch.no_grad())
        call(model, _copied(example))
    return {path: _difference(model, path, *given[path], results[path]) for path in sorted(results)}


def _difference(model: nn.Module, path: str, args: Any, kwargs: Any, expected: Any) -> float:
    follow_paths(model, [path])
    try:
        with _apart(model), torch.no_grad():
            found = _leaves(model.get_submodule(path)(*args, **kwargs))
    except Exception:  # a forward may raise anything in training
        return float("inf")
    wanted = _leaves(expected)
    if len(found) != len(wanted):
        return float("inf")
    return max((relative_difference(*pair) for pair in zip(wanted, found, strict=True)), default=0.0)


@contextlib.contextmanager
def _apart(model: nn.Module) -> Iterator[None]:
    """Runs code without side effects on buffers and on the state of random generators."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("force_eager"),
        plain_contexts(set()),
        kept_buffers(model),
    ):
        yield


def _copied(example: Example) -> Any:
    return unflatten(example, [tensor.clone() for tensor in flatten(example)])


def _cloned(value: Any) -> Any:
    """Copies the tensors in `value`, since a module may change its arguments in place."""
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _leaves(value: Any) -> list[Tensor]:
    return [one for _, one in leaves(value) if isinstance(one, Tensor)]


def _groups(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the outermost modules with no other trainable parameters than `names`.

    A parameter that is in no such module is returned by its own name.
    """
    others = [n for n, one in model.named_parameters() if one.requires_grad and n not in names]
    found = []
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        found.append(next(path for path in paths if not any(_lies_in(n, path) for n in others)))
    return list(dict.fromkeys(found))


def _lies_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
