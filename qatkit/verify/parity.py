"""Checks, in quantization steps, whether the file computes what was trained.

The converted PyTorch module is the reference. ONNX Runtime without optimizations executes the file as written
(float kernels between the Q/DQ pairs); with all optimizations it runs integer kernels. A difference without
optimizations is the exporter's fault; one that appears only with them is the optimizer's.
`qatkit.verify.divergence` finds the tensor in which it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qatkit.records.results import Parity
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.verify.accuracy import Predictor, all_outputs, file_predictor, parts
from qatkit.verify.graph_view import shape_ops
from qatkit_verify.compare import Output, deciding
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, input_names, inputs_alone, rows
from qatkit_verify.integer_ends import IntegerIO
from qatkit_verify.records import Comparison
from qatkit_verify.session import integer_io, open_session, run_outputs

if TYPE_CHECKING:
    from torch import nn


def parity(
    converted: nn.Module | Predictor,
    int8_path: str | Path,
    batches: Iterable[Any],
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
    task: Task = CLASSIFICATION,
) -> Parity:
    """Compares all outputs of a file with those of its module over `batches`.

    A batch has images [N, C, H, W], (images, labels), or tensors by name. If there are several outputs, the
    differences are those of the output that is farthest off in its own steps, and the agreement is the lowest
    of all outputs that decide something (`qatkit_verify.compare`). For a file with integer inputs or outputs,
    the module gets the same integer pixels, and its outputs are rounded to the file's steps.

    Args:
        converted: the module, or a function from images to its first output.
        int8_path: the file to judge.
        batches: the inputs of both; for a file with several inputs, tuples with a tensor for each, or mappings.
        options: the backend's session config entries.
        threads: the number of intra-op threads.
        task: the task that defines the decisions of the first output.

    Raises:
        ConfigError: there are no images, or a batch does not fit the file's inputs.
    """
    return _measured(
        between_ends(converted, int8_path, threads, options),
        _file_outputs(int8_path, threads, options),
        int8_path,
        batches,
        task,
    )


def file_parity(
    float_path: str | Path,
    quantized_path: str | Path,
    batches: Iterable[Any],
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
    task: Task = CLASSIFICATION,
) -> Parity:
    """Compares an optimized session of a file with one without optimizations, and with the float file.

    It is for a file that was not made from a PyTorch module.

    Args:
        float_path: the file from which `quantized_path` was made.
        quantized_path: the file to judge.
        batches: the inputs, as in `parity`.
        options: the session config entries for `quantized_path`.
        threads: the number of intra-op threads.
        task: the task that defines the decisions of the first output.

    Raises:
        ConfigError: as in `parity`.
    """
    session = open_session(float_path, threads=threads)
    plain, fast = _file_outputs(quantized_path, threads, options)
    names, images, against = input_names(session), 0, [list[Output](), list[Output]()]
    for given in _parts(names, batches):
        images += rows(given)
        floats, first, second = run_outputs(session, given), plain(given), fast(given)
        _add(against[0], floats, [second], task)
        _add(against[1], first, [second], task)
    _some(images)
    graph = ir.load(str(quantized_path)).graph
    at, step, source = _worst(graph, against[0], f"the float file's {task.names.outputs}", against[1])
    far, near = (_decided(graph, outputs, 0, outputs[at].comparisons(step)[0]) for outputs in against)
    return Parity(
        images,
        step,
        source,
        unoptimized=None,
        optimized=near,
        reference="the same file without optimizations",
        against_float=far,
    )


def against(
    references: Mapping[str, AllOutputs],
    run: AllOutputs,
    path: str | Path,
    batches: Iterable[Any],
    task: Task = CLASSIFICATION,
) -> tuple[int, dict[str, Comparison]]:
    """Returns the number of images, and the comparisons of the outputs of `run` with those of each reference.

    Args:
        references: functions that compute the reference outputs, by name.
        run: a function that computes the outputs of the file `path`.
        path: the file, for the names of its inputs and the steps of its outputs.
        batches: the inputs, as in `parity`.
        task: the task that defines the decisions of the first output.

    Raises:
        ConfigError: there are no images.
    """
    graph = ir.load(str(path)).graph
    names = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    images, outputs = 0, {whose: list[Output]() for whose in references}
    for given in _parts(names, batches):
        images += rows(given)
        found = run(given)
        for whose, reference in references.items():
            _add(outputs[whose], reference(given), [found], task)
    _some(images)
    return images, {whose: _compared(graph, one, whose) for whose, one in outputs.items()}


def _parts(names: Sequence[str], batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the inputs without labels, large images a few at a time."""
    for batch in batches:
        yield from parts(inputs_alone(names, batch))


def _compared(graph: ir.Graph, outputs: Sequence[Output], whose: str) -> Comparison:
    at, step, _ = _worst(graph, outputs, whose)
    return _decided(graph, outputs, 0, outputs[at].comparisons(step)[0])


def _measured(
    reference: AllOutputs,
    files: tuple[AllOutputs, AllOutputs],
    path: str | Path,
    batches: Iterable[Any],
    task: Task,
) -> Parity:
    """Compares the reference with the file without optimizations and with all optimizations."""
    graph = ir.load(str(path)).graph
    names = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    images, outputs = 0, list[Output]()
    for given in _parts(names, batches):
        images += rows(given)
        _add(outputs, reference(given), [run(given) for run in files], task)
    _some(images)
    at, step, source = _worst(graph, outputs, f"the converted module's {task.names.outputs}")
    plain, fast = (_decided(graph, outputs, i, one) for i, one in enumerate(outputs[at].comparisons(step)))
    return Parity(images, step, source, plain, fast)


def _add(
    outputs: list[Output],
    reference: Sequence[Array],
    others: Sequence[Sequence[Array]],
    task: Task,
) -> None:
    """Adds one batch of every output; if a reference computes only the first output, only that is added."""
    if not outputs:
        outputs.extend(Output(len(others), None if place else task.rule) for place in range(len(reference)))
    if len(others[0]) == len(reference):
        others = [task.aligned(reference, one) for one in others]
    for output, values, *other in zip(outputs, reference, *others, strict=False):
        output.add(values, other)


def _some(images: int) -> None:
    if not images:
        raise ConfigError("verify.parity_images", 0, "at least one sample to measure parity")


def _worst(
    graph: ir.Graph, outputs: Sequence[Output], whose: str, judged: Sequence[Output] | None = None
) -> tuple[int, float, str]:
    """Returns the index of the output that is farthest off in its own steps, its step, and a text on the step.

    If there are float outputs, only these are considered. The distances are those of `judged`, by default of
    `outputs`; the steps are those of `outputs`.
    """
    floats = [i for i, one in enumerate(outputs) if one.floats] or list(range(len(outputs)))
    steps = {i: _step(graph.outputs[i], outputs[i], whose) for i in floats}

    def distance(i: int) -> float:
        return max(one.max_steps for one in (judged or outputs)[i].comparisons(steps[i][0]))

    worst = max(floats, key=distance)
    step, source = steps[worst]
    if len(floats) > 1:
        source = f"{source}; for '{graph.outputs[worst].name}', the worst of {len(floats)} outputs"
    return worst, step, source


def _decided(graph: ir.Graph, outputs: Sequence[Output], other: int, far: Comparison) -> Comparison:
    """Returns `far` with the lowest agreement, with and without ties, of all outputs that decide something."""
    found = []
    for i in deciding(outputs):
        step, _ = _step(graph.outputs[i], outputs[i], "")
        found.append(outputs[i].comparisons(step)[other])
    agreement = min(one.agreement for one in found)
    return replace(far, agreement=agreement, ties=min(one.held for one in found) - agreement)


def file_predictors(
    path: str | Path, threads: int, options: Mapping[str, str] | None, task: Task = CLASSIFICATION
) -> tuple[Predictor, Predictor]:
    """Returns predictors of a file in ONNX Runtime without optimizations and with all optimizations."""
    plain, fast = _sessions(path, threads, options)
    return file_predictor(plain, task), file_predictor(fast, task)


AllOutputs = Callable[[Any], Sequence[Array]]


def _file_outputs(
    path: str | Path, threads: int, options: Mapping[str, str] | None
) -> tuple[AllOutputs, AllOutputs]:
    """Returns functions as in `file_predictors`, but with all outputs of the file."""
    plain, fast = _sessions(path, threads, options)
    return partial(run_outputs, plain), partial(run_outputs, fast)


def _sessions(
    path: str | Path, threads: int, options: Mapping[str, str] | None
) -> list[ort.InferenceSession]:
    return [open_session(path, threads=threads, optimize=o, options=options) for o in (False, True)]


def between_ends(
    converted: nn.Module | Predictor, path: str | Path, threads: int, options: Mapping[str, str] | None
) -> AllOutputs:
    """Returns a function that computes the module's outputs for the inputs of the file, in the file's steps.

    Pixels and outputs are rounded only if the file has integer inputs or outputs.
    """
    every = all_outputs(converted)
    ends = integer_io(open_session(path, threads=threads, optimize=False, options=options))
    if ends is None:
        return every
    return lambda images: [ends.rounded(one) for one in every(whole_pixels(images, ends))]


def whole_pixels(images: Any, ends: IntegerIO | None) -> Any:
    """Returns normalised images whose pixels are rounded to integers; unchanged if `ends` is None."""
    return images if ends is None else ends.normalised(ends.pixels(np.asarray(images, np.float32)))


def _step(value: ir.Value, output: Output, whose: str) -> tuple[float, str]:
    """Returns the size of one step of an output, and a text on where that figure comes from."""
    if not output.floats:
        return 1.0, "integers"
    quantize = _output_quantize(value)
    source = None if quantize is None else quantize.inputs[1]
    scale = None if source is None else ir.convenience.get_const_tensor(source)
    if scale is not None:
        return float(scale.numpy().max()), "the output's quantization scale"
    return (output.span / 255 or 1.0), f"the range of {whose} / 255, since the output is float"


def _output_quantize(output: ir.Value) -> ir.Node | None:
    """Returns the QuantizeLinear that a graph's output comes from, before a DequantizeLinear or directly."""
    node = output.producer()
    if node is not None and node.op_type == "QuantizeLinear":
        return node
    while node is not None and node.op_type in shape_ops():
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return None
    before = node.inputs[0].producer()
    return before if before is not None and before.op_type == "QuantizeLinear" else None
