"""Does the file compute what was trained? Three ways, in quantization steps, and tensor by tensor.

The converted PyTorch module is the reference. ONNX Runtime without optimizations executes the file as written
(float kernels between the Q/DQ pairs); with all optimizations it runs integer kernels. A difference that is
there without optimizations is the exporter's fault; one that only comes with them is the optimizer's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn

from qatkit.errors import ConfigError
from qatkit.verify.accuracy import Evaluating, run_module
from qatkit.verify.graph_view import SHAPE_OPS, back, constant, made_by, quantized_type, read_model
from qatkit.verify.results import Comparison, Divergence, Parity, TensorParity
from qatkit.verify.session import FloatArray, integer_io, open_session, run_images


def parity(
    converted: nn.Module,
    int8_path: str | Path,
    batches: Iterable[Any],
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Parity:
    """Compares logits over `batches` of images [N, C, H, W] or of (images, labels).

    For a file with integer ends the module gets the same whole pixels, and its logits the file's steps.

    Raises:
        ConfigError: no images.
    """
    plain = open_session(int8_path, threads=threads, optimize=False, options=options)
    fast = open_session(int8_path, threads=threads, optimize=True, options=options)
    ends = integer_io(plain)
    logits: tuple[list[FloatArray], ...] = ([], [], [])
    with Evaluating(converted):
        for batch in batches:
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            if ends is not None:
                images = ends.normalised(ends.pixels(np.asarray(images, np.float32)))
            reference = run_module(converted, images)
            logits[0].append(reference if ends is None else ends.rounded(reference))
            logits[1].append(run_images(plain, images))
            logits[2].append(run_images(fast, images))
    if not logits[0]:
        raise ConfigError("verify.parity_images", 0, "at least one image is needed to measure parity")
    reference, unoptimized, optimized = (np.concatenate(chunks) for chunks in logits)
    step, source = _output_step(int8_path, reference)
    return Parity(
        len(reference),
        step,
        source,
        _compare(reference, unoptimized, step),
        _compare(reference, optimized, step),
    )


def file_parity(
    float_path: str | Path,
    quantized_path: str | Path,
    batches: Iterable[Any],
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Parity:
    """Compares a file that has no PyTorch module: optimizations on against off, and against the float file.

    Args:
        float_path: what `quantized_path` was made of.
        quantized_path: the file to judge.
        batches: images [N, C, H, W], or (images, labels).
        options: session config entries for `quantized_path`.
        threads: intra-op threads.

    Raises:
        ConfigError: no images.
    """
    sessions = (
        open_session(float_path, threads=threads),
        open_session(quantized_path, threads=threads, optimize=False, options=options),
        open_session(quantized_path, threads=threads, optimize=True, options=options),
    )
    logits: tuple[list[FloatArray], ...] = ([], [], [])
    for batch in batches:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        for session, chunks in zip(sessions, logits, strict=True):
            chunks.append(run_images(session, images))
    if not logits[0]:
        raise ConfigError("verify.parity_images", 0, "at least one image is needed to measure parity")
    floats, plain, fast = (np.concatenate(chunks) for chunks in logits)
    step, source = _output_step(quantized_path, floats, "the float file")
    return Parity(
        len(floats),
        step,
        source,
        unoptimized=None,
        optimized=_compare(plain, fast, step),
        reference="the same file without optimizations",
        against_float=_compare(floats, fast, step),
    )


def _compare(reference: FloatArray, other: FloatArray, step: float) -> Comparison:
    difference = np.abs(reference.astype(np.float64) - other)
    agreement = float((reference.argmax(1) == other.argmax(1)).mean())
    largest, mean = float(difference.max()), float(difference.mean())
    return Comparison(agreement, largest, mean, largest / step, mean / step)


def _output_step(
    int8_path: str | Path, reference: FloatArray, whose: str = "the converted module"
) -> tuple[float, str]:
    """What one step of the output is worth, and where that comes from."""
    output = read_model(int8_path).graph.outputs[0]
    last = made_by(output, "QuantizeLinear")
    if last is not None and (scale := constant(last.inputs[1])) is not None:
        return float(scale), "the output's quantization scale"
    dequantize = next((node for node in back(output) if node.op_type not in SHAPE_OPS), None)
    if dequantize is not None and dequantize.op_type == "DequantizeLinear":
        scale = constant(dequantize.inputs[1])
        if made_by(dequantize.inputs[0], "QuantizeLinear") is not None and scale is not None:
            return float(scale.max()), "the output's quantization scale"
    span = float(reference.max() - reference.min())
    return (span / 255 or 1.0), f"float output: the range of {whose}'s logits / 255"


def first_divergence(
    int8_path: str | Path,
    images: Any,
    recorded: Mapping[str, NDArray[Any]],
    *,
    tolerance: int = 1,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Divergence:
    """Finds the first quantized tensor of the file that differs from the converted module's.

    ONNX Runtime runs without optimizations, with the output of every QuantizeLinear exposed.

    Args:
        int8_path: the INT8 file, of dynamic batch or of the batch of `images`.
        images: [N, C, H, W].
        recorded: the integer tensors of the converted module for the same images, by the names of the
            file's QuantizeLinear outputs. Shapes may differ by a reshape.
        tolerance: steps that are still accepted.
        options: session config entries of the backend.
        threads: intra-op threads.

    Raises:
        ConfigError: a recorded tensor is not integer, has another number of elements, or none is in the file.
    """
    model = read_model(int8_path)
    names = _expose_quantized(model)
    wanted = [name for name in names if name in recorded]
    absent = tuple(name for name in recorded if name not in names)
    if not wanted:
        raise ConfigError(
            "recorded tensors", ", ".join(absent[:3]), f"none is a quantized tensor of {int8_path}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exposed.onnx"
        ir.save(model, path)
        session = open_session(path, threads=threads, optimize=False, options=options)
        feed = {session.get_inputs()[0].name: np.ascontiguousarray(images, dtype=np.float32)}
        values = session.run(wanted, feed)
    tensors = tuple(
        _steps(name, np.asarray(value), recorded[name]) for name, value in zip(wanted, values, strict=True)
    )
    first = next((tensor for tensor in tensors if tensor.max_steps > tolerance), None)
    missing = tuple(name for name in names if name not in recorded)
    return Divergence(tolerance, first, tensors, missing, absent)


def _expose_quantized(model: ir.Model) -> list[str]:
    """Adds the output of every QuantizeLinear to the graph's outputs; returns their names in graph order."""
    names = []
    for node in model.graph:
        if node.op_type == "QuantizeLinear":
            value = node.outputs[0]
            names.append(str(value.name))
            if not value.is_graph_output():
                value.type = ir.TensorType(quantized_type(node) or ir.DataType.UINT8)
                model.graph.outputs.append(value)
    return names


def _steps(name: str, value: NDArray[Any], recorded: NDArray[Any]) -> TensorParity:
    if not np.issubdtype(recorded.dtype, np.integer):
        raise ConfigError(f"recorded tensor '{name}'", recorded.dtype, "must be integer (quantized) values")
    if recorded.size != value.size:
        raise ConfigError(f"recorded tensor '{name}'", recorded.shape, f"the file gives {value.shape}")
    distance = np.abs(value.astype(np.int64).ravel() - recorded.astype(np.int64).ravel())
    return TensorParity(name, value.size, float((distance > 0).mean()), int(distance.max(initial=0)))
