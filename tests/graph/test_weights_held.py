"""Tests of weights from parametrizations, hooks or pruning: same function, training and parameter names."""

from __future__ import annotations

import copy
import warnings
from typing import cast

import numpy as np
import pytest
import torch
from chain import noise, prepared, run_ort, run_torch, settle, ship
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from qatkit import QATModule
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.verify.audit import audit

IMAGES = noise(16, 3, 8, 8)


class Plain(nn.Module):
    """Two convolutions and a Linear, to be parametrized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.fc = nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.bn(self.first(x))))
        return cast(Tensor, self.fc(F.relu(x).mean((2, 3))))


class Doubled(nn.Module):
    """A user's parametrization, which doubles the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(kind: str) -> nn.Module:
    model = Plain()
    if kind == "parametrizations":
        parametrizations.weight_norm(model.first)
        parametrizations.spectral_norm(model.second)
        parametrize.register_parametrization(model.fc, "weight", Doubled())
    elif kind == "hooks":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(model.first)
        nn.utils.spectral_norm(model.second)
    else:
        prune.l1_unstructured(model.first, "weight", amount=0.3)
        prune.random_unstructured(model.second, "bias", amount=0.3)
        prune.ln_structured(model.fc, "weight", amount=0.5, n=2, dim=1)
        prune.l1_unstructured(model.fc, "weight", amount=0.2)
    return settle(model, 3, 8, 8)


@pytest.mark.parametrize("kind", ["parametrizations", "hooks", "pruning"])
def test_parametrizations_hooks_and_pruning(kind: str) -> None:
    model = parametrized(kind)
    fused = fuse(model, IMAGES[:2]).graph.eval()
    torch.testing.assert_close(fused(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-6)
    assert {n for n in fused.state_dict() if "bn." not in n} == {
        n for n in model.state_dict() if "bn." not in n
    }
    graph = prepared(model, IMAGES[:2]).train()
    set_phase(graph, observe=True, quantize=True)
    graph(IMAGES).square().sum().backward()
    assert all(p.grad is not None for p in graph.parameters())
    other = copy.deepcopy(graph)
    other.load_state_dict(graph.state_dict())
    set_phase(graph, observe=False, quantize=True)
    set_phase(other, observe=False, quantize=True)
    assert torch.equal(other.eval()(IMAGES), graph.eval()(IMAGES))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parametrizations", "hooks", "pruning"])
def test_their_files_compute_what_was_trained(kind: str) -> None:
    done = ship(parametrized(kind), IMAGES, kind)
    plain = run_ort(done.path, IMAGES, optimize=False)
    np.testing.assert_allclose(plain, run_torch(done.converted, IMAGES), atol=1e-6)
    np.testing.assert_allclose(plain, run_ort(done.path, IMAGES), atol=1e-6)
    assert audit(done.path).int8_share == 1


def test_another_hook_of_a_parametrized_module_is_kept() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU()).eval()
    model[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
    images = noise(8, 3, 8, 8)
    module = QATModule(model, images[:2])
    module.calibrate([images])
    with torch.no_grad():
        expected = model(images)
        found = module.convert().graph(images)
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()
