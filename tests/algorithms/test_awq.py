"""Tests of AWQ: it keeps the float function, finds the best strength and lowers the quantization error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from chain import SMALL, noise, run_ort, settle
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms import AWQ, GPTQ
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.quant.backends import WEIGHT_ONLY, Backend
from qatkit.quant.granularity import PerBlock, PerTensor


class Gated(nn.Module):
    """A gated feed-forward block as in language models: two Linears, one a gate, read an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(64), nn.Linear(64, 96, bias=False), nn.Linear(64, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return cast(Tensor, self.down(self.up(y) * F.silu(self.gate(y))))


def backend(bits: int, block: int = 32) -> Backend:
    spec = replace(WEIGHT_ONLY.weight, dtype=f"int{bits}", granularity=PerBlock(block))
    return replace(WEIGHT_ONLY, weight=spec)


def prepared(model: nn.Module, example: Tensor, chosen: Backend) -> fx.GraphModule:
    graph = Captured(model.eval(), example).graph()
    prepare_qat(graph, chosen, example)
    return graph.eval()


def quantized(graph: fx.GraphModule, images: Tensor) -> Tensor:
    set_phase(graph, observe=False, quantize=True)
    return cast(Tensor, graph(images)).detach()


def uneven(model: nn.Module) -> nn.Module:
    """Makes six outputs of the norm 12 times larger and their weights in both Linears 4 times smaller."""
    torch.manual_seed(0)
    gated = cast(Gated, model)
    with torch.no_grad():
        gated.norm.weight[::11] *= 12
        for reader in (gated.up, gated.gate):
            reader.weight[:, ::11] /= 4
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"gated": (Gated, (5, 64)), **SMALL}


@pytest.mark.parametrize("name", MODELS)
def test_the_float_function_stays(name: str) -> None:
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model, images = settle(kind(), *shape), noise(6, *shape)
    graph = prepared(model, images[:2], backend(2, 16))

    result = AWQ()(graph, [images])

    assert result.skipped == AWQ().notes(graph)
    with inference(graph):
        set_phase(graph, observe=False, quantize=False)
        found = cast(Tensor, graph(images))
    torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-5)


def rounded(weight: np.ndarray, block: int) -> np.ndarray:
    """Quantizes weights to int4 (scale and zero_point per block) and back, in float32 like the package."""
    rows = weight.astype(np.float32).reshape(len(weight), -1, block)
    low, high = np.minimum(rows.min(2, keepdims=True), 0), np.maximum(rows.max(2, keepdims=True), 0)
    scale = (high - low) / np.float32(15)
    zero = np.round(-8 - low / scale)
    steps = np.clip(np.round(rows / scale), -8 - zero, 7 - zero)
    return np.asarray((steps * scale).reshape(weight.shape))


def test_the_strength_has_the_least_error_of_both_readers() -> None:
    model, images = uneven(Gated()), noise(16, 5, 64)
    gated = cast(Gated, model)
    x = gated.norm(images).detach().flatten(0, 1).double().numpy()
    weights = [one.weight.detach().double().numpy() for one in (gated.up, gated.gate)]
    sizes = np.sqrt(np.square(x).mean(0))

    def factors(strength: float) -> np.ndarray:
        s = sizes**strength
        return np.asarray(s / np.sqrt(s.max() * s.min()))

    def error(strength: float) -> float:
        s = factors(strength)
        return float(
            sum(
                np.square(x @ (rounded(w * s, 32) / s - w).T).sum() / np.square(x @ w.T).sum()
                for w in weights
            )
        )

    strengths = [i / 10 for i in range(11)]
    best = min(strengths, key=error)
    assert 0 < best < 1 and error(best) < 0.5 * error(0)
    graph = prepared(model, images[:2], backend(4))

    AWQ(steps=10)(graph, [images[:10], images[10:]])

    divided = (
        gated.norm.weight.detach().numpy() / dict(graph.named_parameters())["norm.weight"].detach().numpy()
    )
    np.testing.assert_allclose(divided, factors(best), rtol=1e-4)


def decibel(wanted: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(wanted.square().mean() / (found - wanted).square().mean()))


@pytest.mark.parametrize("then", [None, GPTQ(images=64)])
def test_large_inputs_cost_less_in_onnx_runtime(then: GPTQ | None, tmp_path: Path) -> None:
    model, images, others = uneven(Gated()), noise(64, 5, 64), noise(80, 5, 64)[64:]
    wanted, found = model(others).detach(), list[float]()
    for algorithm in (None, AWQ()):
        graph = prepared(model, images[:2], backend(3))
        for one in filter(None, (algorithm, then)):
            one(graph, images.split(16))
        simulated = quantized(graph, others)
        export_onnx(convert(graph).graph, images[:2], tmp_path / "model.onnx")
        torch.testing.assert_close(torch.from_numpy(run_ort(tmp_path / "model.onnx", others)), simulated)
        found.append(decibel(wanted, simulated))
    assert found[1] > found[0] + 2


def test_one_scale_for_all_stays() -> None:
    model, images = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), noise(8, 32)
    spec = replace(WEIGHT_ONLY.weight, granularity=PerTensor())
    graph = prepared(model, images, replace(WEIGHT_ONLY, weight=spec))
    result = AWQ()(graph, [images])
    assert result.changed == 0
    assert result.skipped == [
        ("0", "not scaled: its weight has one scale, and factors would widen its range")
    ]


def test_weights_that_gain_nothing_stay() -> None:
    model, images = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.ones(8, 32)
    graph = prepared(model, images, backend(8))
    with torch.no_grad():  # all inputs of the second operator are equally large
        graph.get_parameter("0.weight").zero_()
        graph.get_parameter("0.bias").fill_(1.0)
    assert AWQ()(graph, [images]).changed == 0
