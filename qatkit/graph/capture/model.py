"""Captures a model as an equivalent GraphModule for any input values and as many batch sizes as possible.

1. Two runs with different batch sizes and values are recorded and merged. Numbers that differ become functions of the
   batch size.
2. Blocks that train other parameters than they evaluate with are recorded again in training mode, if their outputs are
   the same in both modes (`qatkit.graph.capture.training_paths`).
3. If requested, runs with other sizes of further axes are merged, too (`qatkit.graph.capture.free_axes`).
4. Functional dropout becomes a module if it is on in a run in training mode.
5. Values that depend on no input, parameter or buffer become buffers.
6. Complex numbers become pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.capture.axis_sizes import FreeAxis
from qatkit.graph.capture.calls import IN_TRAINING, RANDOM, UntraceableError
from qatkit.graph.capture.complex_numbers import open_complex
from qatkit.graph.capture.free_axes import FreeAxes, Wanted
from qatkit.graph.capture.notes import code_at, notes_of, notes_of_opaque, notes_of_state
from qatkit.graph.capture.run import Recording
from qatkit.graph.capture.runs import Runs
from qatkit.graph.capture.training import TrainingOnly, drop_reshaping, follow_mode, watch
from qatkit.graph.capture.training_paths import (
    PATHS,
    missing_parameters,
    notes_of_paths,
    training_paths,
)
from qatkit.graph.signature import Example, flatten, input_names, resized, unflatten
from qatkit_verify.errors import ConfigError

_PARTS = "or quantize the parts around it (qatkit.Parts)"


def capture(model: nn.Module, example: Example, dynamic_axes: Wanted = "none") -> fx.GraphModule:
    """Returns the graph of a model. The model is changed: pass a copy.

    The meta of the graph has `inputs` and `outputs` (names), `batch_axes` (one per input; all None for a model that
    accepts only the example's batch size), `batch_multiple` (the number that the batch size must be a multiple of),
    `free_axes` (the axes of `dynamic_axes` that are free), `notes` for the report, `training_paths` (the paths of
    blocks that are recorded in training mode), and `read_values` (whether the graph depends on values that the
    model's tensors had).

    Args:
        model: the model.
        example: an example input of the model.
        dynamic_axes: the axes other than the batch that may have other sizes in the graph: "auto" for all that the
            model leaves free, "none", or names of axes by input and number of the axis.

    Raises:
        ConfigError: a line of the model can't be part of a graph (the error names the module and the line), the
            model contains TorchScript, it fails on the example, or an axis that `dynamic_axes` names is not free.
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
    runs = Runs(model, example, names, tensors)
    one, opened, sizes, axes = runs.for_any_batch()
    given = unflatten(example, resized(tensors, sizes[0], axes) if sizes else tensors)
    paths = training_paths(model, given, missing_parameters(model, one.graph))
    if paths.blocks:
        try:
            runs.blocks = paths.blocks
            one, opened, sizes, axes = runs.for_any_batch()
        except (UntraceableError, ConfigError):
            paths, runs.blocks = replace(paths, blocks=()), ()
            runs.set_mode()
    free: list[FreeAxis] = []
    about_sizes: list[tuple[str, str]] = []
    if dynamic_axes != "none":
        search = FreeAxes(dynamic_axes, runs, opened, sizes, axes)
        other, free = search.run()
        one, about_sizes = other or one, search.notes
    apart = notes_of_paths(model, paths, missing_parameters(model, one.graph))
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
        + notes_of_opaque(graph_module)
        + apart,
        PATHS: paths.blocks,
        "read_values": one.read_values,
    }
    for node in graph_module.graph.nodes:  # absolute paths do not belong in a checkpoint
        node.meta.pop("where", None)
    graph_module.recompile()
    return graph_module


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
    """Appends "_" to names of the root's parameters and modules that GraphModule itself uses (`code`, `graph`)."""
    reserved = set(dir(fx.GraphModule)) - set(dir(nn.Module)) | {"meta"}
    for node in graph.nodes:
        first, dot, rest = str(node.target).partition(".")
        if node.op in ("get_attr", "call_module") and first in reserved:
            setattr(model, f"{first}_", getattr(model, first))
            node.target = f"{first}_{dot}{rest}"


def fold_constants(graph_module: fx.GraphModule) -> None:
    """Stores values that depend on no input, parameter or buffer as buffers, such as positions and masks."""
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
            reason = "random numbers are drawn in inference mode, so no two runs of a file would be equal"
            raise UntraceableError(reason, node.meta["where"], next(reversed(stack), ""), IN_TRAINING)


def _line(error: UntraceableError) -> str:
    file, number = error.place
    inside = f" in module '{error.module}'" if error.module else ""
    line = f" at {file}:{number} `{code_at(error.place)}`" if file else ""
    return f"the model cannot be captured{inside}{line}: {error.reason}; {error.hint}, {_PARTS}"
