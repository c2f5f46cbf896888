"""Proof of a capture: checks that the graph, fused and opened, computes what the model computes.

Both run in inference mode on batches with other sizes and values than the graph was recorded with: a batch of
four, and a batch of one, which many models treat specially. Fused and opened operators round differently, and a
deep model may amplify that. If a difference could be due to rounding or to a wrong graph, both run in float64, where
rounding errors are far smaller than the effect of a wrong graph. A copy of the model runs, so that the model's state
stays unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from qatkit.graph.capture.axis_sizes import FreeAxis
from qatkit.graph.capture.differences import relative_difference
from qatkit.graph.capture.free_axes import with_sizes
from qatkit.graph.capture.run import plain_contexts
from qatkit.graph.capture.training_paths import PATHS, follow_paths
from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import site
from qatkit.graph.phase import inference
from qatkit.graph.signature import (
    Example,
    batch_multiple,
    batch_size,
    call,
    flatten,
    is_whole,
    other_values,
    output_leaves,
    resized,
    unflatten,
)
from qatkit.graph.stub import stub
from qatkit.graph.trace import copy_of, is_traced, trace
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import described

_SIZES = (4, 1)  # batch sizes that differ from those of the recording, 2 and 3
_LARGE = (
    2**20
)  # from this many values per sample, only a batch of one is compared: four samples take gigabytes
_SURELY_ROUNDING = 2e-5  # up to this difference, relative to the largest output, it is rounding in float32
_ROUNDING = 1e-7  # the same in float64, with parameters that come from float32
_PERHAPS_ROUNDING = 1e-3  # the same where float64 is not available
_SMALL = 1e-12  # relative change of the inputs
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FOLDED_INTO = (nn.modules.conv._ConvNd, nn.Linear)  # in a fused graph their own outputs do not exist
_HINT = "rewrite that code with torch functions of tensors, or quantize the parts around it (qatkit.Parts)"


def prove(model: nn.Module, graph_module: fx.GraphModule, example: Example) -> None:
    """Compares a graph with its model on a batch of four, unless samples are large, and on a batch of one.

    A graph for one batch size is compared at that size. Nothing is compared if `model` is a traced graph
    itself.

    Args:
        model: the model that was captured; it stays unchanged.
        graph_module: its fused and stubbed graph.
        example: an example input of the model.

    Raises:
        ConfigError: the model fails on these batches, or the outputs differ by more than rounding; the
            message then names the first module whose output differs, if there is one.
    """
    if is_traced(model):
        return
    for tensors, largest in _differences(model, graph_module, example):
        if largest > _SURELY_ROUNDING:
            _look_closely(model, graph_module, example, tensors)


def _differences(
    model: nn.Module, graph_module: fx.GraphModule, example: Example
) -> Iterator[tuple[tuple[Tensor, ...], float]]:
    """Yields inputs that the model accepts, each with the difference between the outputs of graph and model.

    Raises:
        ConfigError: the model fails even if the whole numbers in its inputs keep their order.
    """
    for tensors, alike in _others(flatten(example), graph_module):
        try:
            yield tensors, _difference(model, graph_module, example, tensors)
            continue
        except _NotTakenError:  # the model does not accept the shuffled whole numbers
            pass
        try:
            yield alike, _difference(model, graph_module, example, alike)
        except _NotTakenError as error:
            sizes = ", ".join(str(list(one.shape)) for one in alike)
            reason = (
                f"the model failed on inputs like the example, of shapes {sizes} ({described(error.error)})"
            )
            raise ConfigError("model.name", type(model).__name__, reason=reason) from error


def _look_closely(
    model: nn.Module, graph_module: fx.GraphModule, example: Example, tensors: tuple[Tensor, ...]
) -> None:
    """Compares the graph and the model in float64, and if they still differ, a new graph with float64 constants.

    Raises:
        ConfigError: the outputs differ by more than rounding.
    """
    exact, graph, bound = copy_of(model).double(), copy.deepcopy(graph_module).double(), _ROUNDING
    doubles = _doubles(tensors)
    wide = unflatten(example, _doubles(flatten(example)))
    try:
        with _in_float64():
            largest = _difference(exact, graph, wide, doubles)
    except (RuntimeError, TypeError):  # an operator without float64
        exact, graph, doubles, wide, bound = copy_of(model), graph_module, tensors, example, _PERHAPS_ROUNDING
        largest = _difference(exact, graph, wide, doubles)
    with _in_float64() if doubles is not tensors else contextlib.nullcontext():
        respond = functools.partial(_response, exact, wide, doubles)
        if largest > bound and largest <= max(
            _PERHAPS_ROUNDING, 10 * respond(torch.finfo(torch.float32).eps)
        ):
            second = stub(fuse(exact, wide, depthwise=True).graph, wide).graph
            largest = _difference(exact, second, wide, doubles)
            if largest > bound:
                bound = max(bound, 1e3 * torch.finfo(torch.float64).eps * respond(_SMALL) / _SMALL)
        where = _first_difference(exact, graph, wide, doubles) if largest > bound else ""
    if where:
        found = f"by up to {100 * largest:.2g} % of the output with a batch of {batch_size(tensors)}, {where}"
        reason = f"the captured graph and the model give different outputs ({found}); {_HINT}"
        raise ConfigError("model.name", type(model).__name__, reason=reason)


def _response(model: nn.Module, example: Example, tensors: tuple[Tensor, ...], change: float) -> float:
    """Returns how far the outputs move when each value of the inputs changes by the relative amount `change`.

    BatchNorms with small variances amplify a change, and thus rounding errors too, a million times or more.
    """
    generator = torch.Generator().manual_seed(0)
    moved = tuple(
        t * (1 + change * torch.randn(t.shape, generator=generator))
        if t.is_floating_point() and not is_whole(t)
        else t
        for t in tensors
    )
    before, after = (_of_model(model, example, given) for given in (tensors, moved))
    return max(relative_difference(a, b) for a, b in zip(before, after, strict=True))


class _Wide(TorchFunctionMode):
    """A mode in which calls that ask for float32 get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*_widened(args), **{key: _widened(one) for key, one in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(value, value)
    return tuple(map(_widened, value)) if type(value) is tuple else value


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Makes a model compute in float64 even where its code names float32, and turns autocast off."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with plain_contexts(set()), _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def _doubles(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in tensors)


def _others(
    tensors: tuple[Tensor, ...], graph_module: fx.GraphModule
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yields pairs of inputs with other sizes and values: with whole numbers shuffled, and with them kept.

    A graph for one batch size gets inputs of that size.
    """
    axes = graph_module.meta.get("batch_axes", (0,) * len(tensors))
    multiple = batch_multiple(graph_module)
    sizes: tuple[int, ...] = (batch_size(tensors),)
    if any(axis is not None for axis in axes):
        large = sum(one.numel() for one in tensors) // batch_size(tensors, axes) >= _LARGE
        sizes = _SIZES[-1:] if large else _SIZES
    free: Sequence[FreeAxis] = graph_module.meta.get("free_axes", ())
    for seed, size in enumerate(sizes, start=1):
        changed = {place: axis.others[-seed % len(axis.others)] for axis in free for place in axis.places}
        given = with_sizes(resized(tensors, size * multiple, axes), changed)
        yield other_values(given, seed=seed), other_values(given, seed=seed, whole=False)


class _NotTakenError(RuntimeError):
    """An error of the model on randomly drawn inputs."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _difference(
    model: nn.Module, graph: fx.GraphModule, example: Example, tensors: Sequence[Tensor]
) -> float:
    """Returns the largest `relative_difference` between outputs of the model and of the graph.

    Raises:
        _NotTakenError: the model fails on these inputs.
    """
    model = copy_of(model)
    eager = torch.compiler.set_stance("force_eager")
    with inference(model), inference(graph), warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")
        follow_paths(model, graph.meta.get(PATHS, ()))  # the capture has compared the merged copies
        try:
            _, expected, _ = output_leaves(call(model, unflatten(example, [t.clone() for t in tensors])))
        except Exception as error:  # a forward may raise anything
            raise _NotTakenError(error) from error
        found = graph(*(t.clone() for t in tensors))
    found = found if isinstance(found, tuple) else (found,)
    return max(relative_difference(a, b) for a, b in zip(expected, found, strict=False))


def _of_model(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the outputs of a copy of the model, since a call may change the model's state."""
    model = copy_of(model)
    with inference(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return output_leaves(call(model, unflatten(example, [t.clone() for t in tensors])))[1]


def _first_difference(
    model: nn.Module, given: fx.GraphModule, example: Example, tensors: Sequence[Tensor]
) -> str:
    """Returns where outputs first differ: in which module of a new graph or of the given one, or between modules."""
    expected = list(_outputs(copy_of(model), example, tensors))
    for graph in (trace(model, example), given):
        values = _values(graph, tensors)
        folded = {path for path, module in model.named_modules() if isinstance(module, _NORMS)} - set(values)
        for path, output in expected:
            within = [v for name, found in values.items() if _lies_in(name, path) for v in found]
            if folded and isinstance(model.get_submodule(path), _FOLDED_INTO):
                continue
            if (
                within
                and isinstance(output, Tensor)
                and all(relative_difference(output, v) > _ROUNDING for v in within)
            ):
                return f"first in module '{path}'"
    return "not inside a single module, but between modules, or where they are fused or opened"


def _lies_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _values(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Returns the outputs of the nodes by site, one output per call."""
    values: dict[str, list[Tensor]] = defaultdict(list)

    class NodeOutputs(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op != "get_attr":
                values[site(n)].append(result)
            return result

    with inference(graph):
        NodeOutputs(graph).run(*(t.clone() for t in tensors))
    return values


def _outputs(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    """Yields the output of each module's first call, in the order of the calls."""
    seen: dict[str, Any] = {}
    handles = [
        module.register_forward_hook(lambda _m, _x, y, path=path: seen.setdefault(path, y))
        for path, module in model.named_modules()
        if path
    ]
    try:
        with inference(model):
            call(model, unflatten(example, [t.clone() for t in tensors]))
    finally:
        for handle in handles:
            handle.remove()
    yield from seen.items()
