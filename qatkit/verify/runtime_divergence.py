"""Finds where another runtime diverges from ONNX Runtime: in single operators, then in the whole file.

    file           Q ─ DQ ─ Conv ─ Q ─ DQ ─ Conv ─ Q        ONNX Runtime without optimizations: every integer tensor
    alone          Q    DQ ─ Conv ─ Q    DQ ─ Conv ─ Q      the other runtime: each DQ reads ONNX Runtime's integers
    in the whole   Q ─ DQ ─ Conv ─ Q ─ DQ ─ Conv ─ Q        the other runtime, with one tensor exposed at a time

Two runtimes round differently, and one step in a tensor grows to many steps in later tensors (OpenVINO's
mobilenet_v2 at 224x224: one step in 0.001 % of the quantized input, up to 72 steps in the last tensors). In
single operators errors cannot add up, so a difference of more than one step is a wrong result. If there is
none, the runtime fuses operators and rounds at other points. It could not fuse if every tensor were exposed.
So one tensor is exposed at a time, and bisection finds the first one with more than `_SHARE` of its elements
off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qatkit.records.results import ALONE, WHOLE, Divergence, TensorParity
from qatkit.verify.divergence import TOLERANCE, computed, in_steps, judged, operator_of
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.runtimes.base import Runtime
from qatkit_verify.session import integer_io, open_session

_SHARE = (
    0.01  # share of the elements that differ; fewer may lie on a rounding boundary of the input by chance
)


def runtime_divergence(
    runtime: Runtime,
    path: str | Path,
    images: Any,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Divergence:
    """Finds the first quantized tensor, or output, that a runtime computes differently from ONNX Runtime.

    If a single operator exceeds the tolerance, it is reported (`reference` is `ALONE`). Otherwise the whole
    file is compared (`reference` is `WHOLE`), and `tensors` are those that were inspected.

    Args:
        runtime: the other runtime.
        path: the INT8 file, with a dynamic batch or the batch size of `images`.
        images: images [N, C, H, W], or a batch of the file's inputs in any form.
        options: the backend's session config entries, for ONNX Runtime.
        threads: the number of threads of both runtimes.
    """
    source = ir.load(str(path))
    names = list(dict.fromkeys(str(value.name) for value in (*_quantized(source), *source.graph.outputs)))
    written = computed(ir.load(str(path)), names, images, options, threads)
    session = open_session(path, threads=threads, optimize=False, options=options)

    def compared(model: ir.Model, exposed: Sequence[str], inputs: Mapping[str, Array]) -> list[TensorParity]:
        _expose(model, {name: written[name] for name in exposed})
        found = _outputs(model, runtime, inputs, threads)
        return [in_steps(name, found[name], written[name]) for name in exposed]

    cut = ir.load(str(path))
    given = feeds(session, images, integer_io(session))
    alone = compared(cut, names, {**given, **_cut(cut, written)})
    divergence = judged(Divergence(TOLERANCE, None, tuple(alone), reference=ALONE), source)
    if divergence.first is not None:
        return divergence
    one_by_one = [lambda name=name: compared(ir.load(str(path)), [name], given)[0] for name in names]
    seen, first = _halved(one_by_one)
    operator = None if first is None else operator_of(source, first.name)
    return Divergence(TOLERANCE, first, tuple(seen), reference=WHOLE, operator=operator)


def _halved(tensors: Sequence[Callable[[], TensorParity]]) -> tuple[list[TensorParity], TensorParity | None]:
    """Returns the inspected tensors in order, and the first tensor that is off, found by bisection, or None.

    The bisection assumes that all tensors after the first one are off too.
    """
    seen = dict[int, TensorParity]()
    low, high = 0, len(tensors)
    while low < high:
        # The last tensor comes first: if it is not off, none is.
        middle = (low + high) // 2 if seen else high - 1
        seen[middle] = one = tensors[middle]()
        if one.mismatching > _SHARE:
            high = middle
        else:
            low = middle + 1
    return [seen[i] for i in sorted(seen)], seen.get(high)


def _cut(model: ir.Model, written: Mapping[str, Array]) -> dict[str, Array]:
    """Makes the readers of every quantized tensor read a new graph input, and returns the inputs' values."""
    given = dict[str, Array]()
    for value in _quantized(model):
        if value.uses() and not value.is_graph_output():
            read = ir.Value(name=f"{value.name}_given", **_like(written[str(value.name)]))
            ir.convenience.replace_all_uses_with(value, read)
            model.graph.inputs.append(read)
            given[str(read.name)] = written[str(value.name)]
    return given


def _expose(model: ir.Model, written: Mapping[str, Array]) -> None:
    """Makes the quantized tensors in `written` outputs of the model."""
    for value in _quantized(model):
        name = str(value.name)
        if name in written and not value.is_graph_output():
            value.type, value.shape = _like(written[name]).values()
            model.graph.outputs.append(value)


def _quantized(model: ir.Model) -> list[ir.Value]:
    return [node.outputs[0] for node in model.graph if node.op_type == "QuantizeLinear"]


def _like(values: Array) -> dict[str, Any]:
    return {"type": ir.TensorType(ir.DataType.from_numpy(values.dtype)), "shape": ir.Shape(values.shape)}


def _outputs(model: ir.Model, runtime: Runtime, given: Mapping[str, Array], threads: int) -> dict[str, Array]:
    names = [str(value.name) for value in model.graph.outputs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.onnx"
        ir.save(model, path)
        return dict(zip(names, map(np.asarray, runtime.open(path, threads)(given)), strict=True))
