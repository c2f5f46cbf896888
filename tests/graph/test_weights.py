"""Tests of weighted functions, such as F.linear, outside torch.nn layers: results, training, int8 files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from chain import noise, prepared, run_ort, run_torch, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.verify.audit import audit

Function = Callable[[Any, Tensor], Tensor]


class Weights(nn.Module):
    """A model that computes a function of the input and some parameters."""

    def __init__(self, function: Function, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Case(NamedTuple):
    """A function, the shapes of its parameters and of an image, and the shape of the file's int8 weight."""

    function: Function
    shapes: dict[str, tuple[int, ...]]
    image: tuple[int, ...]
    weight: tuple[int, ...]


def standardized(m: Any) -> Tensor:
    """Returns the standardized weight, as in BiT and NFNet."""
    flat = F.batch_norm(m.w.reshape(1, 8, -1), None, None, m.g, None, True, 0.0, 1e-6)
    return flat.reshape(8, 3, 3, 3)


CASES = {
    "conv2d": Case(
        lambda m, x: F.conv2d(x, m.w, m.b, padding=1),
        {"w": (8, 3, 3, 3), "b": (8,)},
        (3, 6, 6),
        (8, 3, 3, 3),
    ),
    "conv1d": Case(
        lambda m, x: F.conv1d(x, m.w, None, 2, padding="valid"), {"w": (8, 3, 3)}, (3, 8), (8, 3, 3)
    ),
    "conv3d": Case(
        lambda m, x: F.conv3d(x, m.w, groups=2), {"w": (4, 1, 2, 2, 2)}, (2, 4, 4, 4), (4, 1, 2, 2, 2)
    ),
    "linear": Case(lambda m, x: F.linear(x, m.w, m.b), {"w": (8, 12), "b": (8,)}, (12,), (8, 12)),
    "matmul": Case(lambda m, x: x @ m.w + m.b, {"w": (12, 8), "b": (8,)}, (5, 12), (8, 12)),
    "left": Case(lambda m, x: m.w @ x, {"w": (8, 12)}, (12, 5), (8, 12)),
    "vector": Case(lambda m, x: x @ m.w, {"w": (12,)}, (5, 12), (1, 12)),
    "stack": Case(lambda m, x: x @ m.w, {"w": (3, 8, 6)}, (3, 5, 8), (18, 8, 1)),
    "repeated": Case(lambda m, x: x[:, None] @ m.w, {"w": (3, 8, 6)}, (5, 8), (18, 8)),
    "bmm": Case(
        lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), {"w": (3, 8, 6)}, (3, 8), (18, 8, 1)
    ),
    "addmm": Case(lambda m, x: torch.addmm(m.b, x, m.w.t()), {"w": (8, 12), "b": (8,)}, (12,), (8, 12)),
    "addmm scaled": Case(
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2), {"w": (12, 8), "b": (8,)}, (12,), (8, 12)
    ),
    "baddbmm": Case(
        lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1),
        {"w": (3, 8, 6), "b": (3, 1, 6)},
        (3, 8),
        (18, 8, 1),
    ),
    "einsum": Case(lambda m, x: torch.einsum("btd,ed->bte", x, m.w), {"w": (8, 12)}, (5, 12), (8, 12)),
    "einsum dots": Case(lambda m, x: torch.einsum("...d, de", x, m.w), {"w": (4, 6)}, (5, 3, 4), (6, 4)),
    "into heads": Case(
        lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), {"w": (2, 12, 4)}, (5, 12), (8, 12)
    ),
    "out of heads": Case(
        lambda m, x: torch.einsum("bthe,hed->btd", x, m.w), {"w": (3, 4, 6)}, (5, 3, 4), (6, 12)
    ),
    "per head": Case(
        lambda m, x: torch.einsum("bhtd,hde->bhte", x, m.w), {"w": (3, 8, 6)}, (3, 5, 8), (18, 8, 1)
    ),
    "per head of images": Case(
        lambda m, x: torch.einsum("bhijd,hde->bijhe", x, m.w), {"w": (3, 8, 6)}, (3, 4, 5, 8), (18, 8, 1)
    ),
    "tensordot": Case(
        lambda m, x: torch.tensordot(x, m.w, dims=([1, 2], [1, 0])), {"w": (4, 3, 8)}, (3, 4), (8, 12)
    ),
    "weight_norm": Case(
        lambda m, x: F.linear(x, m.g * m.v / m.v.norm(dim=1, keepdim=True)),
        {"g": (8, 1), "v": (8, 12)},
        (12,),
        (8, 12),
    ),
    "lora": Case(
        lambda m, x: F.linear(x, m.w + m.b @ m.a * 2.0),
        {"w": (8, 12), "b": (8, 2), "a": (2, 12)},
        (12,),
        (8, 12),
    ),
    "standardized": Case(
        lambda m, x: F.conv2d(x, standardized(m), padding=1),
        {"w": (8, 3, 3, 3), "g": (8,)},
        (3, 6, 6),
        (8, 3, 3, 3),
    ),
    "split biases": Case(
        lambda m, x: F.linear(x, m.w, torch.cat((m.q, torch.zeros_like(m.v), m.v))),
        {"w": (12, 12), "q": (4,), "v": (4,)},
        (12,),
        (12, 12),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_fuse_computes_the_same_without_the_function(name: str) -> None:
    case = CASES[name]
    model, x = Weights(case.function, case.shapes).eval(), noise(4, *case.image)
    result = fuse(model, x[:2])
    assert (result.changed, result.skipped) == (1, [])
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.graph(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_reach_every_parameter_once(name: str) -> None:
    case = CASES[name]
    model, x = Weights(case.function, case.shapes), noise(8, *case.image)
    graph = prepared(model, x[:2]).train()
    assert sum(p.numel() for p in graph.parameters()) == sum(p.numel() for p in model.parameters())
    set_phase(graph, observe=True, quantize=False)
    graph(x).square().sum().backward()
    model(x).square().sum().backward()
    wanted = sorted(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
    found = sorted(p.grad.norm().item() for p in graph.parameters() if p.grad is not None)
    assert found == pytest.approx(wanted, rel=1e-3)
    set_phase(graph, observe=True, quantize=True)
    graph.zero_grad()
    graph(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in graph.parameters())


# An export takes seconds, so the default suite has one case of each kind.
SHIPPED = ("conv2d", "matmul", "per head", "weight_norm", "split biases")
EXPORTS = [pytest.param(n, marks=[] if n in SHIPPED else pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", EXPORTS)
def test_the_file_stores_the_weight_once_in_int8_and_agrees(name: str) -> None:
    case = CASES[name]
    model, x = Weights(case.function, case.shapes).eval(), noise(16, *case.image)
    done = ship(model, x, f"weights_{name.replace(' ', '_')}")
    plain, fast = run_ort(done.path, x, optimize=False), run_ort(done.path, x)
    np.testing.assert_allclose(plain, run_torch(done.converted, x), atol=2e-6)
    np.testing.assert_allclose(plain, fast, atol=2e-6)
    wanted = run_torch(model, x)
    assert np.square(plain - wanted).mean() < 1e-3 * np.square(wanted).mean()
    assert audit(done.path).int8_share >= 0.95
    stored = [i for i in onnx.load(done.path).graph.initializer if np.prod(i.dims) >= np.prod(case.weight)]
    assert [(tuple(i.dims), i.data_type) for i in stored] == [(case.weight, onnx.TensorProto.INT8)]


def test_a_kernel_that_its_module_holds_alone() -> None:
    """The result must stay the same although an operator replaces the module that holds the kernel."""

    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.tensor([[1.0, 2.0], [3.0, 4.0]]) / 10)
            self.kernel: Tensor

        def forward(self, x: Tensor) -> Tensor:
            kernel = self.kernel[None, None].expand(x.shape[1], 1, 2, 2)
            return F.conv2d(x, kernel, groups=x.shape[1])

    model, x = nn.Sequential(nn.ReLU(), Blur()), torch.randn(2, 3, 6, 6)
    graph = fuse(model, x).graph
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x))
