"""Tests of transposed convolutions, which become convolutions, and of embeddings with an int8 table."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import noise, prepared, run_ort, run_torch, ship
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from qatkit.config.schema import OverrideConfig
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.graph.weights.transposed import by_phases
from qatkit.quant.backends import FBGEMM, TENSORRT
from qatkit.quant.pairs import least_scale
from qatkit.verify.audit import audit

INT8 = onnx.TensorProto.INT8
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "up": (2, {"kernel_size": 2, "stride": 2}),
    "overlapping": (2, {"kernel_size": 4, "stride": 2, "padding": 1}),
    "grouped": (2, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    "dense": (2, {"kernel_size": 3, "stride": 1, "padding": 1}),
    "gaps": (2, {"kernel_size": 2, "stride": 3, "output_padding": 1}),
    "uneven": (2, {"kernel_size": (3, 4), "stride": (1, 2), "bias": False}),
    "line": (1, {"kernel_size": 5, "stride": 2, "padding": 2}),
    "volume": (3, {"kernel_size": 2, "stride": 2}),
}


class Up(nn.Module):
    """A transposed convolution between two convolutions."""

    def __init__(self, rank: int, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = CONVS[rank - 1](3, 8, 3, padding=1), CONVS[rank - 1](6, 4, 1)
        self.up = TRANSPOSED[rank - 1](8, 6, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(F.relu(self.up(F.relu(self.first(x))))))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_transposed_convolution_is_one_of_phases(name: str) -> None:
    rank, settings = SETTINGS[name]
    model, x = Up(rank, **settings), noise(4, 3, *[6] * rank)
    result = fuse(model, x[:2])
    assert (result.changed, result.skipped) == (1, [])
    assert [n.target for n in result.graph.graph.nodes if n.op == "call_module"] == ["first", "up", "last"]
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    assert {n: p.shape for n, p in result.graph.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    result.graph(x).square().sum().backward()
    model(x).square().sum().backward()
    for parameter, wanted in model.named_parameters():
        found = dict(result.graph.named_parameters())[parameter].grad
        torch.testing.assert_close(found, wanted.grad, rtol=1e-3, atol=1e-3)


def test_a_functional_one_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(3, 4, 2, 2)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv_transpose2d(x, self.w, self.b, stride=2)

    model, x = Model(), noise(2, 3, 4, 4)
    result = fuse(model, x)
    assert result.changed == 1
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_phases_of_a_kernel_are_every_other_tap() -> None:
    weight = torch.arange(3.0).reshape(1, 1, 3)
    assert by_phases(weight, [2], [2], 1).tolist() == [[[2.0, 0.0]], [[0.0, 1.0]]]


def test_what_is_dilated_stays_float_and_is_said() -> None:
    result = fuse(Up(2, kernel_size=3, dilation=2), noise(2, 3, 6, 6))
    ((site, reason),) = result.skipped
    assert site == "up" and "dilation" in reason


@pytest.mark.parametrize("computed", [weight_norm, partial(weight_norm, dim=1), spectral_norm, orthogonal])
@pytest.mark.parametrize("name", ["overlapping", "grouped", "line", "volume"])
def test_a_parametrized_one_computes_and_trains_its_weight(name: str, computed: Any) -> None:
    rank, settings = SETTINGS[name]
    model, x = Up(rank, **settings).eval(), noise(4, 3, *[6] * rank)
    computed(model.up)
    result, model = fuse(model, x[:2]), copy.deepcopy(model)
    assert (result.changed, result.skipped) == (1, [])
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    result.graph(x).square().sum().backward()
    model(x).square().sum().backward()
    found = dict(result.graph.named_parameters())
    for parameter, wanted in model.named_parameters():
        torch.testing.assert_close(found[parameter].grad, wanted.grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for moved in found.values():
            moved.mul_(1.5).add_(0.01)
        for path, own in model.named_parameters():
            own.copy_(found[path])
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "grouped" else pytest.mark.slow) for n in SETTINGS]
)
def test_the_file_of_a_transposed_convolution_is_int8(name: str) -> None:
    rank, settings = SETTINGS[name]
    done = ship(Up(rank, **settings).eval(), noise(8, 3, *[6] * rank), f"up_{name}")
    plain = run_ort(done.path, done.images, optimize=False)
    np.testing.assert_allclose(plain, run_torch(done.converted, done.images), atol=1e-6)
    np.testing.assert_allclose(plain, run_ort(done.path, done.images), atol=1e-6)
    assert audit(done.path).int8_share == 1
    wanted = run_torch(done.model, done.images)
    assert np.square(plain - wanted).mean() < 1e-3 * np.square(wanted).mean()


class Words(nn.Module):
    """An embedding of 200 rows, indexed by the scaled and truncated input, and a tied head."""

    def __init__(self, *, functional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.functional = nn.Embedding(200, 16), nn.Linear(16, 16), functional

    def forward(self, x: Tensor) -> Tensor:
        rows = (x * 20 + 100).clamp(0, 199).long()
        found = F.embedding(rows, self.table.weight) if self.functional else self.table(rows)
        return F.linear(F.relu(self.fc(found)), self.table.weight)


@pytest.mark.parametrize("functional", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tied_table_is_in_the_file_once_in_int8(functional: bool) -> None:
    done = ship(Words(functional=functional).eval(), noise(16, 12), f"words_{functional}")
    plain = run_ort(done.path, done.images, optimize=False)
    np.testing.assert_allclose(plain, run_torch(done.converted, done.images), atol=3e-6)
    np.testing.assert_allclose(plain, run_ort(done.path, done.images), atol=3e-6)
    wanted = run_torch(done.model, done.images)
    assert np.square(plain - wanted).mean() < 1e-3 * np.square(wanted).mean()
    tables = [i for i in onnx.load(done.path).graph.initializer if list(i.dims) == [200, 16]]
    assert [i.data_type for i in tables] == [INT8] and audit(done.path).int8_share == 1


def test_a_tied_table_is_trained_as_one_with_its_int8_values() -> None:
    graph = prepared(Words(), noise(2, 12)).train()
    assert sum(p.numel() for p in graph.parameters()) == sum(p.numel() for p in Words().parameters())
    set_phase(graph, observe=True, quantize=True)
    looked_up = graph.get_submodule("table")(torch.arange(200))
    table = graph.get_submodule("table").get_parameter("weight").detach()
    scale = torch.maximum(table.abs().amax(1) / 127, least_scale(table, per_channel=True))
    steps = looked_up / scale[:, None]
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    graph(noise(4, 12)).square().sum().backward()
    assert all(p.grad is not None for p in graph.parameters())


@pytest.mark.parametrize(
    ("backend", "overrides", "said"),
    [
        (FBGEMM, {}, "weight-only int8"),
        (TENSORRT, {}, "stays float"),
        (FBGEMM, {"table": OverrideConfig(float=True)}, "float by override"),
    ],
)
def test_what_becomes_of_a_table_is_said(backend: Any, overrides: Any, said: str) -> None:
    x = noise(2, 12)
    graph = stub(fuse(Words(), x).graph, x).graph
    assert said in dict(prepare_qat(graph, backend, x, overrides).skipped)["table"]


def test_what_has_no_int8_form_stays_float_and_is_said() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.fc = nn.EmbeddingBag(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(self.bag((x > 0).long())))

    x = noise(2, 5)
    graph = stub(fuse(Bags(), x).graph, x).graph
    assert "EmbeddingBag stays float" in dict(prepare_qat(graph, FBGEMM, x).skipped)["bag"]
