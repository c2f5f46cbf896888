"""Finds where two computations of a file diverge, tensor by tensor, in graph order.

Against the converted module: ONNX Runtime runs the file as written, with the output of every QuantizeLinear
exposed. These outputs are compared with the module's own integers. Any difference comes from the exporter.
Against the optimizer: the graph that ONNX Runtime makes of the file is saved. This graph and the original
file run without further optimizations and expose the tensors whose names they share.

Integers are compared in their own steps, 16-bit integers in steps of 16. Float tensors (the outputs or, in a
file without QuantizeLinear, all tensors) are compared in steps of their range / 255. The step of a module's
output is given by the caller.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from qatkit.records.results import Divergence, TensorParity
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.verify.accuracy import Predictor
from qatkit.verify.graph_view import clip_ops, matrix_ops, shape_ops
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import by_name, feeds, input_names
from qatkit_verify.session import fixed_batch, integer_io, open_session

Tensors = Mapping[str, NDArray[Any]]
# Enough to show a difference, and few enough to keep every tensor of a large model in memory.
IMAGES = 4
TOLERANCE = 1  # maximum difference in steps: of the integers, or of a float tensor's range / 255
_STEP_OF_16_BITS = (
    16  # integers per step of 16-bit tensors: float sums in different orders differ by a few of 65,535
)
# EXTENDED has all fusions; ALL also changes memory layouts, which removes most names.
_LEVELS = (ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


def first_divergence(
    int8_path: str | Path,
    images: Any,
    recorded: Tensors,
    *,
    output: tuple[NDArray[Any], float] | None = None,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Divergence:
    """Finds the first quantized tensor of the file that differs from the module's by more than `TOLERANCE`.

    ONNX Runtime runs without optimizations, with the output of every QuantizeLinear exposed.

    Args:
        int8_path: the INT8 file, with a dynamic batch or the batch size of `images`.
        images: images [N, C, H, W], or a batch of the file's inputs in any form (`qatkit_verify.feeds`).
        recorded: the integer tensors of the converted module for the same images, by the names of the
            file's QuantizeLinear outputs. Shapes may differ by a reshape.
        output: the module's output and the size of its step. The file's output is then compared too, as the
            last tensor.
        options: the backend's session config entries.
        threads: the number of intra-op threads.

    Raises:
        ConfigError: a recorded tensor is not integer or has another number of elements, or the file has none
            of the recorded tensors and `output` is None.
    """
    model = ir.load(str(int8_path))
    names = [str(n.outputs[0].name) for n in model.graph if n.op_type == "QuantizeLinear"]
    wanted = [name for name in names if name in recorded]
    absent = tuple(name for name in recorded if name not in names)
    if not wanted and output is None:
        raise ConfigError(
            "recorded tensors", ", ".join(absent[:3]), f"names of quantized tensors of {int8_path}"
        )
    last = str(model.graph.outputs[0].name)
    values = computed(model, dict.fromkeys([*wanted, last]), images, options, threads)
    tensors = [_recorded_steps(name, values[name], recorded[name]) for name in wanted]
    if output is not None and last not in wanted:
        ends = integer_io(open_session(int8_path, threads=threads, optimize=False, options=options))
        found = values[last] if ends is None else ends.floats(values[last])
        tensors.append(_float_steps(last, found, *output))
    missing = tuple(name for name in names if name not in recorded)
    return judged(Divergence(TOLERANCE, None, tuple(tensors), missing, absent), ir.load(str(int8_path)))


def optimizer_divergence(
    path: str | Path,
    images: Any,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Divergence:
    """Finds the first tensor that ONNX Runtime's optimizations change by more than `TOLERANCE`.

    It compares quantized tensors and float outputs (in a file without QuantizeLinear, all float tensors), as
    far as the optimized graph has tensors with their names. Level ALL, which leaves fewer of them, is
    compared only if level EXTENDED changes none.

    Args:
        path: any ONNX file, with a dynamic batch or the batch size of `images`.
        images: images [N, C, H, W], or a batch of the file's inputs in any form.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
    """
    source = ir.load(str(path))
    tries: list[Divergence] = []
    for level in _LEVELS:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "optimized.onnx"
            open_session(path, threads=threads, optimize=level, options=options, optimized_path=saved)
            optimized = ir.load(str(saved))
            names = _common(source, optimized)
            fast = computed(optimized, names, images, options, threads)
        plain = computed(ir.load(str(path)), names, images, options, threads)
        tensors = tuple(in_steps(name, fast[name], plain[name]) for name in _comparable(names, plain, source))
        found = Divergence(TOLERANCE, None, tensors, reference="the same file without optimizations")
        tries.append(judged(found, source))
        if tries[-1].first is not None:
            return tries[-1]
    return tries[0]  # this one compared the most tensors


def dequantized(
    path: str | Path,
    names: Collection[str],
    images: Any,
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> dict[str, NDArray[Any]]:
    """Returns the dequantized values of quantized tensors, by the names of their QuantizeLinear outputs.

    ONNX Runtime runs without optimizations. Tensors that no DequantizeLinear reads, directly or after a Pad,
    are omitted.

    Args:
        path: the file, with a dynamic batch or the batch size of `images`.
        names: the names of QuantizeLinear outputs.
        images: images [N, C, H, W], or a batch of the file's inputs in any form.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
    """
    model = ir.load(str(path))
    quantized = [value for node in model.graph for value in node.outputs if value.name in names]
    readers = {str(value.name): reader for value in quantized if (reader := _dequantized(model.graph, value))}
    values = computed(model, list(dict.fromkeys(readers.values())), images, options, threads)
    return {name: values[reader] for name, reader in readers.items()}


def _dequantized(graph: ir.Graph, value: ir.Value) -> str | None:
    """Returns the name of the dequantized `value`; None if nothing dequantizes it.

    If a Pad comes first, a DequantizeLinear without it is added to the graph.
    """
    direct = [node for node in value.consumers() if node.op_type == "DequantizeLinear"]
    if direct:
        return str(direct[0].outputs[0].name)
    pads = [node for node in value.consumers() if node.op_type == "Pad"]
    behind = [
        node for pad in pads for node in pad.outputs[0].consumers() if node.op_type == "DequantizeLinear"
    ]
    if not behind:
        return None
    inputs, name = [value, *behind[0].inputs[1:]], f"{value.name}_unpadded"
    graph.append(ir.node("DequantizeLinear", inputs, outputs=[ir.Value(name=name)], name=name))
    return name


def closest(found: Divergence) -> Divergence:
    """Returns `found`, with the first tensor that differs at all if none exceeds the tolerance."""
    if found.first is not None:
        return found
    return replace(found, tolerance=0, first=next((t for t in found.tensors if t.max_steps > 0), None))


def disagreeing(
    reference: Predictor,
    others: Sequence[Predictor],
    batches: Iterable[Any],
    path: str | Path,
    task: Task = CLASSIFICATION,
) -> Any:
    """Returns images that `reference` and at least one of `others` decide differently, as inputs of `path`.

    The result has at most `IMAGES` images [N, C, H, W]. If the file has a fixed batch size, N is that size
    instead, and images may repeat. If no image differs, the first images are returned. For a file with
    several inputs, the result is the first batch with a difference, by name, or else the first batch.
    """
    session = open_session(path, threads=1, optimize=False)
    fixed, names = fixed_batch(session), input_names(session)
    if len(names) > 1:
        return _disagreeing_batch(reference, others, (by_name(names, batch) for batch in batches))
    count = fixed or IMAGES
    chosen: list[NDArray[np.float32]] = []
    spare: list[NDArray[np.float32]] = []
    for batch in batches:
        images = np.asarray(by_name(names, batch)[names[0]], np.float32)
        wanted = reference(images)
        differs = np.any([~task.agree(wanted, predict(images)) for predict in others], axis=0)
        differs = differs.reshape(len(images), -1).any(1)  # maps differ if any position does
        chosen += list(images[differs])
        spare += list(images[~differs])[: count - len(spare)]
        if len(chosen) >= count:
            break
    taken = (chosen or spare)[:count]
    return np.stack(taken if fixed is None else (taken * count)[:count])


def _disagreeing_batch(
    reference: Predictor, others: Sequence[Predictor], batches: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any]:
    first = None
    for batch in batches:
        first = batch if first is None else first
        best = reference(batch).argmax(-1)
        if any((predict(batch).argmax(-1) != best).any() for predict in others):
            return batch
    assert first is not None, "parity was measured on some"
    return first


def computed(
    model: ir.Model, names: Collection[str], images: Any, options: Mapping[str, str] | None, threads: int
) -> dict[str, NDArray[Any]]:
    """Runs a graph without optimizations and returns the given tensors by name; changes `model`."""
    if not names:
        return {}  # ONNX Runtime would return all outputs
    ir.external_data.load_to_model(model)  # because the model is saved elsewhere
    outputs = {value.name for value in model.graph.outputs}
    for value in [value for node in model.graph for value in node.outputs]:
        if value.name in names and value.name not in outputs:
            value.type = value.shape = None  # ONNX Runtime infers them
            model.graph.outputs.append(value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exposed.onnx"
        ir.save(model, path)
        session = open_session(path, threads=threads, optimize=False, options=options)
        inputs = feeds(session, images, integer_io(session))
        return dict(zip(names, map(np.asarray, session.run(list(names), inputs)), strict=True))


def _common(source: ir.Model, optimized: ir.Model) -> list[str]:
    """Returns the computed tensors that have the same name in both graphs, in the order of `source`."""
    left = {value.name for node in optimized.graph for value in node.outputs}
    given = _constants(source)
    values = [value for node in source.graph for value in node.outputs if value not in given]
    return [str(value.name) for value in values if value.name and value.name in left]


def _constants(model: ir.Model) -> set[ir.Value]:
    """Returns the values computed only from constants, such as weights on the way to their operators."""
    found = set(model.graph.initializers.values())
    for node in model.graph:
        if all(value is None or value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _comparable(names: Sequence[str], values: Tensors, source: ir.Model) -> list[str]:
    """Selects quantized tensors and float outputs of `names`; without any QuantizeLinear, all float tensors."""
    quantized = {str(n.outputs[0].name) for n in source.graph if n.op_type == "QuantizeLinear"}
    output = {str(value.name) for value in source.graph.outputs}
    wanted = quantized | output if quantized else set(names)
    return [n for n in names if n in wanted and (n in quantized or values[n].dtype.kind == "f")]


def judged(found: Divergence, model: ir.Model) -> Divergence:
    """Returns `found` with the first tensor beyond the tolerance, and with an operator.

    The operator computes that tensor or, if there is none, the first tensor that differs at all.
    """
    found = replace(found, first=next((t for t in found.tensors if t.max_steps > found.tolerance), None))
    name = closest(found).first
    return found if name is None else replace(found, operator=operator_of(model, name.name))


def operator_of(model: ir.Model, tensor: str) -> str | None:
    """Returns the name of the node that computes a tensor's values; for the quantized input, of its reader.

    Several operators may lie between this tensor and the dequantized tensors before it. The nearest one that
    multiplies matrices is returned, or else the nearest one. The result is None if there is no such node.
    """
    value = next(v for node in model.graph for v in node.outputs if v.name == tensor)
    above = list(_float_region(value))
    operators = [node for node in above if not _passes(node)] or [
        n for n in above if n.op_type in shape_ops()
    ]
    matrix = [node for node in operators if node.op_type in matrix_ops()]
    return next((node.name for node in (*matrix, *operators)), None) or _reader(value)


def _float_region(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the nodes that compute `value` from dequantized tensors (or from the inputs), nearest first."""
    found: dict[ir.Node, None] = {}
    values: list[ir.Value | None] = [value]
    while values:
        nodes = [v.producer() for v in values if v is not None]
        new = [n for n in nodes if n is not None and n.op_type != "DequantizeLinear" and n not in found]
        found.update(dict.fromkeys(new))
        values = [v for node in dict.fromkeys(new) for v in node.inputs]
    yield from found


def _passes(node: ir.Node) -> bool:
    """Returns whether a node only moves, clips or quantizes values, or is a barrier (a Sum of one input)."""
    between = node.op_type in shape_ops() | clip_ops() | {"QuantizeLinear"}
    return between or (node.op_type == "Sum" and len(node.inputs) == 1)


def _reader(value: ir.Value) -> str | None:
    """Returns the name of the first operator that reads a tensor, past Q, DQ and shape operators; or None."""
    for node in (use.node for use in value.uses()):
        if node.op_type not in shape_ops() | {"QuantizeLinear", "DequantizeLinear"}:
            return node.name
        found = _reader(node.outputs[0])
        if found is not None:
            return found
    return None


def _recorded_steps(name: str, value: NDArray[Any], recorded: NDArray[Any]) -> TensorParity:
    if not np.issubdtype(recorded.dtype, np.integer):
        raise ConfigError(f"recorded tensor '{name}'", recorded.dtype, "integer (quantized) values")
    if recorded.size != value.size:
        raise ConfigError(
            f"recorded tensor '{name}'",
            list(recorded.shape),
            f"as many values as in the file, {list(value.shape)}",
        )
    return in_steps(name, value, recorded)


def in_steps(name: str, value: NDArray[Any], reference: NDArray[Any]) -> TensorParity:
    """Compares two tensors in steps.

    Integers are compared in their own steps, but 16-bit integers in full steps of 16. Float tensors are compared
    in steps of the reference's range / 255.
    """
    if reference.dtype.kind == "f":
        finite = reference[np.isfinite(reference)].astype(np.float64)
        span = float(finite.max() - finite.min()) if finite.size else 0.0
        return _float_steps(name, value, reference, span / 255 or 1.0)
    distance = np.abs(value.astype(np.int64).ravel() - reference.astype(np.int64).ravel())
    wide = reference.dtype.itemsize == 2
    return _summary(name, distance // _STEP_OF_16_BITS if wide else distance)


def _float_steps(name: str, value: NDArray[Any], reference: NDArray[Any], step: float) -> TensorParity:
    """Compares two tensors in rounded steps; NaN or infinity against a number counts as 255 steps."""
    first, second = value.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    distance = np.where(np.isnan(first) & np.isnan(second) | (first == second), 0, np.abs(first - second))
    steps = np.rint(np.nan_to_num(distance / step, nan=255, posinf=255))
    return _summary(name, np.minimum(steps, 2**31).astype(np.int64))


def _summary(name: str, distance: NDArray[np.int64]) -> TensorParity:
    return TensorParity(
        name,
        distance.size,
        float((distance > 0).mean()) if distance.size else 0.0,
        int(distance.max(initial=0)),
    )
