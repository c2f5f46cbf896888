"""Checks that learned, optimized and given scales and roundings reach the file without being recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import Chain, noise, run_ort, run_torch, settle
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, fx, nn

from qatkit.calibration import calibrate
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.scales.align import align
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM
from qatkit.quant.fake_quantize import Bounds, FakeQuantize
from qatkit.quant.observers import Observer
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit.train.module import QATModule

IMAGES = noise(16, 3, 16, 16)


class LearnedScale(FakeQuantize):
    """A minimal LSQ: the scale is a parameter that starts at its calibrated value.

    Source: Esser et al., "Learned step size quantization", 2020.
    """

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__(spec, observer, bounds)
        self.step = nn.Parameter(torch.tensor(0.0))

    def settle(self) -> None:
        if self.step == 0:
            super().settle()
            if self.movable and not self.observing:
                self.step.data.copy_(self.scale)
        else:
            self.scale.copy_(self.step.detach())

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled or self.step == 0:
            return super().forward(x)
        low, high = (end - self.zero_point for end in self.spec.type_range)
        steps = (x / self.step).clamp(low, high)
        return (steps + (steps.round() - steps).detach()) * self.step


class LearnedWeightScale(WeightFakeQuantize):
    """Per-channel scales as a parameter, which starts at 2⁻⁸ to differ from the default."""

    def __init__(self, spec: QuantSpec, shape: Sequence[int]) -> None:
        super().__init__(spec, shape)
        self.step = nn.Parameter(torch.full_like(self.clip, 2.0**-8))

    def wanted_scale(self, weight: Tensor) -> Tensor:
        return self.step.detach()


def _graph(quantizers: Quantizers | None = None) -> fx.GraphModule:
    model = settle(Chain(), 3, 16, 16)
    graph = stub(fuse(model, IMAGES[:2], depthwise=True).graph, IMAGES[:2]).graph
    # Weights are not guarded, so that fixed values reach the file unchanged.
    prepared = prepare_qat(
        graph, FBGEMM.reduced(False), IMAGES[:2], quantizers=quantizers or Quantizers()
    ).graph.eval()
    calibrate(prepared, [IMAGES])
    return prepared


def _operators(graph: fx.GraphModule) -> dict[str, QATOperator]:
    return {
        name: m
        for name, m in graph.named_modules()
        if isinstance(m, QATOperator) and m.weight_fake_quant is not None
    }


def _constants(path: Path) -> dict[str, NDArray[np.generic]]:
    """Returns the initializers of the file by name."""
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}


def _written(graph: fx.GraphModule, path: Path) -> dict[str, NDArray[np.generic]]:
    export_onnx(convert(graph).graph, IMAGES[:2], path)
    return _constants(path)


def _holding(constants: dict[str, NDArray[np.generic]], wanted: Tensor) -> list[str]:
    return [name for name, value in constants.items() if np.array_equal(value, wanted.numpy())]


def test_a_rounding_that_was_chosen_is_in_the_file(tmp_path: Path) -> None:
    graph = _graph()
    chosen: dict[str, Tensor] = {}
    for name, operator in _operators(graph).items():
        fake, weight = operator.weight_fake_quant, operator.weight.detach()
        assert fake is not None
        scale = 2 * fake.scale(weight)  # integers stay within 64, which saturates no CPU
        up = noise(*weight.shape, seed=len(chosen)) > 0  # half of them not to the nearest
        steps = weight / scale.view(-1, *[1] * (weight.ndim - 1))
        fake.fix(scale, weight, torch.floor(steps) + up)
        chosen[name] = (torch.floor(steps) + up).clamp(-64, 64).to(torch.int8)
        assert (chosen[name] != torch.round(steps)).any()
    set_phase(graph, observe=False, quantize=True)
    align(graph)
    constants = _written(graph, tmp_path / "model.onnx")
    for name, integers in chosen.items():
        assert _holding(constants, integers), name
    simulated = run_torch(graph, IMAGES)
    assert np.abs(simulated - run_ort(tmp_path / "model.onnx", IMAGES)).max() < 1e-4


def test_a_scale_that_was_given_stands_while_the_weight_moves(tmp_path: Path) -> None:
    graph = _graph()
    for operator in _operators(graph).values():
        fake = operator.weight_fake_quant
        assert fake is not None
        fake.fix(fake.scale(operator.weight) * 0.5)
        with torch.no_grad():
            operator.weight.mul_(1.5)
    wanted = {name: o.weight_fake_quant.fixed_scale for name, o in _operators(graph).items()}  # type: ignore[union-attr]
    constants = _written(graph, tmp_path / "model.onnx")
    for name, operator in _operators(graph).items():
        scale = wanted[name]
        assert scale is not None and _holding(constants, scale), name
        steps = operator.weight.detach() / scale.view(-1, *[1] * (operator.weight.ndim - 1))
        assert _holding(constants, steps.round().clamp(-127, 127).to(torch.int8)), name


def test_a_range_that_was_given_is_moved_by_nobody() -> None:
    graph = _graph()
    quantizer = fake_quantizers(graph)["conv1"]
    quantizer.fix(torch.tensor(0.125), torch.tensor(3, dtype=torch.int32))
    set_phase(graph, observe=True, quantize=True, calibrating=True)
    graph(IMAGES * 10)
    align(graph)
    assert (quantizer.scale.item(), quantizer.zero_point.item()) == (0.125, 3)
    assert quantizer.range_record()["scale"] == 0.125


def test_a_checkpoint_restores_fixed_and_plain_quantizers() -> None:
    graph, fresh = _graph(), _graph()
    before = set(graph.state_dict())
    assert not any("fixed_scale" in key or "rounding" in key for key in before)
    fake = _operators(graph)["conv1"].weight_fake_quant
    assert fake is not None
    weight = _operators(graph)["conv1"].weight
    fake.fix(torch.full_like(fake.clip, 0.01), weight, torch.floor(weight / 0.01))
    fresh.load_state_dict(graph.state_dict())
    loaded = _operators(fresh)["conv1"].weight_fake_quant
    assert loaded is not None and loaded.frozen
    set_phase(fresh, observe=False, quantize=True)
    set_phase(graph, observe=False, quantize=True)
    assert torch.equal(fresh(IMAGES), graph(IMAGES))
    fresh.load_state_dict(_graph().state_dict())
    assert not loaded.frozen and loaded.rounding is None


def test_a_learned_scale_is_trained_aligned_and_shipped(tmp_path: Path) -> None:
    made = Quantizers(activation=LearnedScale, weight=LearnedWeightScale)
    module = QATModule(settle(Chain(), 3, 16, 16), IMAGES[:2], quantizers=made)
    module.calibrate([IMAGES])
    graph = module.graph.train()
    learned = {name: q for name, q in fake_quantizers(graph).items() if isinstance(q, LearnedScale)}
    assert all(q.step.item() > 0 for q in learned.values() if q.observer is not None)
    set_phase(graph, observe=False, quantize=True)
    graph(IMAGES).square().mean().backward()
    assert all(
        q.step.grad is not None and q.step.grad != 0 for q in learned.values() if q.observer is not None
    )
    with torch.no_grad():
        for q in learned.values():
            q.step.mul_(1.37)
    module.eval()
    module.ready_to_convert()
    path = tmp_path / "model.onnx"
    constants = _written(graph, path)
    for name, q in learned.items():
        if q.observer is not None:
            assert q.scale.item() == pytest.approx(q.step.item(), rel=0.03), name
            assert _holding(constants, q.scale), name
    scales = [value for value in constants.values() if value.dtype == np.float32 and value.size > 1]
    assert any(np.allclose(value, 2.0**-8, rtol=0.011) for value in scales)


def test_another_phase_ends_as_it_began_whatever_is_raised() -> None:
    graph = _graph().train()
    _operators(graph)["conv2"].eval()
    modes = [m.training for m in graph.modules()]

    def leave() -> None:
        with inference(graph):
            set_phase(graph, observe=True, quantize=False, calibrating=True)
            assert not graph.training and not torch.is_grad_enabled()
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        leave()
    assert [m.training for m in graph.modules()] == modes and torch.is_grad_enabled()
    assert all(q.enabled and not q.observing for q in fake_quantizers(graph).values())


def test_a_range_search_leaves_a_fixed_weight_unchanged() -> None:
    fake = _operators(_graph())["conv1"].weight_fake_quant
    assert fake is not None
    weight = noise(*_operators(_graph())["conv1"].weight.shape).requires_grad_()
    fake.fix(torch.full_like(fake.clip, 0.001))  # up to 0.127, so most weights are clipped
    fake.clip_to_least_error(weight)
    fake.enabled = True
    fake(weight)[0].sum().backward()
    assert weight.grad is not None
    assert (weight.grad[weight.detach().abs() > 0.128] == 0).all() and (fake.clip == 1).all()


def test_a_state_without_a_quantizer_leaves_it_fixed() -> None:
    graph = _graph()
    fake = _operators(graph)["conv1"].weight_fake_quant
    assert fake is not None
    fake.fix(torch.full_like(fake.clip, 0.01))
    graph.load_state_dict({"conv1.weight": _operators(graph)["conv1"].weight.detach()}, strict=False)
    assert fake.frozen
