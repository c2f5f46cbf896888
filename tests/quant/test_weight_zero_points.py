"""Tests of weights with a zero_point against NumPy and ONNX, and of where none is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qatkit.config.schema import BackendConfig, Config
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel, PerTensor
from qatkit.quant.learned.lsq import LSQWeightFakeQuantize
from qatkit.quant.learned.oscillation import Oscillation
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Integers, WeightFakeQuantize
from qatkit.run.backend import backend_of
from qatkit.run.export import check_weights
from qatkit_verify.errors import ConfigError

ENDS = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}
GRANULARITIES: dict[str, tuple[Granularity, tuple[int, ...]]] = {
    "tensor": (PerTensor(), (0, 1)),
    "channel": (PerChannel(0), (1,)),
    "block": (PerBlock(8), (2,)),
}
WEIGHT = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) + torch.arange(-3.0, 3.0)[:, None]
WIDE = QuantSpec("int8", granularity=PerChannel(0))


def quantizer(spec: QuantSpec) -> WeightFakeQuantize:
    """Returns an enabled quantizer for `WEIGHT`."""
    made = WeightFakeQuantize(spec, WEIGHT.shape)
    made.enabled = True
    return made


def by_numpy(
    weight: NDArray[np.float32], ends: tuple[int, int], axes: tuple[int, ...], share: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float32]]:
    """Returns scales and zero_points over `axes`, and dequantized values; `share` of the range is kept."""
    low, high = (
        np.minimum(weight.min(axes, keepdims=True), 0),
        np.maximum(weight.max(axes, keepdims=True), 0),
    )
    full = ((high - low) / np.float32(ends[1] - ends[0])).astype(np.float32)
    zero = ends[0] - np.round(low / full)
    scale = full * np.float32(share)
    return scale, zero, (np.clip(np.round(weight / scale) + zero, *ends) - zero) * scale


def dequantized(found: Integers, granularity: Granularity) -> NDArray[np.float32]:
    """Returns the exported weight, dequantized by ONNX's DequantizeLinear."""
    block = isinstance(granularity, PerBlock)
    settings: dict[str, Any] = {"axis": 1, "block_size": 8} if block else {"axis": 0}
    parts = {"q": found.weight, "scale": found.scale, "zero": found.zero_point}
    kind = TensorProto.UINT8 if found.weight.dtype == torch.uint8 else TensorProto.INT8
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", list(parts), ["y"], **settings)],
        "dequantize",
        [helper.make_tensor_value_info("q", kind, WEIGHT.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, WEIGHT.shape)],
        [numpy_helper.from_array(parts[name].numpy(), name) for name in ("scale", "zero")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(model)
    (values,) = ReferenceEvaluator(model).run(None, {"q": found.weight.numpy()})
    return np.asarray(values, np.float32)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ENDS)
def test_scale_zero_point_and_values_are_numpys(dtype: str, granularity: str) -> None:
    kind, axes = GRANULARITIES[granularity]
    module = quantizer(QuantSpec(dtype, granularity=kind))
    blocks = WEIGHT.numpy().reshape(6, -1, 8) if granularity == "block" else WEIGHT.numpy()
    scale, zero, values = by_numpy(blocks, ENDS[dtype], axes)
    shape = module.scale(WEIGHT).shape
    np.testing.assert_allclose(module.scale(WEIGHT), scale.reshape(shape), rtol=1e-6)
    np.testing.assert_array_equal(module.zero_point(WEIGHT), zero.reshape(shape))
    np.testing.assert_allclose(module(WEIGHT)[0], values.reshape(6, 32), rtol=1e-5, atol=1e-6)
    found = module.integers(WEIGHT, None, torch.ones(()))
    assert found.zero_point.dtype == found.weight.dtype == QuantSpec(dtype).torch_dtype
    assert found.zero_point.shape == found.scale.shape
    low, high = int(found.weight.min()), int(found.weight.max())
    assert (low, high) == ENDS[dtype]
    np.testing.assert_allclose(dequantized(found, kind), module(WEIGHT)[0], rtol=1e-6, atol=1e-7)


def test_positive_weights_gain_a_bit() -> None:
    weight = WEIGHT.abs() + 0.5

    def sqnr(spec: QuantSpec) -> float:
        error = (quantizer(spec)(weight)[0] - weight).square().sum()
        return float(10 * torch.log10(weight.square().sum() / error))

    assert sqnr(WIDE) > sqnr(replace(WIDE, symmetric=True)) + 5
    assert sqnr(replace(WIDE, dtype="int4")) > sqnr(replace(WIDE, dtype="int4", symmetric=True)) + 5


def test_symmetric_unsigned_weights_are_counted_from_the_middle() -> None:
    module = quantizer(QuantSpec("uint8", symmetric=True, granularity=PerChannel(0)))
    found = module.integers(WEIGHT, None, torch.ones(()))
    scale = np.abs(WEIGHT.numpy()).max(1) / np.float32(127)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    assert found.zero_point.dtype == torch.uint8 and set(found.zero_point.tolist()) == {128}
    wanted = np.round(WEIGHT.numpy() / scale[:, None]) + 128
    np.testing.assert_array_equal(found.weight, wanted)


def test_gradients_are_straight_through_within_the_range() -> None:
    module, weight = quantizer(WIDE), WEIGHT.clone().requires_grad_()
    (whole,) = torch.autograd.grad(module(weight)[0].sum(), weight)
    assert torch.equal(whole, torch.ones_like(WEIGHT))
    module.clip_to(torch.full((6,), 0.5))
    values = module(weight)[0]
    np.testing.assert_allclose(
        values.detach(), by_numpy(WEIGHT.numpy(), ENDS["int8"], (1,), 0.5)[2], rtol=1e-5, atol=1e-6
    )
    (clipped,) = torch.autograd.grad(values.sum(), weight)
    scale, zero, _ = by_numpy(WEIGHT.numpy(), ENDS["int8"], (1,), 0.5)
    inside = (WEIGHT.numpy() >= (-128 - zero) * scale) & (WEIGHT.numpy() <= (127 - zero) * scale)
    np.testing.assert_array_equal(clipped, inside)
    assert 0.1 < inside.mean() < 0.95


def test_the_range_of_least_error_is_clipped_at_both_ends() -> None:
    """The weights are normal around 1, with one far above in the first channel."""
    spec = replace(WIDE, dtype="int4")
    weight = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).clamp_(-2, 2) + 1
    weight[0, 0] = 12.0
    module = quantizer(spec)
    module.clip = torch.ones(2)
    before = (module(weight)[0] - weight).square().sum(1)
    module.clip_to_least_error(weight)
    assert module.clip[0] < 0.6 and module.clip[1] > 0.7
    after = (module(weight)[0] - weight).square().sum(1)
    assert (after <= before).all() and after[0] < before[0] / 2
    errors = []
    for share in np.linspace(1, 0.4, 31):
        values = by_numpy(weight.numpy(), ENDS["int4"], (1,), float(share))[2]
        errors.append(((values - weight.numpy()) ** 2).sum(1))
    np.testing.assert_allclose(after, np.min(errors, axis=0), rtol=1e-3)


def test_integers_that_were_given_ship_beside_their_zero_point() -> None:
    """Given integers are relative to the zero_point, which follows the weight or is fixed."""
    weight = torch.tensor([[0.26, -0.31, 0.5, -5.0], [1.0, 2.5, -0.1, 9.0]])
    scale, integers = torch.tensor([0.1, 0.5]), torch.tensor([[7, -3, -2, -120], [2, 4, 0, 30]])
    module = WeightFakeQuantize(WIDE, weight.shape)
    module.enabled = True
    for zero in (None, torch.tensor([-8, -128])):
        module.fix(scale, weight, integers, zero)
        found = module.integers(weight, None, torch.ones(()))
        expected = by_numpy(weight.numpy(), ENDS["int8"], (1,))[1].ravel() if zero is None else zero.numpy()
        np.testing.assert_array_equal(found.zero_point, expected)
        np.testing.assert_array_equal(found.weight, integers.numpy() + expected[:, None])
        restored = WeightFakeQuantize(WIDE, weight.shape)
        restored.load_state_dict(module.state_dict())
        assert torch.equal(restored.integers(weight, None, torch.ones(())).weight, found.weight)
        moved = (weight + 3 * scale[:, None]).requires_grad_()
        got, _ = module(moved)
        wanted = np.minimum(integers.numpy() + 3, 127 - module.zero_point(moved).numpy()[:, None])
        np.testing.assert_allclose(got.detach(), wanted * scale.numpy()[:, None], rtol=1e-6)
    with pytest.raises(ValueError, match="zero_point"):
        quantizer(replace(WIDE, symmetric=True)).fix(torch.ones(6), zero_point=torch.zeros(6))


@pytest.mark.parametrize("stands", [False, True])
def test_channels_that_are_turned_round_keep_their_integers(stands: bool) -> None:
    module = quantizer(WIDE)
    zero = module.zero_point(WEIGHT)
    module.fix(module.scale(WEIGHT), zero_point=zero if stands else None)
    before = module(WEIGHT)[0]
    factors = torch.tensor([2.0, -1.0, 0.5, -3.0, 1.0, -0.25])
    turned = module.times(WEIGHT, factors)
    torch.testing.assert_close(turned, before * factors[:, None])
    torch.testing.assert_close(module(turned)[0], turned, rtol=1e-6, atol=1e-6)


def test_frozen_integers_of_unsigned_weights_fit() -> None:
    """Relative to their zero_point, integers of uint8 weights range from -255 to 255."""
    module, weight = quantizer(replace(WIDE, dtype="uint8")), WEIGHT + torch.tensor([-9.0, 9.0] * 3)[:, None]
    module.oscillation = Oscillation(weight, torch.int16)
    whole = module.whole(weight)
    assert whole.min() < -200 and whole.max() > 200
    module.oscillation.update(whole, None)
    module.oscillation.frozen.fill_(True)
    assert torch.equal(module.whole(weight), whole)
    moved = -weight / 2 + 1  # moves the range
    found = module.integers(moved, None, torch.ones(()))
    np.testing.assert_allclose(dequantized(found, PerChannel(0)), module(moved)[0], rtol=1e-6, atol=1e-6)


def backend(**changes: object) -> Backend:
    """Returns FBGEMM with asymmetric weights, without the guard against saturation."""
    return replace(FBGEMM, weight=replace(WIDE, **changes))  # type: ignore[arg-type]


def test_asymmetric_weights_cannot_be_guarded() -> None:
    with pytest.raises(ConfigError) as refused:
        backend().reduced("auto")
    assert str(refused.value) == (
        "backend.reduce_range=auto: expected false or true (7 bits), since auto cannot guard asymmetric int8 weights"
    )
    assert backend().reduced(True).weight.quant_min == -64
    assert not backend(dtype="uint8").reduced("auto").weight.guards_pairs
    assert not backend(dtype="int4").reduced("auto").weight.guards_pairs
    assert not replace(QNNPACK, weight=WIDE).reduced("auto").weight.pairs


def test_asymmetric_weights_that_may_saturate_are_allowed() -> None:
    asked = BackendConfig(reduce_range=False, weight_granularity="per_tensor", weight_symmetric=False)
    weight = backend_of(replace(Config(), backend=asked)).weight
    assert (weight.quant_min, weight.quant_max, weight.symmetric, weight.pairs) == (-128, 127, False, False)
    assert backend_of(replace(Config(), backend=BackendConfig())).weight.pairs
    with pytest.raises(ConfigError, match=r"^backend.reduce_range=auto: expected false or true \(7 bits\)"):
        backend_of(replace(Config(), backend=replace(asked, reduce_range="auto")))


def test_a_runtime_without_zero_points_of_channels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.backend.target, config.backend.reduce_range = f"{__name__}.ASYMMETRIC", False
    monkeypatch.setattr("qatkit.run.export.RUNTIME_VERSION", "1.26.0")
    with pytest.raises(ConfigError) as refused:
        check_weights(config)
    assert str(refused.value).startswith(
        f"backend.target={__name__}.ASYMMETRIC: onnxruntime 1.26.0 does not support weights with a zero point per"
    )
    config.backend.weight_granularity = "per_tensor"
    check_weights(config)


def test_learned_scales_have_no_zero_point(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "quantizer.weight=qatkit.quant.learned.lsq.LSQWeightFakeQuantize: expected a quantizer that supports "
        "weights with zero points, such as qatkit.quant.weight_fake_quantize.WeightFakeQuantize"
    )
    with pytest.raises(ConfigError) as refused:
        LSQWeightFakeQuantize(WIDE, (6, 32))
    assert str(refused.value).startswith(message)
    config = Config()
    config.backend.target, config.backend.reduce_range = f"{__name__}.ASYMMETRIC", False
    monkeypatch.setattr("qatkit.run.export.RUNTIME_VERSION", "1.27.0")
    check_weights(config)
    config.quantizer.weight = "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
    with pytest.raises(ConfigError) as refused:
        check_weights(config)
    assert str(refused.value).startswith(message)


ASYMMETRIC = backend()
