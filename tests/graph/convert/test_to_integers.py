"""Tests of converting: int8 weights, int32 biases, and agreement with the simulation and with ONNX Runtime.

The converted module computes with integers what ONNX Runtime's 8-bit kernels compute. With all optimizations,
both must agree bit for bit on x86, unless the network has float operators such as softmax. The simulation,
and ONNX Runtime without optimizations, sum in float, and may round a tie the other way, by one step. Such steps
grow in a deep network of random weights, so the operators of such networks are compared one by one with the
simulation.
"""

from __future__ import annotations

import copy
import platform

import numpy as np
import pytest
import torch
from chain import (
    SMALL,
    Chain,
    Mlp,
    Twice,
    calibrated,
    noise,
    reach,
    run_ort,
    run_torch,
    settle,
    ship,
    shipped,
    steps_off,
)
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import OverrideConfig
from qatkit.graph.convert.integer_modules import Quantized, QuantizeDequantize
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import QNNPACK
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator
from qatkit.verify.audit import audit

NETWORKS = [
    "resnet18",
    "mobilenet_v2",
    pytest.param("mobilenet_v3_small", marks=pytest.mark.slow),
    pytest.param("efficientnet_b0", marks=pytest.mark.slow),
    "vit",
]
X86 = platform.machine() in ("x86_64", "AMD64")
x86 = pytest.mark.skipif(
    not X86, reason="ARM's kernels of Add and GlobalAveragePool are fixed point: ±1 step"
)


def _images(name: str, count: int = 16) -> Tensor:
    """Returns images other than those of the calibration."""
    return noise(count, *shipped(name).images.shape[1:], seed=7)


@x86
@pytest.mark.parametrize("name", [*SMALL, *NETWORKS])
def test_converted_is_onnx_runtime_with_all_optimizations(name: str) -> None:
    images = _images(name)
    want, got = run_torch(shipped(name).converted, images), run_ort(shipped(name).path, images)
    if name in ("vit", "block"):  # softmax, GELU and LayerNorm are float, with different implementations
        assert steps_off(want, got) < 0.5
        assert float((np.abs(want - got) > 1e-4).mean()) < 0.05
    else:
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("name", SMALL)
def test_converted_is_onnx_runtime_without_optimizations(name: str) -> None:
    """Without optimizations, the file runs in float: less than 1 % of the outputs differ, by one step."""
    images = _images(name)
    want, got = (
        run_torch(shipped(name).converted, images),
        run_ort(shipped(name).path, images, optimize=False),
    )
    assert steps_off(want, got) <= 1.2
    assert float((np.abs(want - got) > 1e-4 * np.abs(want).max()).mean()) < 0.01


@pytest.mark.parametrize("name", SMALL)
def test_converted_is_the_simulation_but_for_ties(name: str) -> None:
    a, b = (
        run_torch(shipped(name).simulated, _images(name)),
        run_torch(shipped(name).converted, _images(name)),
    )
    assert steps_off(a, b) <= 2
    assert float((np.abs(a - b) > 0.5 / 255 * (a.max() - a.min())).mean()) < 0.02


@pytest.mark.parametrize("name", NETWORKS)
def test_every_operator_of_a_network_is_its_simulation(name: str) -> None:
    """Compares every Conv and Linear on the input that it has in the converted network."""
    case = shipped(name)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hooks = []
    for path, module in case.converted.named_modules():
        if isinstance(module, Quantized):

            def keep(_: nn.Module, args: tuple[Tensor], out: Tensor, path: str = path) -> None:
                inputs[path], outputs[path] = args[0], out

            hooks.append(module.register_forward_hook(keep))
    run_torch(case.converted, _images(name, 4))
    for hook in hooks:
        hook.remove()
    assert len(outputs) > 8
    with torch.no_grad():
        for path, output in outputs.items():
            operator, converted = case.simulated.get_submodule(path), case.converted.get_submodule(path)
            assert isinstance(operator, QATOperator) and isinstance(converted, Quantized)
            x = inputs[path]
            if isinstance(operator, nn.Conv2d):
                x = x[:, : operator.in_channels]  # the channels after them are zeros
            want = operator(x)
            got = output[:, : want.shape[1]]
            if converted.output_scale is None:
                torch.testing.assert_close(
                    got, want, rtol=1e-3, atol=2e-3 * float(want.abs().max()), msg=path
                )
                continue
            steps = (torch.round(want / converted.output_scale) - got / converted.output_scale).abs().round()
            assert int(steps.max()) <= 1, path
            assert float((steps > 0).float().mean()) < 0.02, path


@pytest.mark.parametrize("name", SMALL)
def test_the_simulation_is_near_the_float_model(name: str) -> None:
    """Compares on the calibration images, as a sanity check rather than a bound on accuracy."""
    case = shipped(name)
    a, b = run_torch(case.model, case.images), run_torch(case.simulated, case.images)
    assert np.linalg.norm(a - b) / np.linalg.norm(a) < 0.1


@pytest.mark.parametrize("name", ["chain", "mlp", "block"])
def test_parameters_are_integers_at_the_stated_scales(name: str) -> None:
    case = shipped(name)
    found = 0
    for path, module in case.converted.named_modules():
        if not isinstance(module, Quantized):
            continue
        found += 1
        operator = case.simulated.get_submodule(path)
        assert isinstance(operator, QATOperator)
        weight, bias = operator.effective()
        assert module.weight.dtype == torch.int8
        assert module.weight_scale.shape == (weight.shape[0],)
        assert int(module.weight_zero_point.abs().max()) == 0
        flat = module.weight.flatten(1).float()
        # Alignment raises the scale by up to 1 %.
        assert set(reach(module.weight).tolist()) <= {126.0, 127.0, 128.0}
        restored = flat * module.weight_scale.view(-1, 1)
        assert ((restored - weight.flatten(1)).abs() <= 0.501 * module.weight_scale.view(-1, 1)).all()
        assert bias is not None and module.bias is not None and module.bias.dtype == torch.int32
        assert torch.equal(module.bias_scale, module.weight_scale * module.input_scale)
        step = float(module.bias_scale.max())
        torch.testing.assert_close(module.bias * module.bias_scale, bias, rtol=1e-4, atol=step)
    assert found == {"chain": 3, "mlp": 2, "block": 4}[name]


def test_convert_drops_training_parts_and_leaves_its_input_alone() -> None:
    simulated = calibrated(settle(Chain(), 3, 12, 12), noise(8, 3, 12, 12), batch_norm="train").train()
    before = {k: v.clone() for k, v in simulated.state_dict().items()}
    result = convert(simulated)
    assert not list(result.graph.parameters())
    kinds = {type(m) for m in result.graph.modules()}
    assert not kinds & {FakeQuantize, nn.BatchNorm2d, nn.ReLU, nn.ReLU6}
    assert not result.graph.training and simulated.training
    assert result.changed == 4
    assert all(torch.equal(before[k], v) for k, v in simulated.state_dict().items())


@pytest.mark.parametrize("mode", ["freeze", "train"])
def test_a_batchnorm_that_was_alive_is_folded_into_the_integers(mode: str) -> None:
    model, x = settle(Chain(), 3, 12, 12), noise(16, 3, 12, 12)
    fold, alive = (convert(calibrated(model, x, batch_norm=m)).graph for m in ("fold", mode))
    for path in ("conv1", "conv2"):
        a, b = fold.get_submodule(path), alive.get_submodule(path)
        assert isinstance(a, Quantized) and isinstance(b, Quantized)
        assert int((a.weight.int() - b.weight.int()).abs().max()) <= 1
        torch.testing.assert_close(a.weight_scale, b.weight_scale, rtol=1e-4, atol=0)
    assert steps_off(run_torch(fold, x), run_torch(alive, x)) <= 2


RAISED = "the scale of 1 channel was raised so that the bias fits int32"


def _planted() -> tuple[nn.Module, Tensor]:
    """Returns a network whose first convolution has a nearly dead channel with a usual bias, and images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        model.get_parameter("0.weight")[1] *= 1e-11
        model.get_parameter("0.bias")[1] = 0.7
    return model, noise(16, 3, 8, 8)


def test_a_bias_that_would_overflow_int32_is_repaired_and_told() -> None:
    model, x = _planted()
    scale = float(model.get_parameter("0.weight")[1].detach().abs().max()) / 127
    assert 0.7 / (scale * float(x.abs().max()) / 127) > 2**31
    case = ship(model, x, "planted")
    quantized = case.converted.get_submodule("0")
    assert isinstance(quantized, Quantized) and quantized.bias is not None
    assert case.conversion.skipped == [
        ("0", f"{RAISED}; outputs change by at most {quantized.lost:.1e} of the bias")
    ]
    assert 0 < quantized.lost < 27 * 255 / 2**30
    assert quantized.bias.abs().max() < 2**31 - 1
    assert float(quantized.bias[1] * quantized.bias_scale[1]) == pytest.approx(0.7, rel=1e-4)
    float_logits = run_torch(model, x)
    assert steps_off(float_logits, run_torch(case.converted, x)) < 8
    for optimize in (False, True):
        assert steps_off(run_torch(case.converted, x), run_ort(case.path, x, optimize=optimize)) <= 1.2


@pytest.mark.parametrize("masked", [1e4, 1e6])
def test_a_masked_class_leaves_the_others_their_steps(masked: float) -> None:
    """The weight has a single scale, at which one bias is far out of range."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 10)), noise(64, 16) * 0.1
    plain, override = copy.deepcopy(model), {"0": OverrideConfig(weight_granularity="per_tensor")}
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = -masked
    case, other = (
        ship(m, x, name, overrides=override) for m, name in ((model, "masked"), (plain, "unmasked"))
    )
    kept = [i for i in range(10) if i != 3]
    for optimize in (False, True):
        found, expected = (run_ort(c.path, x, optimize=optimize) for c in (case, other))
        np.testing.assert_allclose(found[:, kept], expected[:, kept], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[:, 3], -masked, rtol=1e-4)


def test_a_module_called_twice_has_one_bias_scale_a_place() -> None:
    case = shipped("twice")
    places = [m for m in case.converted.modules() if isinstance(m, Quantized) and m.weight.shape[-1] == 3]
    assert len(places) == 2
    scales = {float(m.input_scale) for m in places}
    quantizers = dict(case.simulated.named_modules())
    assert scales == {float(quantizers[n].scale) for n in ("input_quant", "conv_quant")}
    assert torch.equal(places[0].weight, places[1].weight)
    for place in places:
        assert torch.equal(place.bias_scale, place.weight_scale * place.input_scale)


def test_three_dimensional_linears_are_flattened_around() -> None:
    """All axes but the last become one for the Gemm, and are restored after it."""
    for shape in ((6, 12), (3, 2, 12)):
        torch.manual_seed(0)
        x = noise(8, *shape)
        case = ship(Mlp().eval(), x, "mlp_nd")
        y = run_torch(case.converted, x)
        assert y.shape == (8, *shape[:-1], 5)
        np.testing.assert_array_equal(y, run_ort(case.path, x))


@x86
@pytest.mark.parametrize("name", ["chain", "hard_gate", "residual", "mlp"])
def test_qnnpack_is_onnx_runtime_with_its_options(name: str) -> None:
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    case = ship(settle(kind(), *shape), noise(16, *shape), f"{name}_qnnpack", backend=QNNPACK)
    for module in case.converted.modules():
        if isinstance(module, QuantizeDequantize):
            assert module.zero_point.dtype == torch.int8
    x = noise(16, *shape, seed=7)
    want = run_torch(case.converted, x)
    for optimize in (False, True):
        assert steps_off(want, run_ort(case.path, x, optimize=optimize, options=QNNPACK.session_options)) <= 2
    assert steps_off(run_torch(case.simulated, x), want) <= 2


class SharedRows(nn.Module):
    """A Linear whose output is read by another Linear and by a float operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = y.softmax(-1) * self.second(y)
        return found


@pytest.mark.parametrize("shape", [(12,), (5, 12), (3, 5, 12)], ids=str)
def test_a_linear_with_a_float_reader_is_int8(shape: tuple[int, ...]) -> None:
    x = noise(16, *shape)
    case = ship(SharedRows().eval(), x, f"shared_rows_{len(shape)}")
    found = audit(case.path)
    assert found.int8_share == 1.0 and found.problems == ()
    np.testing.assert_allclose(run_ort(case.path, x), run_torch(case.converted, x), atol=1e-5)


def test_dropout_is_gone_and_ranges_reach_through_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)).eval()
    x = noise(32, 12)
    converted = convert(calibrated(model, x).train()).graph
    assert not [m for m in converted.modules() if isinstance(m, nn.Dropout)]
    assert steps_off(run_torch(model, x), run_torch(converted, x)) < 6


def test_weights_of_one_scale() -> None:
    model, x = settle(Twice(), 4, 8, 8), noise(16, 4, 8, 8)
    case = ship(
        model, x, "per_tensor", overrides={"op/conv": OverrideConfig(weight_granularity="per_tensor")}
    )
    quantized = case.converted.get_submodule("last")
    assert isinstance(quantized, Quantized) and quantized.weight_scale.shape == ()
    np.testing.assert_array_equal(run_torch(case.converted, x), run_ort(case.path, x))


def test_convert_needs_a_quantized_input() -> None:
    """The error names an int8 operator that reads a float tensor, as can happen in an edited graph."""
    simulated = calibrated(Mlp().eval(), noise(8, 12))
    for node in list(simulated.graph.nodes):
        if node.target == "fc1_quant":
            node.replace_all_uses_with(node.args[0])
    with pytest.raises(ValueError, match="the input of fc2 has no FakeQuantize"):
        convert(simulated)


def test_relu_that_is_read_twice_is_computed_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.conv1(x))
            return F.relu(self.conv2(y) + y)

    torch.manual_seed(0)
    x = noise(16, 3, 8, 8)
    case = ship(Both().eval(), x, "relu_twice")
    assert sum(isinstance(m, QuantizeDequantize) for m in case.converted.modules()) == 4
    want = run_torch(case.converted, x)
    assert want.min() >= 0
    assert steps_off(want, run_ort(case.path, x)) <= (0 if X86 else 1.2)
