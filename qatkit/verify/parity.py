"""Does the file compute what was trained? Three ways, in quantization steps.

The converted PyTorch module is the reference. ONNX Runtime without optimizations executes the file as written
(float kernels between the Q/DQ pairs); with all optimizations it runs integer kernels. A difference that is
there without optimizations is the exporter's fault; one that only comes with them is the optimizer's. Which
tensor it begins in, `qatkit.verify.divergence` finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from qatkit.errors import ConfigError
from qatkit.integer_ends import IntegerIO
from qatkit.verify.accuracy import Predictor, predictor
from qatkit.verify.graph_view import shape_ops
from qatkit.verify.results import Comparison, Parity
from qatkit.verify.session import FloatArray, integer_io, open_session, run_images

if TYPE_CHECKING:
    from torch import nn


def parity(
    converted: nn.Module | Predictor,
    int8_path: str | Path,
    batches: Iterable[Any],
    *,
    options: Mapping[str, str] | None = None,
    threads: int = 2,
) -> Parity:
    """Compares logits over `batches` of images [N, C, H, W] or of (images, labels).

    For a file with integer ends the module gets the same whole pixels, and its logits the file's steps.

    Args:
        converted: the module, or a function from images to its logits.
        int8_path: the file to judge.
        batches: what both are run on.
        options: session config entries of the backend.
        threads: intra-op threads.

    Raises:
        ConfigError: no images.
    """
    predictors = (
        of_pixels(converted, int8_path, threads, options),
        *file_predictors(int8_path, threads, options),
    )
    reference, unoptimized, optimized = _logits(predictors, batches)
    step, source = output_step(int8_path, reference)
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
    session = open_session(float_path, threads=threads)
    predictors = (
        lambda images: run_images(session, images),
        *file_predictors(quantized_path, threads, options),
    )
    floats, plain, fast = _logits(predictors, batches)
    step, source = output_step(quantized_path, floats, "the float file")
    return Parity(
        len(floats),
        step,
        source,
        unoptimized=None,
        optimized=_compare(plain, fast, step),
        reference="the same file without optimizations",
        against_float=_compare(floats, fast, step),
    )


def file_predictors(
    path: str | Path, threads: int, options: Mapping[str, str] | None
) -> tuple[Predictor, Predictor]:
    """A file in ONNX Runtime without optimizations, and with all."""
    plain, fast = (open_session(path, threads=threads, optimize=o, options=options) for o in (False, True))
    return lambda images: run_images(plain, images), lambda images: run_images(fast, images)


def of_pixels(
    converted: nn.Module | Predictor, path: str | Path, threads: int, options: Mapping[str, str] | None
) -> Predictor:
    """The converted module between the ends of the file: its whole pixels, and its steps of the logits."""
    predict = predictor(converted)
    ends = integer_io(open_session(path, threads=threads, optimize=False, options=options))
    if ends is None:
        return predict
    return lambda images: ends.rounded(predict(whole_pixels(images, ends)))


def whole_pixels(images: Any, ends: IntegerIO | None) -> Any:
    """What a file with integer ends sees of normalised images; those of another file stay as they are."""
    return images if ends is None else ends.normalised(ends.pixels(np.asarray(images, np.float32)))


def _logits(predictors: Sequence[Predictor], batches: Iterable[Any]) -> list[FloatArray]:
    """[N, classes] of each predictor, over all batches."""
    chunks: list[list[FloatArray]] = [[] for _ in predictors]
    for batch in batches:
        for predict, found in zip(predictors, chunks, strict=True):
            found.append(predict(images_of(batch)))
    if not chunks[0]:
        raise ConfigError("verify.parity_images", 0, "at least one image is needed to measure parity")
    return [np.concatenate(found) for found in chunks]


def images_of(batch: Any) -> Any:
    """The images of a batch that may hold labels too."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _compare(reference: FloatArray, other: FloatArray, step: float) -> Comparison:
    difference = np.abs(reference.astype(np.float64) - other)
    agreement = float((reference.argmax(1) == other.argmax(1)).mean())
    largest, mean = float(difference.max()), float(difference.mean())
    return Comparison(agreement, largest, mean, largest / step, mean / step)


def output_step(
    int8_path: str | Path, reference: FloatArray, whose: str = "the converted module"
) -> tuple[float, str]:
    """What one step of the output is worth, and where that comes from."""
    quantize = _output_quantize(ir.load(str(int8_path)).graph.outputs[0])
    source = None if quantize is None else quantize.inputs[1]
    scale = None if source is None else ir.convenience.get_const_tensor(source)
    if scale is not None:
        return float(scale.numpy().max()), "the output's quantization scale"
    span = float(reference.max() - reference.min())
    return (span / 255 or 1.0), f"float output: the range of {whose}'s logits / 255"


def _output_quantize(output: ir.Value) -> ir.Node | None:
    """The QuantizeLinear that the output of a graph comes from, behind a DequantizeLinear or itself."""
    node = output.producer()
    if node is not None and node.op_type == "QuantizeLinear":
        return node
    while node is not None and node.op_type in shape_ops():
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return None
    before = node.inputs[0].producer()
    return before if before is not None and before.op_type == "QuantizeLinear" else None
