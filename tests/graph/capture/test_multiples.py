"""Tests of models that split the batch into parts.

Graph and file accept batch sizes that are multiples of the number of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from captures import Of, noise_of
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.phase import set_phase
from qatkit.graph.proof import prove
from qatkit.graph.trace import trace
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


def two_images(x: Any) -> Any:
    a, b = x.chunk(2)
    return a - b


def halves_by_size(x: Any) -> Any:
    return x[: len(x) // 2] - x[len(x) // 2 :] * 2


def split_by_size(x: Any) -> Any:
    a, b = torch.split(x, x.shape[0] // 2, dim=0)
    return torch.cat([b, a])


def ghost_batches(x: Any) -> Any:
    return torch.cat([part - part.mean(0) for part in x.chunk(2, dim=0)])


def ghost_batches_by_view(x: Any) -> Any:
    y = x.view(2, x.shape[0] // 2, *x.shape[1:])
    return ((y - y.mean(1, keepdim=True)) / 2).view(x.shape)


def every_other(x: Any) -> Any:
    return x[::2] * x[1::2]


def neighbours(x: Any) -> Any:
    a, b = x.reshape(-1, 2, *x.shape[1:]).unbind(1)
    return a * b


def mirrored(x: Any) -> Any:
    return x + x.roll(len(x) // 2, 0) * 2


def three_parts(x: Any) -> Any:
    a, b, c = x.tensor_split(3)
    return a * b + c


def three_chunks(x: Any) -> Any:
    if len(x) % 3:
        raise ValueError("three frames belong together")
    return torch.stack(x.chunk(3), 1).mean(1)


def four_chunks(x: Any) -> Any:
    a, b, c, d = x.chunk(4)
    return a + b * c - d


MODELS: list[tuple[Callable[[Any], Any], int, int]] = [
    *((one, images, 2) for one in (two_images, halves_by_size) for images in (2, 4, 6)),
    *((one, 4, 2) for one in (split_by_size, ghost_batches, ghost_batches_by_view, every_other, neighbours, mirrored)),
    (three_parts, 3, 3),
    (three_chunks, 6, 3),
    (four_chunks, 12, 4),
]  # fmt: skip


@pytest.mark.parametrize(("function", "images", "multiple"), MODELS)
def test_graphs_take_multiples(function: Callable[[Any], Any], images: int, multiple: int) -> None:
    model, example = Of(function).eval(), noise_of(images, 3, 4, 6)
    graph = trace(model, example).eval()
    assert graph.meta["batch_axes"] == (0,) and graph.meta["batch_multiple"] == multiple
    said = f"the model accepts only batch sizes that are multiples of {multiple}, and so does the file"
    assert ("input", said) in graph.meta["notes"]
    prove(model, graph, example)
    for size in (multiple, 4 * multiple, 5 * multiple):
        x = noise_of(size, 3, 4, 6, seed=size)
        torch.testing.assert_close(graph(x), model(x))


_QUICK = (two_images, three_parts, mirrored)
FILES = [
    pytest.param(one, marks=[] if one in _QUICK else [pytest.mark.slow])
    for one, images, _ in MODELS
    if images in (3, 4, 12)
]


@pytest.mark.parametrize("function", FILES)
def test_files_take_multiples(function: Callable[[Any], Any], tmp_path: Path) -> None:
    model, example = Of(function).eval(), noise_of(12, 3, 4, 6)
    module = QATModule(model, example)
    given = [noise_of(size, 3, 4, 6, seed=size) for size in (12, 36)]
    module.calibrate(given)
    set_phase(module.graph, observe=False, quantize=False)
    multiple = module.graph.meta["batch_multiple"]
    assert len(module.example) == multiple
    for graph, close in ((trace(model, example).eval(), 1e-5), (module.convert().graph, 0.1)):
        export_onnx(graph, module.example, tmp_path / "model.onnx")
        session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        for x in given if function is not three_parts else given[:1]:
            with torch.no_grad():
                expected = model(x).numpy()
            (found,) = session.run(None, {"input": x.numpy()})
            np.testing.assert_allclose(found, expected, rtol=0, atol=close * np.abs(expected).max())


def test_places_that_are_no_share_leave_any_batch() -> None:
    """With two or four images, `x[:1]` must not be taken for a half or a quarter of the batch."""
    for images in (2, 4):
        graph = trace(Of(lambda x: x - x[:1] + x[1] + x[-1]).eval(), noise_of(images, 3, 4, 6))
        assert graph.meta["batch_axes"] == (0,) and graph.meta["batch_multiple"] == 1


def test_a_pair_of_images_alone_is_one_batch() -> None:
    def pair(x: Tensor) -> Any:
        a, b = x
        return a + b

    graph = trace(Of(pair).eval(), noise_of(2, 3, 4, 6))
    assert graph.meta["batch_axes"] == (None,)
    assert ("input", "the model accepts only the example's batch size, and so does the file") in graph.meta[
        "notes"
    ]


def test_chunks_that_a_batch_lacks_are_refused_with_their_line() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return sum(self.before(x).chunk(4))

    with pytest.raises(ConfigError, match=r"chunk.4.*: the size of the batch decides what is computed"):
        trace(Sum().eval(), noise_of(2, 3, 4, 6))
