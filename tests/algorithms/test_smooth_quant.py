"""Tests of SmoothQuant: the float function, the paper's factors, and the error from outlier channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torchvision
from chain import SMALL, noise, prepared, run_ort, settle, small_vit
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms import SmoothQuant
from qatkit.algorithms.scalable import sources
from qatkit.calibration import calibrate
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.nodes import site
from qatkit.graph.phase import inference, set_phase


def _float(graph: fx.GraphModule, images: Tensor) -> Tensor:
    with inference(graph):
        set_phase(graph, observe=False, quantize=False)
        return cast(Tensor, graph(images))


def _pairs(graph: fx.GraphModule) -> dict[str, list[str]]:
    """Returns, for each source with at least one channel that can be scaled, the operators that read it."""
    return {site(s.node): [site(r.node) for r in s.followed.readers] for s in sources(graph)[0]}


class Norm(nn.Module):
    """A LayerNorm read by two Linears, `wide` and `gate`; their product is linear only in `wide`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.gate, self.last = (
            nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return cast(Tensor, self.last(self.wide(y) * F.silu(self.gate(y))))


class Written(nn.Module):
    """A written-out RMSNorm with a bias, a view per head that is undone, a conv, ReLU, pool and flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.linspace(0.5, 2, 8)),
            nn.Parameter(torch.linspace(-1, 1, 8)),
        )
        self.fc, self.conv, self.end = nn.Linear(8, 16), nn.Conv1d(16, 6, 1), nn.Linear(6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 8]
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias
        heads = self.fc(y).view(-1, 2, 8).transpose(1, 2).reshape(-1, 16, 1).expand(-1, -1, 4)
        pooled = F.max_pool1d(F.relu(self.conv(heads)), 2)
        return cast(Tensor, self.end(pooled.repeat(1, 1, 3).flatten(1)))


class Norms(nn.Module):
    """A GroupNorm, a BatchNorm after an Add, and torch's RMSNorm, each read by one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.group = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8)
        self.conv, self.batch, self.last = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        )
        self.rms, self.fc = nn.RMSNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(F.leaky_relu(self.group(x), 0.1))
        x = self.last(F.relu(self.batch(x))).mean((2, 3))
        return cast(Tensor, self.fc(self.rms(x)))


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (Norm, (5, 6)),
    "written": (Written, (8,)),
    "norms": (Norms, (3, 6, 6)),
    "vit": (small_vit, (3, 32, 32)),
}


@pytest.mark.parametrize("name", [*SMALL, *OWN])
def test_the_float_function_stays_at_full_strength(name: str) -> None:
    kind, shape = (SMALL | OWN)[name]
    torch.manual_seed(0)
    model = settle(kind(), *shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = noise(6, *shape)
    graph = prepared(model, images[:2]).eval()
    result = SmoothQuant(strength=1.0)(graph, [images])
    assert result.changed == len(_pairs(graph)) and result.skipped == SmoothQuant().notes(graph)
    assert any((graph.state_dict()[key] != value).any() for key, value in before.items()
               if key in graph.state_dict()) == bool(result.changed)  # fmt: skip
    torch.testing.assert_close(_float(graph, images), model(images), rtol=1e-4, atol=1e-5)
    for key, value in model.state_dict().items():  # the float model itself doesn't change
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("norm", {"norm": ["wide", "gate"], "wide": ["last"]}),
        ("written", {"mul_1": ["fc"], "fc": ["conv"], "conv": ["end"]}),
        ("norms", {"group": ["conv"], "batch": ["last"], "rms": ["fc"]}),
        ("residual", {"conv1": ["conv2"]}),
        ("conv_flatten_linear", {"conv": ["fc"]}),
        ("gate", {"conv": ["fc1", "last"], "fc1": ["fc2"]}),
        ("concat", {"left": ["last"], "right": ["last"]}),
        ("block", {"norm1": ["attn.qkv"], "attn.qkv": ["attn.out_proj"], "norm2": ["fc1"]}),
    ],
)
def test_pairs_come_from_the_graph(name: str, found: dict[str, list[str]]) -> None:
    kind, shape = (SMALL | OWN)[name]
    assert _pairs(prepared(settle(kind(), *shape), noise(2, *shape))) == found


def test_factors_are_the_papers() -> None:
    """γ is divided by s_j = max|X_j|^α / max|W_j|^(1-α), and both readers' weights are multiplied by it.

    W_j are the weights of both readers for channel j.
    """
    model, images = Norm(), 3 * noise(40, 5, 6)
    x = F.layer_norm(images, (6,)).flatten(0, 1).numpy()
    w = np.concatenate([model.wide.weight.detach().numpy(), model.gate.weight.detach().numpy()])
    s = np.abs(x).max(0) ** 0.7 / np.abs(w).max(0) ** 0.3
    graph = prepared(model, images[:2]).eval()
    SmoothQuant(strength=0.7)(graph, images.split(16))
    get = dict(graph.named_parameters())
    np.testing.assert_allclose(get["norm.weight"].detach(), 1 / s, rtol=1e-5)
    np.testing.assert_allclose(
        get["gate.weight"].detach().numpy(), model.gate.weight.detach().numpy() * s, rtol=1e-5
    )
    # `wide` is also divided, per channel, by the factors of the pair that starts with it.
    ratio = get["wide.weight"].detach().numpy() / (model.wide.weight.detach().numpy() * s)
    np.testing.assert_allclose(ratio, np.repeat(ratio[:, :1], 6, 1), rtol=1e-4)


def test_only_the_values_of_an_attention_are_scaled() -> None:
    """Queries and keys meet in a product; only channels of v (the last third of in_proj) reach out_proj."""
    kind, shape = SMALL["block"]
    graph = prepared(settle(kind(), *shape), noise(2, *shape))
    source = next(s for s in sources(graph)[0] if site(s.node) == "attn.qkv")
    assert source.followed.free.tolist() == [False] * 32 + [True] * 16
    (reader,) = source.followed.readers
    assert reader.channels.tolist() == list(range(32, 48))


def _planted() -> nn.Module:
    """Returns a block whose LayerNorms have three outlier channels that the next weight undoes."""
    torch.manual_seed(0)
    model = SMALL["block"][0]().eval()
    scale = torch.ones(16)
    scale[[3, 11, 14]] = torch.tensor([60.0, -80.0, 100.0])
    with torch.no_grad():
        for norm, weight in (("norm1", "attn.in_proj_weight"), ("norm2", "fc1.weight")):
            model.get_parameter(f"{norm}.weight").mul_(scale)
            model.get_parameter(f"{norm}.bias").add_(0.1).mul_(scale)
            model.get_parameter(weight).div_(scale)
    return model


def test_outlier_channels_cost_nothing_in_onnx_runtime(tmp_path: Path) -> None:
    model, images = _planted(), noise(64, 6, 16)
    wanted = model(images).detach()

    def sqnr(found: Tensor) -> float:
        return float(10 * torch.log10(wanted.square().mean() / (found - wanted).square().mean()))

    plain = prepared(model, images[:2]).eval()
    calibrate(plain, [images])
    smooth = prepared(model, images[:2]).eval()
    SmoothQuant()(smooth, images.split(20))
    calibrate(smooth, [images])
    export_onnx(convert(smooth).graph, images[:2], tmp_path / "model.onnx")
    assert sqnr(plain(images).detach()) < 25
    assert sqnr(torch.from_numpy(run_ort(tmp_path / "model.onnx", images))) > 35


def _error(model: nn.Module, images: Tensor, algorithm: SmoothQuant | None) -> float:
    graph = prepared(model, images[:2]).eval()
    if algorithm is not None:
        algorithm(graph, [images])
    calibrate(graph, [images])
    return float((graph(images) - model(images)).detach().square().sum())


@pytest.mark.parametrize("outlier", [1.0, 5.0, 200.0])
def test_the_search_finds_the_strength_of_least_error(outlier: float) -> None:
    """Compares with one calibrated model per strength; with a single batch, ranges are minima and maxima."""
    torch.manual_seed(0)
    norm, linear, images = nn.LayerNorm(12), nn.Linear(12, 7), noise(16, 12)
    model = nn.Sequential(norm, linear).eval()
    with torch.no_grad():
        norm.weight[4] *= outlier
        linear.weight[:, 4] /= outlier
    tried = [_error(model, images, SmoothQuant(strength=i / 10)) for i in range(11)]
    none = _error(model, images, None)
    best = min(tried) if min(tried) < 0.98 * none else none
    assert _error(model, images, SmoothQuant()) == pytest.approx(best, rel=1e-3)


class Tied(nn.Module):
    """A LayerNorm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.b(self.norm(self.a(self.norm(x)))))


class Shared(nn.Module):
    """A LayerNorm whose output is read by a Linear and by the sum after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return cast(Tensor, self.b(torch.tanh(y + self.a(y))))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Tied, "norm is called more than once, or something else reads its weight or bias"),
        (Shared, "add (add) does not scale channel by channel"),
        (lambda: nn.Sequential(nn.LayerNorm((3, 6)), nn.Linear(6, 2)), "0 has a separate weight for every position"),
        (lambda: nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2)), "0 has no weight"),
        (
            lambda: nn.Sequential(nn.LayerNorm(6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))),
            "the weight or bias of 1 is computed from other parameters",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_scaled_says_why(kind: Callable[[], nn.Module], reason: str) -> None:
    model = kind().eval()
    graph = prepared(model, noise(2, 3, 6)).eval()
    result = SmoothQuant(strength=1.0)(graph, [noise(8, 3, 6)])
    first = "norm" if hasattr(model, "norm") else "0"
    assert (first, f"not smoothed: {reason}") in result.skipped
    torch.testing.assert_close(_float(graph, noise(8, 3, 6)), model(noise(8, 3, 6)), rtol=1e-4, atol=1e-5)


def test_operators_that_stay_float_take_their_factors_too() -> None:
    """One of the two readers stays float; its weight must be scaled too, or the function changes."""
    torch.manual_seed(0)
    model, images = Norm(), noise(32, 5, 6)
    graph = prepared(model, images[:2], overrides={"gate": OverrideConfig(float=True)}).eval()
    assert SmoothQuant(strength=1.0)(graph, [images]).changed == 2
    torch.testing.assert_close(_float(graph, images), model(images), rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """A Linear whose output is multiplied by a parameter, then another Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(6, 8), nn.Parameter(torch.linspace(1, 9, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.b(self.a(x) * self.scale))


def test_the_nearer_of_two_sources_of_the_channels_is_scaled() -> None:
    torch.manual_seed(0)
    model, images = Scaled(), noise(32, 6)
    graph = prepared(model, images[:2]).eval()
    assert SmoothQuant(strength=1.0)(graph, [images]).changed == 1
    assert torch.equal(graph.get_parameter("a.weight"), model.a.weight)
    x = (model.a(images) * model.scale).detach().abs().amax(0)
    torch.testing.assert_close(graph.get_parameter("scale"), model.scale / x, rtol=1e-5, atol=0)
    torch.testing.assert_close(_float(graph, images), model(images), rtol=1e-4, atol=1e-5)


def test_a_weight_with_one_scale_is_not_spread() -> None:
    torch.manual_seed(0)
    model, images = Norm(), noise(8, 5, 6)
    overrides = {"wide": OverrideConfig(weight_granularity="per_tensor")}
    graph = prepared(model, images[:2], overrides=overrides).eval()
    result = SmoothQuant(strength=1.0)(graph, [images])
    assert (
        "wide",
        "not smoothed: its weight has one scale, and factors would widen its range",
    ) in result.skipped
    assert result.changed == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["swin_t", "convnext_tiny", "densenet121", "mobilenet_v3_large", "swin_v2_t"]
)
def test_real_families_keep_their_function(name: str) -> None:
    torch.manual_seed(0)
    model = settle(cast(nn.Module, torchvision.models.get_model(name, num_classes=10)), 3, 64, 64)
    images = noise(4, 3, 64, 64)
    graph = prepared(model, images[:2]).eval()
    assert SmoothQuant(strength=0.8)(graph, [images]).changed > 10
    torch.testing.assert_close(_float(graph, images), model(images), rtol=1e-3, atol=1e-4)
