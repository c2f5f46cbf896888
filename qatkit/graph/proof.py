"""Proof of a capture: the graph, fused and opened, computes what the model computes.

Both run in inference mode on a batch of another size and with other values than the graph was recorded with. What is
fused and opened is rounded otherwise, and a deep model may make much of that: a difference that could be either is
judged in float64, where rounding is far below a difference of function.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.errors import ConfigError
from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import site
from qatkit.graph.phase import inference
from qatkit.graph.signature import (
    Example,
    batch_size,
    call,
    flatten,
    other_values,
    output_leaves,
    resized,
    unflatten,
)
from qatkit.graph.stub import stub
from qatkit.graph.trace import copy_of, is_traced, trace

_BATCH = 4  # the graph was recorded with batches of 2 and 3
_SURELY_ROUNDING = 2e-5  # of the largest output, in float32
_ROUNDING = 1e-7  # in float64, with parameters that come from float32
_HINT = "rewrite it with torch functions of tensors, or quantize the parts around it (qatkit.Parts)"


def prove(model: nn.Module, graph_module: fx.GraphModule, example: Example) -> None:
    """Compares `graph_module` with `model`, two forward passes.

    Args:
        model: what the graph was made of.
        graph_module: fused and stubbed.
        example: a call of the model.

    Raises:
        ConfigError: they differ by more than rounding; names the first module whose output does.
    """
    if is_traced(model):
        return
    tensors = _other(flatten(example), graph_module)
    largest = _difference(model, graph_module, example, tensors)
    if largest <= _SURELY_ROUNDING:
        return
    exact = copy_of(model).double()
    doubles = tuple(t.double() if t.is_floating_point() else t for t in tensors)
    wide = unflatten(example, tuple(t.double() if t.is_floating_point() else t for t in flatten(example)))
    try:
        with inference(exact):
            call(exact, wide)
    except RuntimeError:  # a type is written into the model
        exact, doubles, wide = copy_of(model), tensors, example
    graph = stub(fuse(exact, example=wide, depthwise=True).graph, wide).graph
    largest = _difference(exact, graph, wide, doubles)
    if largest > (_ROUNDING if doubles is not tensors else 1e-3):
        where = _first_difference(exact, wide, doubles)
        found = f"largest difference {largest:.2g} of the output, {where}"
        allowed = f"a model whose graph computes the same ({found}); {_HINT}"
        raise ConfigError("model.name", type(model).__name__, allowed)


def _other(tensors: tuple[Tensor, ...], graph_module: fx.GraphModule) -> tuple[Tensor, ...]:
    axes = graph_module.meta.get("batch_axes", (0,) * len(tensors))
    size = _BATCH if any(axis is not None for axis in axes) else batch_size(tensors)
    return other_values(resized(tensors, size, axes), seed=1)


def _difference(
    model: nn.Module, graph: fx.GraphModule, example: Example, tensors: Sequence[Tensor]
) -> float:
    """The largest difference of an output, as a share of its largest value; of whole numbers, 1 if any differs."""
    with inference(model), inference(graph), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, expected, _ = output_leaves(call(model, unflatten(example, [t.clone() for t in tensors])))
        found = graph(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    return max(_relative(a, b) for a, b in zip(expected, found, strict=False))


def _relative(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((expected != found).any())
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    different = ~torch.isclose(
        expected, found, rtol=0, atol=0, equal_nan=True
    )  # infinities are equal to themselves
    gap = (expected - found)[different].abs().double().max()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().double() if finite.numel() else torch.ones(())
    return float(gap / scale.clamp_min(1e-30)) if gap.isfinite() else float("inf")


def _first_difference(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> str:
    """In words, the first module whose output differs in the graph as it was captured."""
    graph = trace(model, example)
    values: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[site(n)] = result = super().run_node(n)
            return result

    with inference(graph):
        Recorder(graph).run(*tensors)
    for path, output in _outputs(model, example, tensors):
        found = values.get(path)
        if isinstance(found, Tensor) and isinstance(output, Tensor) and _relative(output, found) > _ROUNDING:
            return f"first in module '{path}'"
    return "in no single module: between the modules, or where they are fused and opened"


def _outputs(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    """What each module yields when it is first called, in that order."""
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
