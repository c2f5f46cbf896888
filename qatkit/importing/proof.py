"""Checks that an imported module gives the same outputs as the file in ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from qatkit.importing.operators.table import Array
from qatkit.importing.program import ImportedModel
from qatkit.importing.read import read
from qatkit.verify.sqnr import sqnr
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import open_session

Feeds = Mapping[str, Array]
ENOUGH = 100.0  # dB: float32 rounding of most networks stays above it
_OF_A_NODE = 90.0  # dB for a single node: ONNX Runtime approximates exponentials
_OF_A_HALF = 50.0  # dB for a single node with a float16 output, which the module computes in float32
_SMALL = 2e-6  # absolute difference that is accepted in any case: float32 rounding of values near 1
_AMPLIFIED = 40.0  # lowest dB of a network that amplifies rounding


def prove_import(model: ImportedModel, feeds: Feeds) -> dict[str, float]:
    """Compares the module with its file on one set of inputs.

    If the signal-to-noise ratio of every output reaches `ENOUGH`, the check ends. Otherwise each node is computed
    from ONNX Runtime's values of its inputs. A network may amplify rounding errors, but the rounding errors of a
    single node are small, unlike the errors of a wrong implementation.

    Args:
        model: the imported module.
        feeds: the input arrays, by the names of the module's inputs.

    Returns:
        The signal-to-noise ratio of each output, in dB.

    Raises:
        ConfigError: a node differs by more than rounding, or a file for one image per run gives other outputs if it
            computes several at once.
    """
    found = outputs_of(model, feeds)
    wanted = _expected(model, feeds, [one.shape for one in found])
    ratios = {n: sqnr(a, b) for n, a, b in zip(model.outputs, wanted, found, strict=True)}
    if min(ratios.values()) >= ENOUGH:
        return ratios
    _prove_nodes(model, _first(model, feeds))
    worst = min(ratios, key=lambda name: ratios[name])
    if ratios[worst] < _AMPLIFIED and model.any_batch:
        reason = (
            f"the file accepts one sample per run, and its output '{worst}' differs if several are computed at once; "
            "export the file with a dynamic batch"
        )
        raise ConfigError("onnx", model.file, reason=reason)
    return ratios


def outputs_of(model: ImportedModel, feeds: Feeds) -> list[Array]:
    """Returns the module's outputs as arrays."""
    with torch.no_grad():
        made = model(**{name: torch.from_numpy(np.asarray(value)) for name, value in feeds.items()})
    return [one.numpy() for one in ([made] if isinstance(made, torch.Tensor) else made.values())]


def _expected(model: ImportedModel, feeds: Feeds, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Returns the file's outputs; a file that takes one image per run gets one image after the other."""
    run = open_session(model.file, threads=1, optimize=False, arena=False)
    count = len(feeds[model.inputs[0]]) if model.any_batch else 1
    if count == 1:
        return list(run.run(list(model.outputs), {**feeds, **model.fixed}))
    parts = []
    for i in range(count):
        one = {name: value[i : i + 1] for name, value in feeds.items()}
        parts.append(run.run(list(model.outputs), {**one, **model.fixed}))
    return [_joined(values, shape) for values, shape in zip(zip(*parts, strict=True), shapes, strict=True)]


def _joined(values: Sequence[Array], shape: Sequence[int]) -> Array:
    """Joins outputs of single images to a batch of `shape`, along the axis that is longer in `shape`."""
    one = values[0].shape
    longer = [axis for axis, size in enumerate(one) if len(shape) == len(one) and size != shape[axis]]
    return np.concatenate(values, longer[0] if longer else 0)


def _first(model: ImportedModel, feeds: Feeds) -> dict[str, Array]:
    return {name: value[:1] if model.any_batch else value for name, value in feeds.items()}


def _prove_nodes(model: ImportedModel, feeds: Feeds) -> None:
    """Computes each node of the main graph from ONNX Runtime's values of its inputs.

    Raises:
        ConfigError: a node differs by more than rounding; the message names the node furthest below its limit.
    """
    steps = [step for step in model.program.steps if step.branches is None]
    values = {**feeds, **_every_value(model, feeds)}
    margin, worst, name = float("inf"), 0.0, ""
    for step in steps:
        if not all(one in values for one in step.inputs if one) or not any(
            one in values for one in step.outputs
        ):
            continue
        given = [torch.from_numpy(np.asarray(values[one])) if one else None for one in step.inputs]
        with torch.no_grad():
            made = model.computed(step, given)
        for output, value in zip(step.outputs, made, strict=False):
            if value is None or output not in values or values[output].dtype.kind != "f":
                continue
            exact, found = values[output], np.asarray(value)
            near = exact.shape == found.shape and np.abs(exact - found).max(initial=0) <= _SMALL
            ratio = float("inf") if near else sqnr(exact, found)
            enough = _OF_A_HALF if exact.dtype == np.float16 else _OF_A_NODE
            margin, worst, name = min((margin, worst, name), (ratio - enough, ratio, step.name))
    if margin < 0:
        reason = (
            f"in PyTorch, node '{name}' differs from ONNX Runtime (its output has an SQNR of {worst:.1f} dB)"
        )
        raise ConfigError("onnx", model.file, reason=reason)


def _every_value(model: ImportedModel, feeds: Feeds) -> dict[str, Array]:
    """Returns all intermediate values that ONNX Runtime computes, by name."""
    graph = read(model.file)
    names = {one for step in model.program.steps for one in (*step.inputs, *step.outputs)} - {""}
    made = [value for node in graph.graph for value in node.outputs if value.name in names]
    graph.graph.outputs[:] = made
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.onnx"
        ir.save(graph, path)
        found = open_session(path, threads=1, optimize=False, arena=False).run(None, {**feeds, **model.fixed})
    return dict(zip((str(value.name) for value in made), found, strict=True))
