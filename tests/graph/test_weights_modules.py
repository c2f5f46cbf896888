"""Tests of operators that replace functions such as F.linear: their paths, sharing and later passes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import calibrated, noise, prepared, run_ort, run_torch, settle, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.algorithms import BiasCorrection, Equalize, dead_channels
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import site
from qatkit.graph.phase import set_phase
from qatkit.graph.scales.align import align
from qatkit.graph.stub import stub
from qatkit.quant.computed_weights import Computed
from qatkit.verify.audit import audit


class OwnLinear(nn.Linear):
    """A Linear with its own forward, as in timm's classifiers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class StandardizedConv(nn.Conv2d):
    """A convolution whose weight is standardized in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        flat = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, flat.reshape_as(self.weight), self.bias, self.stride, self.padding)


class MaskedConv(nn.Module):
    """A convolution whose weight has a trained scale and a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.rand(8, 1, 1, 1))
        self.register_buffer("mask", (torch.rand(8, 3, 3, 3) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * cast(Tensor, self.mask) * self.scale, self.bias, padding=1)


class SplitBias(nn.Module):
    """The qkv of BEiT: a Linear that is not called, with a bias of three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24, bias=False), nn.Linear(24, 8)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("k_bias", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, cast(Tensor, self.k_bias), self.v_bias))
        return cast(Tensor, self.proj(F.relu(F.linear(x, self.qkv.weight, bias))))


class Mixed(nn.Module):
    """BatchNorms after computed weights and after a plain one, a split bias and an `OwnLinear`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn1 = MaskedConv(), nn.BatchNorm2d(8)
        self.conv, self.bn2 = StandardizedConv(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix, self.bn3 = nn.Parameter(torch.randn(8, 8, 1, 1)), nn.BatchNorm2d(8)
        self.attn, self.head = SplitBias(), OwnLinear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        x = F.relu(self.bn2(self.conv(x)))
        x = F.relu(self.bn3(F.conv2d(x, self.mix)))
        return cast(Tensor, self.head(self.attn(x.mean((2, 3)))))


OPERATORS = ["stem", "conv", "conv2d", "attn.qkv", "attn.proj", "head"]
IMAGES = noise(16, 3, 8, 8)


def mixed() -> nn.Module:
    return settle(Mixed(), 3, 8, 8)


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_operators_take_the_place_of_what_held_the_weight(batch_norm: str) -> None:
    model = mixed()
    result = fuse(model, IMAGES[:2], batch_norm)
    graph = result.graph.eval()
    called = [n for n in graph.graph.nodes if n.op == "call_module"]
    assert [n.target for n in called] == [site(n) for n in called] == OPERATORS
    assert not result.skipped
    torch.testing.assert_close(graph(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)
    kept = {"stem.weight", "stem.scale", "stem.mask", "conv.weight", "attn.qkv.weight", "head.weight"}
    assert kept <= set(graph.state_dict())


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_a_step_reaches_everything_and_a_checkpoint_holds_it(batch_norm: str) -> None:
    graph = prepared(mixed(), IMAGES[:2], batch_norm=batch_norm).train()
    set_phase(graph, observe=True, quantize=True)
    graph(IMAGES).square().mean().backward()
    assert all(p.grad is not None for p in graph.parameters())
    with torch.no_grad():
        for p in graph.parameters():
            p.sub_(0.01 * cast(Tensor, p.grad))
    graph(IMAGES)
    align(graph)
    other = prepared(mixed(), IMAGES[:2], batch_norm=batch_norm)
    other.load_state_dict(graph.state_dict())
    set_phase(other, observe=False, quantize=True)
    set_phase(graph, observe=False, quantize=True)
    assert torch.equal(other.eval()(IMAGES), graph.eval()(IMAGES))
    assert torch.equal(copy.deepcopy(graph)(IMAGES), graph(IMAGES))


@pytest.mark.parametrize("batch_norm", ["fold", pytest.param("train", marks=pytest.mark.slow)])
def test_the_file_computes_what_was_trained(batch_norm: str) -> None:
    done = ship(mixed(), IMAGES, f"mixed_{batch_norm}", batch_norm=batch_norm)
    plain = run_ort(done.path, IMAGES, optimize=False)
    np.testing.assert_allclose(plain, run_torch(done.converted, IMAGES), atol=1e-6)
    np.testing.assert_allclose(plain, run_ort(done.path, IMAGES), atol=1e-6)
    np.testing.assert_allclose(plain, run_torch(done.simulated, IMAGES), atol=1e-6)
    assert audit(done.path).int8_share == 1
    matrices = [i for i in onnx.load(done.path).graph.initializer if len(i.dims) > 1]
    assert {i.name for i in matrices} == {f"{name}.weight" for name in OPERATORS}
    assert {i.data_type for i in matrices} == {onnx.TensorProto.INT8}


def test_the_float_baseline_has_neither_programs_nor_batch_norms(tmp_path: Path) -> None:
    model = mixed()
    graph = float_baseline(model, IMAGES[:2])
    kinds = {type(graph.get_submodule(str(n.target))) for n in graph.graph.nodes if n.op == "call_module"}
    assert kinds <= {nn.Conv2d, nn.Linear, nn.AdaptiveAvgPool2d}
    export_onnx(graph, IMAGES[:2], tmp_path / "float.onnx")
    np.testing.assert_allclose(run_ort(tmp_path / "float.onnx", IMAGES), run_torch(model, IMAGES), atol=1e-5)


def test_algorithms_leave_computed_weights_alone_and_say_so() -> None:
    model = mixed()
    graph = stub(fuse(model, IMAGES[:2]).graph, IMAGES[:2]).graph
    equalized = Equalize()(graph, IMAGES[:2])
    torch.testing.assert_close(equalized.graph.eval()(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
    reasons = dict(equalized.skipped)
    assert "computed" in reasons["stem"] and "computed" in reasons["attn.qkv"]
    simulated = calibrated(model, IMAGES)
    assert dead_channels(simulated) == []
    corrected = dict(BiasCorrection()(simulated, [IMAGES]).skipped)
    assert "computed" in corrected["stem"] and "computed" in corrected["attn.qkv"]


def test_an_override_leaves_one_in_float() -> None:
    done = ship(mixed(), IMAGES, "mixed_float", overrides={"stem": OverrideConfig(float=True)})
    plain = done.converted.get_submodule("stem")
    assert type(plain) is nn.Conv2d
    np.testing.assert_allclose(
        run_ort(done.path, IMAGES, optimize=False), run_torch(done.converted, IMAGES), atol=1e-6
    )


class Tied(nn.Module):
    """A matrix that one function reads as it is, and another one transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Parameter(torch.randn(6, 12) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.codes)), self.codes.t())


class OnceAndAgain(Tied):
    """A weight that is computed twice, by the same arithmetic on the same parameter."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.codes.t() @ self.codes))
        return F.linear(x, self.codes.t() @ self.codes)


class SameTwice(Tied):
    """A weight that is computed once and applied twice."""

    def forward(self, x: Tensor) -> Tensor:
        square = self.codes.t() @ self.codes
        return F.linear(F.relu(F.linear(x, square)), square)


@pytest.mark.parametrize("kind", [Tied, OnceAndAgain, SameTwice])
def test_a_shared_weight_stays_one_parameter(kind: type[nn.Module]) -> None:
    model, x = kind(), noise(16, 12)
    graph = fuse(model, x[:2]).graph
    assert sum(p.numel() for p in graph.parameters()) == 72
    graph(x).square().sum().backward()
    model(x).square().sum().backward()
    found, wanted = next(graph.parameters()).grad, cast(Any, model).codes.grad
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [OnceAndAgain, pytest.param(SameTwice, marks=pytest.mark.slow)])
def test_the_file_holds_a_weight_that_is_computed_twice_once(kind: type[nn.Module]) -> None:
    done = ship(kind().eval(), noise(16, 12), kind.__name__)
    matrices = [i for i in onnx.load(done.path).graph.initializer if len(i.dims) > 1]
    assert [(tuple(i.dims), i.data_type) for i in matrices] == [((12, 12), onnx.TensorProto.INT8)]


def test_batch_norm_is_not_folded_into_a_shared_weight() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w, self.bn = nn.Parameter(torch.randn(6, 6)), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(self.bn(F.linear(x, self.w))), self.w)

    model, x = settle(Head(), 6), noise(8, 6)
    graph = fuse(model, x[:2]).graph.eval()
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)
    assert len({id(p) for p in graph.parameters() if p.ndim == 2}) == 1


def test_a_weight_that_depends_on_no_parameter_is_not_trained() -> None:
    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("taps", torch.tensor([1.0, 2.0, 1.0]) / 4)

        def forward(self, x: Tensor) -> Tensor:
            taps = cast(Tensor, self.taps)
            kernel = (taps[:, None] * taps)[None, None].repeat(3, 1, 1, 1)
            return F.conv2d(x, kernel, groups=3)

    model = Blur()
    graph = fuse(model, IMAGES[:2]).graph
    (conv,) = (m for m in graph.modules() if isinstance(m, nn.Conv2d))
    assert not isinstance(conv, Computed) and not conv.weight.requires_grad
    torch.testing.assert_close(graph(IMAGES), model(IMAGES))


def test_parameters_have_one_order_in_every_build() -> None:
    """A checkpoint stores the optimizer's state in the order of the parameters."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 3, 1), *[MaskedConv() for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.stack([part(x).mean() for part in self.body])
            return result

    built = [
        fuse(Masked(), noise(2, 3, 8, 8)).graph for _ in range(8)
    ]  # all alive at once, so at different addresses
    assert len({tuple(name for name, _ in one.named_parameters()) for one in built}) == 1


def test_a_frozen_base_stays_frozen() -> None:
    class Lora(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 8)
            torch.manual_seed(0)
            self.weight.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 12)), nn.Parameter(torch.randn(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight + self.b @ self.a, self.bias)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = Lora()

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(x))

    graph = prepared(Model(), noise(2, 12)).train()
    set_phase(graph, observe=True, quantize=True)
    graph(noise(4, 12)).square().sum().backward()
    grads = {name: p.grad is not None for name, p in graph.named_parameters()}
    assert grads == {"fc.bias": True, "fc.weight": False, "fc.a": True, "fc.b": True}


@pytest.mark.parametrize(
    ("function", "shape", "reason"),
    [
        (lambda w, x: F.conv2d(x, w.sum() * x[:3]), (3, 6, 6), "its weight depends on the input"),
        (lambda w, x: torch.einsum("...i,ij,jk", x, w, w), (3,), "multiplies more than two tensors"),
        (lambda w, x: torch.einsum("bi,jk->bj", x, w), (3,), ""),
    ],
)
def test_what_can_not_be_told_is_said(function: Any, shape: tuple[int, ...], reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, function(self.w, x))

    result = fuse(Model().eval(), noise(4, *shape))
    assert result.changed == 0
    assert [text for _, text in result.skipped if reason in text] or not reason
