"""A model becomes a GraphModule that computes what it computes, for any size of the batch and any values.

two runs under the recorder      batches of 2 and of 3, other values
→ one graph                      sizes that differ are functions of the batch's
→ constants                      what depends on no input and no parameter is a buffer
→ training                       functional dropout is a module, as one run in training mode says
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.attention import self_attention
from qatkit.graph.attention.self_attention import unusual_call
from qatkit.graph.capture.batch import merge
from qatkit.graph.capture.batch_axes import independent_axes
from qatkit.graph.capture.calls import IN_TRAINING, RANDOM, UntraceableError
from qatkit.graph.capture.complex_numbers import open_complex
from qatkit.graph.capture.free_axes import FreeAxes, FreeAxis, Wanted
from qatkit.graph.capture.image_kernels import open_image_kernels
from qatkit.graph.capture.notes import code_at, notes_of, notes_of_opaque, notes_of_state
from qatkit.graph.capture.pieces import may_halve
from qatkit.graph.capture.run import Recording, kept_buffers, record
from qatkit.graph.capture.training import TrainingOnly, drop_reshaping, follow_mode, watch
from qatkit.graph.nodes import classifies_in_training
from qatkit.graph.signature import (
    Example,
    batch_axes,
    batch_size,
    call,
    flatten,
    input_names,
    is_whole,
    other_values,
    output_leaves,
    resized,
    unflatten,
)
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import described

SIZES: tuple[int, int] = (2, 3)
Axes = tuple[int | None, ...]
Recorded = tuple[Recording, frozenset[str], tuple[int, ...], Axes]  # as `_recorded` returns it
_PARTS = "or quantize the parts around it (qatkit.Parts)"


def capture(model: nn.Module, example: Example, dynamic_axes: Wanted = "none") -> fx.GraphModule:
    """The graph of `model`, which is changed: hand over a copy.

    Its meta has `inputs` and `outputs` (names), `batch_axes` (one an input; all None for a model that takes the
    example's batch size alone), `free_axes` (those of `dynamic_axes` that are), `notes`, what a reader of the report
    should know, and `read_values`, whether the graph depends on values that the model's tensors had.

    Args:
        dynamic_axes: which axes beside the batch the graph takes other sizes of: "auto" for those that the model
            leaves free, "none", or names of axes by input.

    Raises:
        ConfigError: a line of the model depends on values of its inputs; names the module and the line. An axis that
            was asked for is not free.
    """
    _check(model)
    names, tensors = input_names(model, example), flatten(example)
    try:
        return _captured(model, example, names, tensors, dynamic_axes)
    except UntraceableError as error:
        raise ConfigError("model.name", type(model).__name__, reason=_line(error)) from error


def _check(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            allowed = (
                f"the Python module, not TorchScript ('{path}')"
                if path
                else "the Python module, not TorchScript"
            )
            raise ConfigError("model.name", type(model).__name__, allowed)


def _captured(
    model: nn.Module,
    example: Example,
    names: Sequence[str],
    tensors: tuple[Tensor, ...],
    dynamic_axes: Wanted,
) -> fx.GraphModule:
    one, opened, sizes, axes = _recorded_by_multiples(model, example, names, tensors)
    free: list[FreeAxis] = []
    about_sizes: list[tuple[str, str]] = []
    if dynamic_axes != "none":
        search = _free_axes(model, example, (names, tensors), opened, (sizes, axes), dynamic_axes)
        other, free = search.run()
        one, about_sizes = other or one, search.notes
    given = unflatten(example, resized(tensors, sizes[0], axes) if sizes else tensors)
    rates, random, reshaping, kept = watch(model, given, one.only_training, one.drawn)
    graph_module = _module(model, one)
    random += follow_mode(graph_module, rates)
    reshaped = drop_reshaping(graph_module, reshaping)
    fold_constants(graph_module)
    open_complex(graph_module)
    graph_module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    _refuse_random(graph_module, one)
    graph_module.meta |= {
        "inputs": tuple(names),
        "outputs": one.outputs,
        "batch_axes": axes if sizes else (None,) * len(axes),
        "free_axes": tuple(free),
        "batch_multiple": sizes[1] - sizes[0] if sizes else 1,
        "notes": notes_of(one, random, sizes)
        + about_sizes
        + reshaped
        + notes_of_state(graph_module, one, kept)
        + notes_of_opaque(graph_module),
        "read_values": one.read_values,
    }
    for node in graph_module.graph.nodes:  # paths of this machine have no place in a checkpoint
        node.meta.pop("where", None)
    graph_module.recompile()
    return graph_module


def _recorded_by_multiples(
    model: nn.Module, example: Example, names: Sequence[str], tensors: tuple[Tensor, ...]
) -> Recorded:
    """The recording for any batch, else for multiples of a divisor of the example's, else for the example's alone."""
    found: Recorded | UntraceableError
    try:
        found = _recorded_twice(model, example, names, tensors)
    except UntraceableError as error:
        found = error
    some = not isinstance(found, UntraceableError) and bool(found[2])
    if not isinstance(found, UntraceableError) and some and not found[0].shares:
        return found
    images = batch_size(tensors, batch_axes(tensors))
    for factor in [number for number in range(2, images + 1) if images % number == 0]:
        with contextlib.suppress(UntraceableError, ConfigError):
            other = _recorded(model, example, names, tensors, factor)
            if other[2] and (other[0].shares or not some):
                return other
    if isinstance(found, UntraceableError):
        raise found
    return found


def _recorded_twice(
    model: nn.Module, example: Example, names: Sequence[str], tensors: tuple[Tensor, ...]
) -> Recorded:
    try:
        return _recorded(model, example, names, tensors)
    except UntraceableError:
        # What a first run keeps for the next (tables of positions) is there in a second one; and code that asks
        # whether it is being compiled leaves out the short cuts that depend on values.
        with _compiling():
            return _recorded(model, example, names, tensors)


def _recorded(
    model: nn.Module, example: Example, names: Sequence[str], tensors: tuple[Tensor, ...], factor: int = 1
) -> Recorded:
    """The recording for any batch, what attention was opened, no sizes if the model takes the example's alone; and the
    batch axes.

    An axis that is as long as the batch by chance (of a mask of positions) is found by leaving it out.
    """
    known = _declared_axes(model, names)
    guesses = [known] if known else _guesses(batch_axes(tensors))
    if not known:
        _set_mode(model)
        found = independent_axes(tensors, functools.partial(_answers, model, example))
        guesses = guesses if found is None else [found, *guesses]
    first: Recorded | Exception | None = None
    for axes in guesses:
        try:
            one, opened, sizes = _recorded_along(axes, model, example, names, tensors, factor)
        except (UntraceableError, ConfigError) as error:
            first = first or error
            continue
        if sizes:
            return one, opened, sizes, axes
        first = first or (one, opened, sizes, axes)
    assert first is not None
    if isinstance(first, Exception):
        raise first
    return first


def _answers(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of the model, which is as it was afterwards."""
    with torch.no_grad(), kept_buffers(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return output_leaves(call(model, unflatten(example, [t.clone() for t in tensors])))[1]


def _declared_axes(model: nn.Module, names: Sequence[str]) -> Axes:
    """Returns the batch axis of each input of a model that knows them; empty for one that does not."""
    declared: Mapping[str, int | None] | None = getattr(model, "batch_axes", None)
    if not isinstance(declared, Mapping):
        return ()
    if len(names) == 1 and len(declared) == 1:
        return tuple(declared.values())
    return tuple(declared.get(name) for name in names)


def _guesses(axes: Axes) -> list[Axes]:
    """`axes`, all but one of them, and each alone."""
    given = [i for i, axis in enumerate(axes) if axis is not None]
    if len(given) < 2:
        return [axes]
    without = [[i for i in given if i != left] for left in reversed(given)]
    kept = [given, *without, *([i] for i in given)]
    found = [tuple(axis if i in one else None for i, axis in enumerate(axes)) for one in kept]
    return list(dict.fromkeys(found))


def _recorded_along(
    axes: Axes,
    model: nn.Module,
    example: Example,
    names: Sequence[str],
    tensors: tuple[Tensor, ...],
    factor: int,
) -> tuple[Recording, frozenset[str], tuple[int, ...]]:
    _set_mode(model)
    one, opened, sizes = _first(axes, model, example, names, tensors, factor)
    if not sizes:
        return one, opened, sizes
    other = _second(resized(tensors, sizes[1], axes), model, example, names, opened)
    if other is None:
        return one, opened, ()
    first, axis = next((i, axis) for i, axis in enumerate(axes) if axis is not None)
    if factor > 1 and not _alike(other, record(model, example, tensors, names, opened)):
        return one, opened, ()
    halves = factor == 1 and may_halve(one, other)
    one.shares = merge(one, other, SIZES, (first, axis), factor) or halves
    open_image_kernels(one.graph)
    return one, opened, sizes


def _free_axes(
    model: nn.Module,
    example: Example,
    given: tuple[Sequence[str], tuple[Tensor, ...]],
    opened: frozenset[str],
    batch: tuple[tuple[int, ...], Axes],
    wanted: Wanted,
) -> FreeAxes:
    names, tensors = given

    def recorded(inputs: tuple[Tensor, ...]) -> Recording:
        _set_mode(model)
        try:
            one = record(model, example, inputs, names, opened, trace_sizes=True)
        except UntraceableError:
            with _compiling():
                one = record(model, example, inputs, names, opened, trace_sizes=True)
        open_image_kernels(one.graph)
        return one

    def answers(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _set_mode(model)
        return _answers(model, example, inputs)

    def computed(one: Recording, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.no_grad(), kept_buffers(model):
            found = _Recorded(model, one).run(*(t.clone() for t in inputs))
        return found if isinstance(found, tuple) else (found,)

    return FreeAxes(wanted, names, tensors, batch, recorded, answers, computed)


class _Recorded(fx.Interpreter):
    """Runs a recording on the model that it was made of."""

    def __init__(self, model: nn.Module, one: Recording) -> None:
        super().__init__(model, graph=one.graph)
        self._constants = one.constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        known = self._constants.get(target)
        return super().get_attr(target, args, kwargs) if known is None else known


def _alike(one: Recording, other: Recording) -> bool:
    """Whether two runs made the same calls."""
    return [node.target for node in one.graph.nodes] == [node.target for node in other.graph.nodes]


def _second(
    tensors: tuple[Tensor, ...],
    model: nn.Module,
    example: Example,
    names: Sequence[str],
    opened: frozenset[str],
    *,
    whole: bool = True,
) -> Recording | None:
    """The run with other values, with the whole numbers given where it takes no others; None if it fails."""
    _set_mode(model)
    try:
        return record(model, example, other_values(tensors, seed=0, whole=whole), names, opened)
    except UntraceableError:
        raise
    except Exception:  # whatever a forward raises
        again = whole and any(map(is_whole, tensors))
    return _second(tensors, model, example, names, opened, whole=False) if again else None


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true, as it is while torch.compile follows a model."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _set_mode(model: nn.Module) -> None:
    """Inference mode; torchvision's GoogLeNet and Inception call their auxiliary heads in training alone."""
    model.train()  # some drop what they keep for inference when they are put into training mode
    model.eval()
    if classifies_in_training(model):
        for module in model.modules():
            module.training = any(True for _ in module.children())


def _first(
    axes: Axes,
    model: nn.Module,
    example: Example,
    names: Sequence[str],
    tensors: tuple[Tensor, ...],
    factor: int,
) -> tuple[Recording, frozenset[str], tuple[int, ...]]:
    """The first run, with what attention had to be opened; no sizes if the model takes the example's batch alone."""
    sizes = tuple(factor * size for size in SIZES) if any(axis is not None for axis in axes) else ()
    given = resized(tensors, sizes[0], axes) if sizes else tensors
    try:
        one = record(model, example, given, names, frozenset())
    except UntraceableError:
        raise
    except Exception as error:  # whatever a forward raises
        if not sizes or batch_size(tensors, axes) == sizes[0]:
            raise _no_call(model, error) from error
        sizes, given = (), tensors
        try:
            one = record(model, example, given, names, frozenset())
        except UntraceableError:
            raise
        except Exception as again:
            raise _no_call(model, again) from again
    opened = frozenset(
        str(node.target)
        for node in one.graph.nodes
        if node.op == "call_module"
        and isinstance(module := model.get_submodule(str(node.target)), nn.MultiheadAttention)
        and (self_attention.why_not(module) or unusual_call(node))
    )
    return (record(model, example, given, names, opened) if opened else one), opened, sizes


def _no_call(model: nn.Module, error: Exception) -> Exception:
    """What a forward raised as one line; a mistake of the recorder itself as it is."""
    if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
        return error
    reason = f"the model failed on the example input ({described(error)})"
    return ConfigError("model.name", type(model).__name__, reason=reason)


def _module(model: nn.Module, one: Recording) -> fx.GraphModule:
    for path in one.only_training:
        model.set_submodule(path, TrainingOnly(model.get_submodule(path)))
    for name, value in one.constants.items():
        model.register_buffer(name, value, persistent=False)
    _rename_reserved(model, one.graph)
    one.graph.lint()
    graph_module = fx.GraphModule(model, one.graph, type(model).__name__)
    graph_module._non_persistent_buffers_set.update(one.constants)
    return graph_module


def _rename_reserved(model: nn.Module, graph: fx.Graph) -> None:
    """A parameter or module of the root called as an attribute of GraphModule's own (`code`, `graph`) gets a "_"."""
    reserved = set(dir(fx.GraphModule)) - set(dir(nn.Module)) | {"meta"}
    for node in graph.nodes:
        first, dot, rest = str(node.target).partition(".")
        if node.op in ("get_attr", "call_module") and first in reserved:
            setattr(model, f"{first}_", getattr(model, first))
            node.target = f"{first}_{dot}{rest}"


def fold_constants(graph_module: fx.GraphModule) -> None:
    """Computes once what depends on no input and no tensor of the model: positions, masks, tables of sizes."""
    run, values = fx.Interpreter(graph_module), dict[fx.Node, Any]()
    for node in list(graph_module.graph.nodes):
        if not _is_constant(node, values):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            values[node] = getattr(run, node.op)(node.target, args, kwargs)
        if node.op == "get_attr" or not isinstance(values[node], Tensor):
            continue
        if all(_is_constant(user, values) for user in node.users):
            continue
        name = f"_constant_{len(list(graph_module.buffers()))}_{node.name}"
        graph_module.register_buffer(name, values[node].clone(), persistent=False)
        with graph_module.graph.inserting_after(node):
            new = graph_module.graph.get_attr(name)
        new.meta |= {key: node.meta[key] for key in ("nn_module_stack", "where") if key in node.meta}
        node.replace_all_uses_with(new)
        values[new] = values[node]


def _is_constant(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    if node.op == "get_attr":
        return str(node.target).startswith("_constant_")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name in RANDOM:
        return False
    return all(n in values for n in node.all_input_nodes)


def _refuse_random(graph_module: fx.GraphModule, one: Recording) -> None:
    for node in graph_module.graph.nodes:
        if node in one.random:
            stack = node.meta.get("nn_module_stack") or {}
            reason = "random numbers are drawn in inference mode: no file would compute the same twice"
            raise UntraceableError(reason, node.meta["where"], next(reversed(stack), ""), IN_TRAINING)


def _line(error: UntraceableError) -> str:
    file, number = error.place
    inside = f"in module '{error.module}' " if error.module else ""
    line = f"{file}:{number} `{code_at(error.place)}`"
    return f"the model cannot be captured {inside}at {line}: {error.reason}; {error.hint}, {_PARTS}"
