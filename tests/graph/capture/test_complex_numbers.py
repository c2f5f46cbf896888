"""Tests of complex numbers in a model: they become pairs of real numbers in its graph and file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from captures import Calls, Of, noise_of, same
from torch import Tensor, fx, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.fuse import fuse
from qatkit.graph.proof import prove
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

ANGLES = torch.outer(torch.arange(16.0), 10000 ** -torch.arange(0, 1, 1 / 3))
TURNS = torch.polar(torch.ones_like(ANGLES), ANGLES)


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def llama(x: Any) -> Any:
    turns = TURNS[: x.shape[1]].view(1, x.shape[1], 1, 3)
    return torch.view_as_real(pairs(x) * turns).flatten(3).type_as(x)


def computed_turns(x: Any) -> Any:
    angles = ANGLES[: x.shape[1], None]
    z = pairs(x)
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(
        -2
    ) + torch.view_as_real(torch.exp(1j * x[..., :3]) * z.conj()).flatten(-2)


def polar_form(x: Any) -> Any:
    z = torch.polar(x[..., :3].exp(), x[..., 3:])
    w = torch.complex(x[..., 3:], x[..., :3])
    return torch.cat([z.abs() + w.angle(), (z * w).real + z.imag - (z / w).imag], -1)


def arithmetic(x: Any) -> Any:
    z = pairs(x)
    y = (2 - 1j * z) * (z + 3) - z / (1 + 2j) + z.square() - x[..., :3] + (z + 0.5) ** 3
    y = y + z.reciprocal() * 0.01 + z.conj() / (z.abs() + 1) - torch.where(z.abs() > 1, z, 0.0) + -z
    return torch.view_as_real(y).flatten(-2)


def shapes(x: Any) -> Any:
    z = pairs(x).transpose(1, 2)
    a, b = torch.cat([z, z.real + 0 * z], 1).chunk(2, 1)
    c, *_ = torch.stack([a, b.flip(-1)], 1).unbind(1)
    y = (c.roll(1, -1) + b[:, :, :1].expand_as(b)).permute(0, 2, 1, 3).sum(-1, keepdim=True) + z.transpose(
        1, 2
    )
    y = y.reshape(x.shape[0], -1).view(*x.shape[:-1], 3)
    return torch.view_as_real(y.contiguous().resolve_conj()).flatten(-2)


def matrices(x: Any) -> Any:
    z = pairs(x)
    y = z @ z.mH + torch.einsum("bthc,bthd->btcd", z, z.conj())[..., :1, :1].real
    return torch.cat([(y @ z).real, (y @ z).imag], -1) * 0.1


def broadcast(x: Any) -> Any:
    """Adds a complex number to real ones, and subtracts real ones from another complex number."""
    return torch.view_as_real(x + TURNS[0, :1]).sum(-1) + (TURNS[1, :1] - x).imag


def state_space(self: Any, x: Any) -> Any:
    y = self.before(x)
    state = torch.zeros(x.shape[0], 3, dtype=torch.cfloat)
    found = []
    for t in range(x.shape[1]):
        state = state * torch.exp(self.pole) + y[:, t, :3].to(torch.cfloat)
        found.append((state * self.out).real)
    return self.after(torch.stack(found, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        function.__name__: (partial(Of, function), (5, 4, 6))
        for function in (llama, computed_turns, polar_form, arithmetic, shapes, matrices, broadcast)
    },
    "state_space": (
        lambda: Calls(
            state_space,
            before=nn.Linear(6, 6),
            after=nn.Linear(3, 6),
            pole=nn.Parameter(torch.complex(-torch.rand(3), torch.rand(3))),
            out=nn.Parameter(torch.complex(noise_of(3), noise_of(3, seed=1))),
        ),
        (5, 6),
    ),
}


def in_onnxruntime(
    graph: fx.GraphModule, model: nn.Module, shape: tuple[int, ...], path: Path, opset: int = 13
) -> None:
    """Checks that the exported graph computes what the model does, for batches of 1 and 3."""
    export_onnx(graph, noise_of(2, *shape), path, opset=opset)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in (1, 3):
        x = noise_of(size, *shape, seed=size)
        with torch.no_grad():
            expected = model(x).numpy()
        (found,) = session.run(None, {"input": x.numpy()})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", MODELS)
def test_complex_numbers_are_pairs_for_any_batch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().eval()
    example = noise_of(2, *shape)
    graph = same(model, example, tolerance=2e-5)
    assert graph.meta["batch_axes"] == (0,)
    assert not any(tensor.is_complex() for tensor in graph.state_dict().values())
    opened = stub(fuse(model, example, depthwise=True).graph, example).graph
    prove(model, opened, example)

    in_onnxruntime(graph.eval(), model, shape, tmp_path / "model.onnx")


def test_a_fourier_transform_between_products_stays(tmp_path: Path) -> None:
    """In this global filter network, the filters become pairs, and the transforms stay complex."""

    def filtered(self: Any, x: Tensor) -> Any:
        y = torch.fft.rfft2(self.before(x), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filters)
        return self.after(torch.fft.irfft2(y, s=(8, 8), dim=(1, 2), norm="ortho"))

    torch.manual_seed(0)
    filters = nn.Parameter(noise_of(8, 5, 6, 2))
    model = Calls(filtered, before=nn.Linear(6, 6), after=nn.Linear(6, 6), filters=filters).eval()
    graph = same(model, noise_of(2, 8, 8, 6), tolerance=2e-5).eval()
    in_onnxruntime(graph, model, (8, 8, 6), tmp_path / "model.onnx", opset=17)


def test_angles_on_the_negative_axis(tmp_path: Path) -> None:
    """Imaginary parts from a ReLU are often 0, where the angle of a negative number must be π, not -π."""
    x = torch.tensor([[0.0, -1], [0, 1], [0, 0], [1, 0], [-1, 0], [1, 1], [-1, -1], [1, -1], [-1, 1]])

    def angles(self: Any, x: Tensor) -> Tensor:
        return torch.complex(x[:, 1], x[:, 0]).angle()

    export_onnx(trace(Calls(angles), x).eval(), x, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, np.angle(x[:, 1].numpy() + 1j * x[:, 0].numpy()), rtol=1e-6)


@pytest.mark.parametrize("where", ["input", "output"])
def test_complex_ends_are_refused_in_one_line(where: str, tmp_path: Path) -> None:
    def ends(self: Any, x: Tensor) -> Tensor:
        return self.after(x.real) if where == "input" else torch.complex(self.after(x), x)

    example = torch.complex(noise_of(2, 6), noise_of(2, 6, seed=1)) if where == "input" else noise_of(2, 6)
    graph = same(Calls(ends, after=nn.Linear(6, 6)), example)
    with pytest.raises(
        ConfigError, match=rf"{where}( 'input')? is complex, and ONNX computes with real numbers only; use"
    ):
        export_onnx(graph.eval(), example, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_pairs_are_trained() -> None:
    """The two parts of a complex parameter get its gradients, and the gradient of a modulus of 0 is 0."""
    model: Any = MODELS["state_space"][0]()
    x = noise_of(3, 5, 6)
    graph = trace(model, x)
    graph(x).square().sum().backward()
    model(x).square().sum().backward()
    pole, parts = model.pole.grad, dict(graph.named_parameters())
    torch.testing.assert_close(parts["pole_real"].grad, pole.real)
    torch.testing.assert_close(parts["pole_imag"].grad, pole.imag)

    zero = trace(Calls(lambda _, x: torch.view_as_complex(x).abs()), torch.ones(2, 3, 2))
    given = torch.zeros(2, 3, 2, requires_grad=True)
    zero(given).sum().backward()
    torch.testing.assert_close(given.grad, torch.zeros(2, 3, 2))
