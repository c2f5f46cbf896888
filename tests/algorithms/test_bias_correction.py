"""Tests of bias correction against means that NumPy computes from the operators' inputs and outputs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from chain import SMALL, Mlp, calibrated, noise, settle
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from qatkit.algorithms import Algorithm, BiasCorrection, MomentRounding
from qatkit.algorithms.bias_errors import targets
from qatkit.config.schema import OverrideConfig
from qatkit.graph.phase import set_phase
from qatkit.quant.backends import FBGEMM
from qatkit.quant.qat_layers import QATOperator
from qatkit.train.module import QATModule

Arrays = dict[str, NDArray[np.float64]]


def _skewed(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a small model, and images with means far from zero, for which weight rounding errors add up."""
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    model = settle(kind(), *shape)
    return model, noise(48, *shape).abs() + 1


def _operator(graph: nn.Module, path: str) -> QATOperator:
    found = graph.get_submodule(path)
    assert isinstance(found, QATOperator)
    return found


def _step(operator: QATOperator) -> float:
    """Returns the largest scale of an operator's int32 bias."""
    fake = operator.weight_fake_quant
    assert fake is not None and fake._edges[0] is not None
    return float(fake.scale(operator.weight).max() * fake._edges[0].scale)


def _means(graph: fx.GraphModule, images: Tensor, *, quantize: bool) -> Arrays:
    """Returns each operator's mean output per image and channel; leaves the graph quantizing."""
    found: Arrays = {}

    def keep(name: str, linear: bool) -> Any:
        def hook(_: nn.Module, __: object, y: Tensor) -> None:
            values = np.moveaxis(y.detach().double().numpy(), -1 if linear else 1, 1)
            found[name] = values.reshape(*values.shape[:2], -1).mean(2)

        return hook

    handles = [
        m.register_forward_hook(keep(name, isinstance(m, nn.Linear)))
        for name, m in graph.named_modules()
        if isinstance(m, QATOperator)
    ]
    set_phase(graph, observe=False, quantize=quantize)
    with torch.no_grad():
        graph(images)
    for handle in handles:
        handle.remove()
    set_phase(graph, observe=False, quantize=True)
    return found


@pytest.mark.parametrize("name", ["chain", "mlp", "residual", "block", "gate", "conv_flatten_linear"])
def test_empirical_correction_leaves_no_mean_error_anywhere(name: str) -> None:
    model, images = _skewed(name)
    graph = calibrated(model, images)
    wanted, before = _means(graph, images, quantize=False), _means(graph, images, quantize=True)
    steps = {path: _step(_operator(graph, path)) for path in wanted}
    result = BiasCorrection("empirical", 48)(graph, images.split(20))
    after = _means(graph, images, quantize=True)
    assert result.changed == len(wanted)
    left = total = 0.0
    for path, means in wanted.items():
        # In each channel, the correction ignores the 2 lowest and 2 highest of the 48 image means; an error
        # of up to half a step of the int32 bias remains.
        error, was = (np.sort(found[path] - means, axis=0)[2:-2].mean(0) for found in (after, before))
        assert np.abs(error).max() <= 0.51 * steps[path] + 1e-5, path
        left, total = left + np.abs(error).sum(), total + np.abs(was).sum()
    assert left < 0.1 * total


def test_analytic_shift_is_the_expected_weight_rounding_error() -> None:
    """For a Linear with rounded weights W', the shift is Σ_c (W'_oc - W_oc)·E[x_c] over float inputs."""
    torch.manual_seed(0)
    model, images = Mlp().eval(), noise(60, 12).abs() + 1
    graph = calibrated(model, images)
    hidden = torch.relu(model.fc1(images)).detach()
    expected = {}
    for path, x in (("fc1", images), ("fc2", hidden)):
        operator = _operator(graph, path)
        assert operator.weight_fake_quant is not None and operator.bias is not None
        scale = operator.weight_fake_quant.scale(operator.weight).double().numpy()[:, None]
        weight = operator.weight.detach().double().numpy()
        shift = (np.round(weight / scale) * scale - weight) @ x.double().numpy().mean(0)
        expected[path] = operator.bias.detach().double().numpy() - shift
    BiasCorrection("analytic", 60)(graph, images.split(25))
    for path, bias in expected.items():
        operator = _operator(graph, path)
        found = graph.get_parameter(f"{path}.bias").detach().numpy()
        np.testing.assert_allclose(found, bias, atol=0.51 * _step(operator), rtol=1e-5)


@pytest.mark.parametrize("name", ["chain", "residual", "gate"])
def test_the_analytic_shift_is_that_of_a_run_over_all_images(name: str) -> None:
    """With strides, padding and groups, the shift is the mean of op(x, W') - op(x, W) over float inputs x.

    W' are the rounded weights.
    """
    model, images = _skewed(name)
    graph = calibrated(model, images)
    float_means = _means(graph, images, quantize=False)
    operators = {p: _operator(graph, p) for p in float_means}
    rounded = {p: m.quantized(m.weight, m.bias)[0].detach() for p, m in operators.items()}
    float_graph = calibrated(model, images)
    BiasCorrection("analytic", 48)(graph, images.split(20))
    for path, values in rounded.items():
        weight, bias = (float_graph.get_parameter(f"{path}.{kind}") for kind in ("weight", "bias"))
        original, weight.data = weight.data, values
        shifted = _means(float_graph, images, quantize=False)[path]
        weight.data = original
        change = (bias - graph.get_parameter(f"{path}.bias")).detach().numpy()
        np.testing.assert_allclose(change, (shifted - float_means[path]).mean(0), atol=2e-5)


class Tokens(nn.Module):
    """Two Linears on 4 tokens per image; the order is tokens first, images first or both in one axis."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.fc1, self.fc2 = order, nn.Linear(48, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 4, 48)
        if self.order == "tokens first":
            x = x.transpose(0, 1)
        elif self.order == "windows":
            x = x.reshape(-1, 48)
        return cast(Tensor, self.fc2(torch.relu(self.fc1(x))))


@pytest.mark.parametrize("order", ["images first", "tokens first", "windows"])
def test_the_mean_is_that_of_all_places_whatever_comes_first(order: str) -> None:
    torch.manual_seed(0)
    model, images = Tokens(order).eval(), noise(48, 3, 8, 8).abs() + 1
    graph = calibrated(model, images)
    expected = {}
    tokens = images.reshape(-1, 48)
    for path, x in (("fc1", tokens), ("fc2", torch.relu(model.get_submodule("fc1")(tokens)).detach())):
        operator = _operator(graph, path)
        rounded = operator.quantized(operator.weight, operator.bias)[0].detach().double().numpy()
        weight, bias = (p.detach().double().numpy() for p in (operator.weight, cast(Tensor, operator.bias)))
        expected[path] = bias - (rounded - weight) @ x.double().numpy().mean(0)
    BiasCorrection("analytic", 48)(graph, images.split(20))  # the last batch is smaller
    for path, wanted in expected.items():
        found = graph.get_parameter(f"{path}.bias").detach().numpy()
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_exact_weights_need_no_correction() -> None:
    """The bias stays as it is: its later rounding to an int32 step doesn't count as a shift."""
    model, images = Mlp().eval(), noise(20, 12)
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            layer.weight.copy_(layer.weight.sign())
    graph = calibrated(model, images, FBGEMM.reduced(False))
    operator = _operator(graph, "fc2")
    rounded, _ = operator.quantized(operator.weight, operator.bias)
    before = cast(Tensor, operator.bias).detach().clone()
    BiasCorrection("analytic", 20)(graph, [images])
    assert torch.equal(rounded, operator.weight)
    assert torch.equal(cast(Tensor, operator.bias), before)


def test_one_image_far_beyond_the_ranges_does_not_move_the_bias() -> None:
    model, images = _skewed("chain")
    graph, other = calibrated(model, images), calibrated(model, images)
    BiasCorrection("empirical", 48)(graph, [images])
    BiasCorrection("empirical", 48)(other, [torch.cat([images[:-1], 1e4 * images[-1:]])])
    for path, operator in ((p, m) for p, m in graph.named_modules() if isinstance(m, QATOperator)):
        moved = graph.get_parameter(f"{path}.bias") - other.get_parameter(f"{path}.bias")
        assert float(moved.detach().abs().max()) < 0.01 * float(operator.weight.detach().abs().max()), path


def test_what_cannot_be_corrected_says_why() -> None:
    model, images = _skewed("twice")
    assert targets(calibrated(model, images))[1] == [
        (site, "bias not corrected: several calls share its bias") for site in ("conv", "conv_1")
    ]
    two = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    two[2].bias = two[0].bias
    assert [site for site, _ in targets(calibrated(two.eval(), noise(4, 12)))[1]] == ["0", "2"]
    model, images = _skewed("chain")
    alive = calibrated(model, images, batch_norm="freeze")
    reason = "bias not corrected: its BatchNorm is not folded (schedule.batch_norm=fold folds it)"
    assert targets(alive)[1] == [("conv1", reason), ("conv2", reason)]
    bare = nn.Sequential(nn.Linear(12, 5, bias=False))
    assert targets(calibrated(bare, noise(4, 12)))[1] == [("0", "bias not corrected: it has no bias")]
    floating = calibrated(Mlp().eval(), noise(4, 12), overrides={"fc1": OverrideConfig(float=True)})
    assert (
        len(targets(floating)[0]) == 1 and targets(floating)[1] == []
    )  # float on purpose: nothing to correct


def test_correct_runs_on_request_and_restores_training_mode() -> None:
    model, images = _skewed("chain")
    module = QATModule(model, images[:2], algorithms=[BiasCorrection(images=8)])
    module.calibrate([images])
    before = module.graph.get_parameter("conv2.bias").detach().clone()
    read = []

    def batches() -> Any:
        for batch in images.split(4):
            read.append(len(batch))
            yield batch

    module.correct(batches())
    assert module.graph.training and read == [4, 4]
    assert not torch.equal(module.graph.get_parameter("conv2.bias"), before)
    plain = QATModule(model, images[:2])
    plain.calibrate([images])
    plain.correct(batches())
    assert torch.equal(plain.graph.get_parameter("conv2.bias"), before) and read == [4, 4]


def test_the_bias_ships_in_int32_steps() -> None:
    model, images = _skewed("chain")
    module = QATModule(model, images[:2], algorithms=[BiasCorrection()])
    module.calibrate([images])
    module.correct([images])
    module.eval()
    module.ready_to_convert()
    converted = module.convert().graph
    torch.testing.assert_close(converted(images), module.graph(images), rtol=1e-5, atol=1e-5)
    shipped, scale = converted.get_buffer("conv1.bias"), converted.get_buffer("conv1.bias_scale")
    steps = module.graph.get_parameter("conv1.bias").detach().double() / scale.double()
    assert shipped.dtype == torch.int32 and torch.equal(shipped.double(), steps.round())


@pytest.mark.parametrize("algorithms", [[BiasCorrection()], [BiasCorrection(), MomentRounding()]])
def test_without_quantization_the_graph_is_the_float_model_still(algorithms: list[Algorithm]) -> None:
    """Corrections apply only to quantized runs, also in a module restored from its checkpoint."""
    model, images = _skewed("chain")
    with torch.no_grad():
        wanted = model(images)
    module, other = (QATModule(model, images[:2], algorithms=algorithms) for _ in range(2))
    module.calibrate([images])
    module.correct([images])
    other.load_state_dict(module.state_dict())
    for one in (module, other):
        one.eval()
        set_phase(one.graph, observe=False, quantize=False)
        with torch.no_grad():
            torch.testing.assert_close(one.graph(images), wanted, atol=1e-5, rtol=1e-5)
        biases = [m.bias for m in one.graph.modules() if isinstance(m, QATOperator)]
        floats = [m.bias for m in QATModule(model, images[:2]).graph.modules() if isinstance(m, QATOperator)]
        assert not all(
            torch.equal(cast(Tensor, a), cast(Tensor, b)) for a, b in zip(biases, floats, strict=True)
        )
