"""Computes every tensor with the exported file in ONNX Runtime, for comparison with float and the simulation.

Two comparisons use the file. The integers of the file and of the converted module are compared up to the first tensor
that differs. This finds errors in the file (a wrong axis, scale or zero_point). The dequantized tensors of the file are
compared with float. This shows how far each tensor is from float.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qatkit.analysis.switches import Switch
from qatkit.analysis.tensors import Tensors
from qatkit.export.converted_reference import ConvertedReference
from qatkit.records.analysis import Comparison
from qatkit.records.results import Divergence
from qatkit.verify.divergence import dequantized, first_divergence
from qatkit.verify.parity import whole_pixels
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.session import integer_io, open_session


@dataclass(frozen=True)
class RuntimeTensors:
    """A file and the converted module that it was made from.

    Attributes:
        file: the INT8 file, whose batch size is dynamic or equal to that of the images.
        reference: the converted module.
        options: the session config entries of the backend.
        threads: the number of intra-op threads.
        pairs: the names of QuantizeLinear outputs by the path of their quantizer, for a file in which node names do
            not tell (`qatkit.importing.tensor_names.pairs_in_file`).
    """

    file: Path
    reference: ConvertedReference
    options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 2
    pairs: Mapping[str, str] = field(default_factory=dict)

    def images(self, batches: Iterable[Any]) -> list[Any]:
        """Returns the inputs of each batch; for a file with uint8 input, pixels are rounded to integers."""
        session = open_session(self.file, threads=self.threads, optimize=False, options=self.options)
        ends = integer_io(session)
        if ends is None:
            return list(batches)
        return [torch.as_tensor(np.asarray(whole_pixels(one, ends), np.float32)) for one in batches]

    def values(self, batches: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields the dequantized tensors of each batch by the path of their quantizer.

        If a quantizer is called several times, only its first call is included.
        """
        named = self.reference.file_names(self.file)
        first = {**self.pairs, **{path: calls[0] for path, calls in named.items() if 0 in calls}}
        for images in batches:
            found = dequantized(
                self.file, set(first.values()), images, options=self.options, threads=self.threads
            )
            yield {path: torch.as_tensor(found[name]) for path, name in first.items() if name in found}

    def divergence(self, images: Any) -> Divergence:
        """Compares the file with the converted module on one batch; returns the first tensor that differs, if any."""
        recorded = self.reference.integers(images, self.file)
        output = self.reference(images)
        step = float(np.ptp(output)) / 255 or 1.0
        return first_divergence(
            self.file,
            images,
            recorded,
            output=(output, step),
            options=self.options,
            threads=self.threads,
        )


def compared_with_file(
    graph_module: fx.GraphModule,
    runtime: RuntimeTensors,
    batches: Sequence[Any],
    at: Sequence[Switch] | None = None,
) -> Comparison:
    """Compares every tensor in float, in simulation and in ONNX Runtime.

    Args:
        graph_module: the prepared graph from which the file was made, with its ranges set.
        runtime: the file and its converted module.
        batches: batches of images, of a size that the file accepts.
        at: the sites to compare; all by default.

    Returns:
        The comparison. If ONNX Runtime fails, a note has the reason, and values of ONNX Runtime are missing.
    """
    images = runtime.images(batches)
    tensors = Tensors(graph_module, images, at)
    tensors.measure()
    first, notes = None, list[str]()
    try:
        first = divergence_in_words(runtime.divergence(images[0]))
        left_out = tensors.beside(runtime.values(images))
        notes += [f"{site} was not compared: it has another size in the file" for site in left_out]
    except Exception as error:  # any error: the values that were measured are kept
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        notes.append(
            f"tensors were not compared in ONNX Runtime ({kind}{' '.join(str(error).split())[:200]})"
        )
    return tensors.result(first, notes)


def divergence_in_words(found: Divergence) -> str | None:
    """Describes the first tensor that differs, with its operator; None if all are equal."""
    if found.first is None:
        return None
    where = f" of '{found.operator}'" if found.operator else ""
    return (
        f"'{found.first.name}'{where}: {100 * found.first.mismatching:.3g} % of its values differ, by up to"
        f" {counted(found.first.max_steps, 'step')}"
    )
