"""Tests of sequential MSE against a grid search in NumPy, and on weights with outliers."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from chain import calibrated, noise
from torch import Tensor, nn

from qatkit.algorithms import SequentialMSE
from qatkit.config.schema import OverrideConfig
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.quant.qat_layers import QATOperator


class _Pair(nn.Module):
    """Two Linears on tokens [N, 4, 12]; a few weights are far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, 6)
        with torch.no_grad():
            for layer in (self.fc1, self.fc2):
                layer.weight[::2, 0] *= 4

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(torch.relu(self.fc1(x))))


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_the_ranges_are_those_of_a_grid_search(granularity: str) -> None:
    """Searches layer by layer: the second search reads what the first layer outputs with its chosen ranges."""
    model, images = _Pair().eval(), noise(40, 4, 12)
    override = OverrideConfig(weight_dtype="int4", weight_granularity=granularity)
    graph = calibrated(model, images, overrides={"fc*": override})
    found = SequentialMSE(images=40, candidates=7, least=0.4, batch_size=16)(graph, [images])
    hidden = torch.relu(model.fc1(images))
    inputs = {"fc1": "input_quant", "fc2": "fc1_quant"}
    values: dict[str, Tensor] = {}
    for name in inputs.values():
        graph.get_submodule(name).register_forward_hook(lambda m, _, y, name=name: values.update({name: y}))
    set_phase(graph, observe=False, quantize=True)
    graph(images)
    for path, x in (("fc1", images), ("fc2", hidden)):
        operator = cast(QATOperator, graph.get_submodule(path))
        fake = operator.weight_fake_quant
        assert fake is not None and operator.bias is not None
        weight, wanted = operator.weight.detach(), model.get_submodule(path)(x).detach().double().numpy()
        quantized, chosen, errors = values[inputs[path]].detach().double().numpy(), fake.clip.clone(), []
        source = cast(Tensor, graph.get_submodule(inputs[path]).scale).double().numpy()
        for share in np.linspace(1, 0.4, 7):
            fake.clip_to(torch.full_like(chosen, float(share)))
            scale = fake.scale(weight).double().numpy().reshape(-1, 1)
            steps = np.clip(np.round(weight.numpy() / scale.astype(np.float32)), -7, 7)
            step = scale[:, 0] * source
            bias = np.round(operator.bias.detach().double().numpy() / step) * step
            errors.append(((quantized @ (steps * scale).T + bias - wanted) ** 2).sum((0, 1)))
        table = np.array(errors) if granularity == "per_channel" else np.array(errors).sum(1)
        np.testing.assert_allclose(chosen.numpy(), np.linspace(1, 0.4, 7)[table.argmin(0)], atol=1e-6)
        assert bool((chosen < 1).any())
        fake.clip_to(chosen)
    assert found.changed == 2
    integers = convert(graph).graph.get_buffer("fc1.weight")
    assert int(integers.abs().max()) == 7  # clipped to the type's range


def test_grouped_convolutions_get_less_error_at_their_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8)).eval()
    images = noise(16, 4, 9, 9)
    with torch.no_grad():
        cast(Tensor, model[0].weight)[:, 0, 0, 0] *= 5
    graph = calibrated(model, images, overrides={"*": OverrideConfig(weight_dtype="int4")})

    def error() -> float:
        with torch.no_grad():
            return float((graph(images) - model(images)).square().mean())

    before = error()
    assert SequentialMSE(images=16, batch_size=4)(graph, images.split(5)).changed == 2
    assert error() < 0.9 * before
