"""Tests of moment rounding: moments against NumPy, choices against all roundings, and the exported file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from chain import SMALL, Mlp, calibrated, noise, run_ort, settle
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.algorithms import BiasCorrection, MomentRounding
from qatkit.algorithms.input_moments import PLACES, input_moments, patches
from qatkit.algorithms.rounding_by_moments import best_rounding
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator
from qatkit.train.module import QATModule


def _form(inputs: int, seed: int = 0) -> Tensor:
    x = noise(40, inputs, seed=seed) + 2
    return x.T @ x / 40


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=(0, 1), groups=4),
        nn.Conv2d(4, 6, 3, dilation=2, groups=2, padding="same"),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv1d(4, 2, 5, padding=2),
        nn.Conv3d(4, 2, 2),
        nn.Linear(4, 3),
    ],
)
def test_a_weight_times_the_patches_is_the_operators_output(conv: nn.Module) -> None:
    rank = cast(Tensor, conv.weight).ndim - 2
    x = noise(3, *([4] + [6 - rank] * rank if rank else [5, 4]))
    found = patches(conv, x)
    weight = cast(Tensor, conv.weight).detach().flatten(1).unflatten(0, (len(found), -1))
    y = (weight @ found).flatten(0, 1) + cast(Tensor, conv.bias).detach()[:, None]
    wanted = conv(x).detach().movedim(1 if rank else -1, 0).flatten(1)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_of_a_large_image_a_grid_of_places_is_taken() -> None:
    x = torch.arange(40 * 50.0).view(1, 1, 40, 50)
    found = patches(nn.Conv2d(1, 1, 1), x)[0, 0]
    assert PLACES / 3 < len(found) <= PLACES
    assert set(found.tolist()) <= set(range(2000)) and found.unique().numel() == len(found)


def test_moments_are_numpys() -> None:
    torch.manual_seed(0)
    model, images = Mlp().eval(), noise(60, 12) + 1
    graph = calibrated(model, images)
    operators = [m for m in graph.modules() if isinstance(m, QATOperator)]
    with torch.no_grad():
        set_phase(graph, observe=False, quantize=False)
        found = dict(input_moments(graph, operators, [(part,) for part in images.split(25)]))
    hidden = F.relu(model.fc1(images)).detach().numpy()
    for operator, x in zip(operators, (images.numpy(), hidden), strict=True):
        (block,) = found[operator]
        np.testing.assert_allclose(block.mean[0], x.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(block.covariance[0], np.cov(x.T, bias=True), rtol=1e-3, atol=1e-4)


def test_no_single_other_choice_is_better_and_few_of_all_are() -> None:
    """Compares with all 2^8 roundings of each of 20 rows."""
    form, steps = _form(8), 30 * noise(1, 20, 8)
    up = best_rounding(steps, form[None], (-127, 127), 50)
    down = steps[0].floor().numpy()
    error = down + up[0].numpy() - steps[0].numpy()
    h = form.numpy()

    def cost(e: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(np.einsum("ri,ij,rj->r", e, h, e))

    found, nearest = cost(error), cost(np.round(steps[0].numpy()) - steps[0].numpy())
    for i in range(8):
        other = error.copy()
        other[:, i] += 1 - 2 * up[0, :, i].numpy()
        assert (cost(other) >= found * (1 - 1e-5)).all()
    every = [
        cost(down + np.array(bits, np.float32) - steps[0].numpy())
        for bits in itertools.product((0, 1), repeat=8)
    ]
    assert (found >= np.min(every, 0) * (1 - 1e-5)).all()
    assert found.sum() < 0.5 * nearest.sum()
    assert found.sum() < 2 * np.min(every, 0).sum()


def test_a_row_longer_than_a_block_is_solved_as_a_whole() -> None:
    """No single flip may lower the error, so the gradient must be updated correctly from block to block."""
    form, steps = _form(150, seed=3) + torch.eye(150), 30 * noise(1, 4, 150)
    up = best_rounding(steps, form[None], (-127, 127), 60)
    e = (steps.floor() + up - steps)[0].double()
    step = 1 - 2 * up[0].double()
    gain = 2 * step * (e @ form.double()) + form.diagonal().double()
    assert (gain > -1e-2).all()


def test_the_ends_of_the_type_hold() -> None:
    up = best_rounding(
        torch.tensor([[[127.0, 126.6, -127.0, -130.0]]]), torch.eye(4)[None] + 0.5, (-127, 127), 9
    )
    found = (torch.tensor([127.0, 126.6, -127.0, -130.0]).floor() + up[0, 0]).clamp(-127, 127)
    assert found[0] == 127 and found[2] == -127 and found[3] == -127


@pytest.mark.parametrize(
    "name", ["chain", "mlp", "residual", "block", "gate", "concat", "conv_flatten_linear"]
)
def test_outputs_are_nearer_to_float(name: str) -> None:
    """Compares on images that MomentRounding has not seen, with only the weights quantized."""
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    model = settle(kind(), *shape)
    images, others = noise(64, *shape) + 1, noise(64, *shape, seed=5) + 1
    wanted = model(others).detach()

    def error(algorithm: MomentRounding | None) -> float:
        graph = calibrated(model, images)
        if algorithm is not None:
            assert algorithm(graph, images.split(30)).skipped == []
        for module in graph.modules():
            if isinstance(module, FakeQuantize):
                module.enabled = False
        return float((graph(others).detach() - wanted).square().mean())

    assert error(MomentRounding()) < 0.95 * error(None)


def test_what_was_chosen_ships(tmp_path: Path) -> None:
    """ONNX Runtime agrees with the simulation, and the integers are not all the nearest ones."""
    kind, shape = SMALL["residual"]
    torch.manual_seed(0)
    model, images = settle(kind(), *shape), noise(32, *shape)
    graph = calibrated(model, images)
    MomentRounding()(graph, [images])
    converted = convert(graph).graph
    path = tmp_path / "model.onnx"
    export_onnx(converted, images[:2], path)
    found = run_ort(path, images)
    np.testing.assert_allclose(found, graph(images).detach(), rtol=1e-4, atol=1e-5)
    operator = cast(QATOperator, graph.get_submodule("conv1"))
    assert operator.weight_fake_quant is not None and operator.weight_fake_quant.rounding is not None
    nearest = torch.round(
        operator.weight / operator.weight_fake_quant.scale(operator.weight).view(-1, 1, 1, 1)
    )
    whole = next(b for n, b in converted.named_buffers() if n.startswith("conv1") and b.dtype == torch.int8)
    assert 0 < (whole != nearest).float().mean() < 0.6


def test_the_bias_takes_the_mean_error_of_the_integers_that_ship() -> None:
    """If two neighbours could saturate since both are rounded up, one is lowered, for which the bias compensates."""
    torch.manual_seed(0)
    model = Mlp().eval()
    images = noise(60, 1, seed=1) + 0.3 * noise(60, 12) + 1  # correlated, so that errors can cancel
    with torch.no_grad():
        model.fc1.weight.abs_()  # so that pairs determine the scale and reach its limit
    graph = calibrated(model, images)
    operator = cast(QATOperator, graph.get_submodule("fc1"))
    fake = operator.weight_fake_quant
    assert fake is not None
    MomentRounding(images=60)(graph, [images])
    assert fake.rounding is not None and fake.bias_shift is not None
    weight, scale = operator.weight.detach(), fake.scale(operator.weight)[:, None].detach()
    integers = fake.integers(weight, None, torch.ones(())).weight.float()
    assert (integers != (weight / scale).floor() + fake.rounding).any()
    error = (integers * scale - weight) @ images.mean(0)
    torch.testing.assert_close(fake.bias_shift, -error, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_holds_it_all() -> None:
    torch.manual_seed(0)
    model, images = Mlp().eval(), noise(40, 12)
    made = QATModule(model, images[:2], algorithms=[MomentRounding()])
    made.calibrate([images])
    made.correct([images])
    other = QATModule(Mlp(), images[:2], algorithms=[MomentRounding()])
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.convert().graph(images), made.convert().graph(images))


def test_a_later_bias_correction_takes_the_place_of_the_shift() -> None:
    """Correcting twice equals correcting once, because each correction starts from the float biases."""
    torch.manual_seed(0)
    model, images = Mlp().eval(), noise(60, 12) + 1
    graph = calibrated(model, images)
    MomentRounding(images=60)(graph, [images])
    shifted = graph.get_parameter("fc1.bias").clone()
    assert not torch.equal(shifted, model.fc1.bias)
    found = []
    for _ in range(2):
        BiasCorrection("analytic", images=60)(graph, [images])
        found.append(graph.get_parameter("fc1.bias").clone())
    assert torch.equal(found[0], found[1])
    # Both methods shift the bias of fc1 by -e·μ.
    torch.testing.assert_close(found[0], shifted, rtol=1e-4, atol=1e-6)


def test_a_weight_of_several_calls_stays() -> None:
    kind, shape = SMALL["twice"]
    model, images = settle(kind(), *shape), noise(16, *shape)
    graph = calibrated(model, images)
    result = MomentRounding()(graph, [images])
    assert result.changed == 1
    assert [reason for _, reason in result.skipped] == [
        "rounded to nearest: several calls share its weight"
    ] * 2
