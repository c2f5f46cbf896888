"""Tests of decomposing operators node by node, without a second trace of the program.

Some programs are left to the decomposition of torch's exporter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from torch import Tensor, nn
from torch.nn import functional
from torch.onnx._internal.exporter import _fx_passes

from qatkit.export.decompositions import decomposed_where_needed
from qatkit.export.torch_to_onnx import export_onnx
from qatkit_verify.errors import ConfigError

MEAN, VARIANCE = noise(4), noise(4).square() + 1
# Each takes [N, 4, 6, 6] and is exported without a second trace of the program.
WRITTEN_OUT: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda x: x.flatten(1),
    "flatten of no more than one axis": lambda x: x.relu().flatten(2, 2),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "reshape": lambda x: x.reshape(-1, 12),
    "reshape with the batch in front": lambda x: x.reshape(x.shape[0], 2, -1),
    "reshape_as": lambda x: x.flatten(1).reshape_as(x),
    "view_as": lambda x: x.reshape(x.shape[0], 144).view_as(x),
    "contiguous, then a view": lambda x: x.permute(0, 2, 3, 1).contiguous().view(x.shape[0], 36, 4),
    "to another type": lambda x: (x > 0).to(torch.float32) * x,
    "to the same type": lambda x: x.relu().to(torch.float32),
    "the input as it is, too": lambda x: (x.to(torch.float32), x + 1),
    "type_as": lambda x: (x > 0).type_as(x) - x,
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "chunk into unequal parts": lambda x: x.chunk(4, -1)[2] * 2,
    "chunk into fewer parts": lambda x: x.chunk(5, 2)[-1] * 2,
    "clip": lambda x: x.clip(-0.5, 1.0),
    "clip without a lower end": lambda x: x.clip(max=0.5),
    "clip to tensors": lambda x: x.clip(-x.abs().mean(), x.abs().mean()),
    "square": lambda x: x.square() + 1,
    "and, or, xor": lambda x: ((x > 0) & (x < 1) | (x > 2)) ^ (x > 1.5),
    "a difference": lambda x: x.diff(),
    "a difference with a start": lambda x: x.diff(dim=1, prepend=x[:, :1] * 2),
    "a difference with an end": lambda x: torch.diff(x, 1, 2, append=x[:, :, -2:]),
    "mean of a sequence": lambda x: functional.adaptive_avg_pool1d(x.flatten(2), 1),
    "mean of an image": lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1),
    "mean of a volume": lambda x: functional.adaptive_avg_pool3d(x.unsqueeze(1), 1),
    "batch norm": nn.BatchNorm2d(4).eval(),
    "batch norm of known statistics": lambda x: functional.batch_norm(x, MEAN, VARIANCE),
    "layers": nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Hardswish(), nn.Flatten(), nn.Linear(128, 3)
    ),
}
# The same for [N, 4, H, W] with any batch and image size.
OF_ANY_SIZE: dict[str, Callable[[Tensor], Any]] = {
    "flatten of two free axes": lambda x: x.flatten(2),
    "flatten between free axes": lambda x: x.relu().flatten(1, 2),
    "flatten of the first axes": lambda x: x.flatten(0, 1) + 1,
    "flatten behind a pool": lambda x: functional.max_pool2d(x, 2).flatten(2).mean(2),
    "unflatten beside free axes": lambda x: x.unflatten(1, (2, 2)),
    "view_as": lambda x: x.flatten(2).view_as(x),
    "heads of attention": lambda x: (
        x.permute(0, 2, 3, 1).unflatten(3, (2, 2)).transpose(2, 3).flatten(3).flatten(1, 2)
    ),
}
# Each needs the exporter's own decompositions.
LEFT: dict[str, Callable[[Tensor], Any]] = {
    "operators without a translation": lambda x: x.var(1, keepdim=True).expand_as(x) + x,
    "two types of floating point": lambda x: (
        x * torch.from_numpy(np.linspace(1, 2, 6)).type_as(x) + x.double()
    ),
    "a pool into several parts": lambda x: functional.adaptive_max_pool1d(x.flatten(2), 4),
    "a branch": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)),
}


class Function(nn.Module):
    """A model that applies one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that records the programs that torch's exporter decomposes."""
    seen: list[Any] = []
    decompose = _fx_passes.decompose_with_registry

    def counted(program: Any, registry: Any) -> Any:
        seen.append(program)
        return decompose(program, registry)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", counted)
    return seen


def check(function: Callable[[Tensor], Any], path: Path) -> None:
    """Exports a model with a dynamic batch, and checks the file against it at another batch size."""
    model = Function(function).eval()
    x = noise(3, 4, 6, 6, seed=1)
    with torch.no_grad():
        result = model(x)
    expected = (result,) if isinstance(result, Tensor) else result
    export_onnx(model, noise(2, 4, 6, 6), path)

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_programs_are_traced_once_where_that_is_enough(name: str, tmp_path: Path, traces: list[Any]) -> None:
    check(WRITTEN_OUT[name], tmp_path / "model.onnx")
    assert not traces


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_programs_of_any_size_are_traced_once_too(name: str, tmp_path: Path, traces: list[Any]) -> None:
    path, function, free = tmp_path / "model.onnx", OF_ANY_SIZE[name], torch.export.Dim.DYNAMIC
    with decomposed_where_needed():
        torch.onnx.export(Function(function).eval(), (noise(2, 4, 6, 8),), path, input_names=["input"], verbose=False,
                          dynamo=True, dynamic_shapes=({0: free, 2: free, 3: free},), external_data=False)  # fmt: skip

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in ((1, 4, 6, 8), (3, 4, 11, 5), (2, 4, 4, 40)):
        x = noise(*shape, seed=3)
        (found,) = session.run(None, {"input": x.numpy()})
        np.testing.assert_allclose(found, function(x), rtol=1e-5, atol=1e-5)
    assert not traces


@pytest.mark.parametrize("name", LEFT)
def test_other_programs_are_left_to_the_exporter(name: str, tmp_path: Path, traces: list[Any]) -> None:
    check(LEFT[name], tmp_path / "model.onnx")
    assert len(traces) == 1


def test_the_exporter_is_as_before_after_a_failure(tmp_path: Path) -> None:
    before = _fx_passes.decompose_with_registry
    with pytest.raises(ConfigError):
        check(torch.linalg.eigvals, tmp_path / "model.onnx")
    assert _fx_passes.decompose_with_registry is before
    assert not list(tmp_path.iterdir())
