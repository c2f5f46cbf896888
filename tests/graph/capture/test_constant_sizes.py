"""Tests of sizes computed from buffers: they are the same in every run, and become numbers in the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captures import Calls, noise_of, same
from chain import run_ort, run_torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.trace import trace


def rest(m: Any, x: Tensor) -> Any:
    """Returns a padding on the right, computed from the kernel and the stride as audio codecs do."""
    frames = torch.ceil((x.shape[-1] - m.kernel) / m.stride + 1).to(torch.int64) - 1
    return frames * m.stride + m.kernel + m.stride - x.shape[-1]


def padded(m: Any, x: Tensor) -> Any:
    return m.conv(F.pad(x, (2, rest(m, x)))).mean(-1)


def padded_by_name(m: Any, x: Tensor) -> Any:
    return m.conv(F.pad(x, pad=[rest(m, x), 2], mode="replicate")).mean(-1)


def cut(m: Any, x: Tensor) -> Any:
    return m.conv(x[..., : m.kernel * 2]).mean(-1)


def reshaped(m: Any, x: Tensor) -> Any:
    return m.conv(x.view(-1, 3, m.stride, 5).flatten(2)).mean(-1)


def expanded(m: Any, x: Tensor) -> Any:
    return m.conv(x[..., :1].expand(-1, -1, m.kernel)).mean(-1)


def filled(m: Any, x: Tensor) -> Any:
    return m.conv(torch.cat([x, x.new_zeros(x.shape[0], 3, m.stride)], -1)).mean(-1)


def narrowed(m: Any, x: Tensor) -> Any:
    return m.conv(x.narrow(2, m.stride, m.kernel)).mean(-1)


def counted(m: Any, x: Tensor) -> Any:
    return m.conv(x + torch.arange(m.stride * 5)).mean(-1)


def resized(m: Any, x: Tensor) -> Any:
    return m.conv(F.interpolate(x, size=(m.kernel,))).mean(-1)


def with_buffers(function: Callable[..., Any]) -> nn.Module:
    model = Calls(function, conv=nn.Conv1d(3, 4, 7, stride=4))
    model.register_buffer("stride", torch.tensor(4))
    model.register_buffer("kernel", torch.tensor(7))
    return model.eval()


@pytest.mark.parametrize(
    "function",
    [padded, padded_by_name, cut, reshaped, expanded, filled, narrowed, counted, resized],
    ids=lambda function: function.__name__,
)
def test_sizes_from_buffers_are_numbers(function: Callable[..., Any]) -> None:
    graph = same(with_buffers(function), noise_of(3, 3, 20))
    assert not {"stride", "kernel"} & {node.target for node in graph.graph.nodes if node.op == "get_attr"}


def test_a_size_from_a_buffer_is_exported(tmp_path: Path) -> None:
    model, x = with_buffers(narrowed), noise_of(3, 3, 20)
    export_onnx(trace(model, x), x[:2], tmp_path / "model.onnx")
    np.testing.assert_allclose(run_ort(tmp_path / "model.onnx", x), run_torch(model, x), atol=1e-5)


def test_a_tensor_that_is_no_size_stays_one() -> None:
    """A fill value and a learned offset are not sizes, so they stay tensors of the graph."""

    def shifted(m: Any, x: Tensor) -> Any:
        return m.conv(F.pad(x, (1, 1)) + m.shift).mean(-1) + torch.full((4,), m.stride)

    model = with_buffers(shifted)
    model.shift = nn.Parameter(torch.tensor(0.5))
    graph = same(model, noise_of(3, 3, 20))
    assert {node.target for node in graph.graph.nodes if node.op == "get_attr"} == {"shift", "stride"}
