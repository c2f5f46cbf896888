"""Tests of the exponential moving average of the weights, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from qatkit.train.weight_average import WeightAverage


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


def _arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Returns what is averaged, as arrays: trained parameters and BatchNorm statistics."""
    return {
        name: value.double().numpy()
        for name, value in model.state_dict().items()
        if "num_batches" not in name
    }


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_it_is_the_formula_over_the_steps_of_a_training(decay: float) -> None:
    model = _model()
    model.get_parameter("2.bias").requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    average, wanted = WeightAverage(model, decay), _arrays(model)
    for step in range(1, 31):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(step)
        d = min(decay, (1 + step) / (10 + step))
        wanted = {name: d * wanted[name] + (1 - d) * value for name, value in _arrays(model).items()}
    assert average.state.keys() == wanted.keys() - {"2.bias"}
    for name, found in average.state.items():
        np.testing.assert_allclose(found.numpy(), wanted[name], rtol=1e-5, atol=1e-6)
    assert decay == 0 or not np.allclose(average.state["0.weight"], _arrays(model)["0.weight"], atol=1e-3)


def test_a_swap_computes_with_the_average_and_a_second_undoes_it() -> None:
    model = _model().eval()
    average = WeightAverage(model, 0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 3, 6, 6)
    first = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    trained = model(x)
    average.swap()
    torch.testing.assert_close(model(x), first, rtol=0, atol=0)
    average.swap()
    torch.testing.assert_close(model(x), trained, rtol=0, atol=0)
    assert all(torch.equal(value, before[name]) for name, value in average.state.items())


def test_a_stored_average_goes_on_to_the_last_bit() -> None:
    whole, resumed = _model(), _model()
    one = WeightAverage(whole, 0.9)
    stored = WeightAverage(resumed, 0.9).state
    for step in range(1, 9):
        with torch.no_grad():
            for parameter in (*whole.parameters(), *resumed.parameters()):
                parameter.mul_(1.1).add_(0.01)
        one.update(step)
        again = WeightAverage(resumed, 0.9, stored)  # as in a run that is stopped after every step
        again.update(step)
        stored = again.state
    assert all(torch.equal(value, stored[name]) for name, value in one.state.items())
