"""Tests of QATModule: its four hooks, the loss, the learning rate, and the phases of training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from chain import Chain, Mlp, noise, run_ort, run_torch, settle
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.pass_result import PassResult
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit.quant.backends import QNNPACK
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit.train.learner import FloatModule, make_optimizer, rate_factor
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

SCHEDULE = ScheduleConfig()


class Classify(nn.Module):
    """Chain with a pooled output, from [N, 3, 12, 12] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = Chain(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(self.body(x)).mean((2, 3))
        return result


def _model() -> nn.Module:
    torch.manual_seed(0)
    return settle(Classify(), 3, 12, 12)


def _module(schedule: ScheduleConfig = SCHEDULE, **keywords: object) -> QATModule:
    return QATModule(_model(), noise(2, 3, 12, 12), schedule, **keywords)  # type: ignore[arg-type]


def test_the_hooks_used_alone_make_what_the_module_makes(tmp_path: Path) -> None:
    """Compares fuse, stub, prepare_qat and convert as plain calls with QATModule's file, byte for byte."""
    images = noise(16, 3, 12, 12)
    module = _module()
    module.calibrate([images])
    example = noise(2, 3, 12, 12)
    fused = fuse(_model(), example, depthwise=True).graph
    by_hand = prepare_qat(stub(fused, example).graph, module.backend, example).graph
    for name, quantizer in fake_quantizers(by_hand).items():
        quantizer.load_state_dict(fake_quantizers(module.graph)[name].state_dict())
    for m in by_hand.modules():
        if isinstance(m, (FakeQuantize, WeightFakeQuantize)):
            m.enabled = True
    by_hand.eval()
    module.eval()
    np.testing.assert_array_equal(run_torch(module, images), run_torch(by_hand, images))
    for name, graph in (("module", module.convert().graph), ("hand", convert(by_hand).graph)):
        export_onnx(graph, images[:2], tmp_path / f"{name}.onnx")
    assert (tmp_path / "module.onnx").read_bytes() == (tmp_path / "hand.onnx").read_bytes()


def test_hooks_called_on_a_module_without_a_trainer() -> None:
    module = _module()
    fused = module.fuse(_model())
    assert fused.changed == 2
    prepared = module.prepare_qat(module.stub(fused.graph).graph)
    assert list(fake_quantizers(prepared.graph)) == list(fake_quantizers(module.graph))


def test_a_subclass_may_override_every_hook() -> None:
    calls: list[str] = []

    class Mine(QATModule):
        def fuse(self, model: nn.Module) -> PassResult:
            calls.append("fuse")
            return super().fuse(model)

        def stub(self, model: nn.Module) -> PassResult:
            calls.append("stub")
            result = super().stub(model)
            result.skipped.append(("here", "my own reason"))
            return result

        def prepare_qat(self, graph: fx.GraphModule) -> PassResult:
            calls.append("prepare_qat")
            self.overrides = {"body.conv2": OverrideConfig(float=True)}
            return super().prepare_qat(graph)

        def convert(self) -> PassResult:
            calls.append("convert")
            return super().convert()

    module = Mine(_model(), noise(2, 3, 12, 12))
    module.calibrate([noise(8, 3, 12, 12)])
    converted = module.convert().graph
    assert calls == ["fuse", "stub", "prepare_qat", "convert"]
    assert ("here", "my own reason") in module.skipped
    assert ("body.conv2", "float by override 'body.conv2'") in module.skipped
    quantized = {n for n, m in converted.named_modules() if isinstance(m, Quantized)}
    assert quantized == {"body.conv1", "body.conv3"}


def test_more_operators_of_a_traced_graph_cannot_be_left_float() -> None:
    example = noise(2, 3, 12, 12)
    module = QATModule(trace(_model(), example), example)
    graph = module.graph
    with pytest.raises(ConfigError, match="model=Classify: the graph was already traced, "):
        module.leave_float(["body.conv2"])
    assert module.graph is graph and not module.overrides and not module.floats


def test_the_float_model_is_left_untouched() -> None:
    model = _model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    module = QATModule(model, noise(2, 3, 12, 12), replace(SCHEDULE, distill=0.5))
    module.calibrate([noise(8, 3, 12, 12)])
    optimizer = make_optimizer(module.graph, SCHEDULE, 0.1)
    module.loss(noise(8, 3, 12, 12), torch.arange(8) % 4).backward()
    optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in module.parameters()}
    assert not [k for k in module.state_dict() if "teacher" in k]


@pytest.mark.parametrize(
    ("share", "temperature", "smoothing"), [(0.3, 2.0, 0.0), (1.0, 4.0, 0.0), (0.5, 1.0, 0.1)]
)
def test_distillation_is_hintons_formula(share: float, temperature: float, smoothing: float) -> None:
    schedule = replace(SCHEDULE, distill=share, distill_temperature=temperature, label_smoothing=smoothing)
    module = _module(schedule)
    module.calibrate([noise(8, 3, 12, 12)])
    module.eval()  # no dropout, so that the logits can be computed again
    with torch.no_grad():  # far from the teacher, so that the divergence is not a rounding error
        module.graph.get_parameter("body.conv3.weight").mul_(-5)
    images, labels = noise(8, 3, 12, 12, seed=3), torch.arange(8) % 4
    student, teacher = (run_torch(m, images).astype(np.float64) for m in (module, _model()))
    p = np.exp(teacher / temperature) / np.exp(teacher / temperature).sum(1, keepdims=True)
    q = np.exp(student / temperature) / np.exp(student / temperature).sum(1, keepdims=True)
    soft = (p * np.log(p / q)).sum(1).mean() * temperature**2
    log_q = student - np.log(np.exp(student).sum(1, keepdims=True))
    target = np.full_like(log_q, smoothing / 4)
    target[np.arange(8), labels.numpy()] += 1 - smoothing
    hard = -(target * log_q).sum(1).mean()
    assert module.loss(images, labels).item() == pytest.approx((1 - share) * hard + share * soft, rel=1e-4)


def test_without_distillation_it_is_cross_entropy() -> None:
    module = _module(replace(SCHEDULE, label_smoothing=0.1)).eval()
    images, labels = noise(8, 3, 12, 12), torch.arange(8) % 4
    want = F.cross_entropy(torch.from_numpy(run_torch(module, images)), labels, label_smoothing=0.1)
    assert module.loss(images, labels).item() == pytest.approx(want.item())
    assert module.teacher == ()


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_rate_warms_up_then_decays(decay: str) -> None:
    schedule = replace(SCHEDULE, warmup=0.1, decay=decay)
    rates = [rate_factor(step, 100, schedule) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    for step in range(10, 101):
        t = (step - 10) / 90
        want = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t, "constant": 1.0}[decay]
        assert rates[step] == pytest.approx(want, abs=1e-9)


def test_rate_without_warm_up_and_of_one_step() -> None:
    schedule = replace(SCHEDULE, warmup=0.0)
    assert rate_factor(0, 10, schedule) == 1.0
    assert 0 <= rate_factor(0, 1, schedule) <= 1.0
    assert rate_factor(5, 5, schedule) == pytest.approx(0.0)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_vectors_get_no_weight_decay(name: str, kind: type[torch.optim.Optimizer]) -> None:
    module = _module(replace(SCHEDULE, batch_norm="train"))
    optimizer = make_optimizer(module.graph, replace(SCHEDULE, optimizer=name, weight_decay=0.03), 0.2)
    assert type(optimizer) is kind
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.03, 0.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.2}
    names = {id(p): n for n, p in module.graph.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {f"body.conv{i}.weight" for i in (1, 2, 3)}
    assert {names[id(p)] for p in plain["params"]} == set(names.values()) - {
        f"body.conv{i}.weight" for i in (1, 2, 3)
    }
    if name == "sgd":
        assert decayed["momentum"] == SCHEDULE.momentum


def _phase(module: QATModule) -> tuple[set[bool], set[bool], set[bool]]:
    fakes = [m for m in module.modules() if isinstance(m, FakeQuantize)]
    weights = [m for m in module.modules() if isinstance(m, WeightFakeQuantize)]
    return {m.observing for m in fakes}, {m.enabled for m in fakes}, {m.enabled for m in weights}


@pytest.mark.parametrize(
    ("progress", "observing", "quantizing"),
    [
        (0.0, True, False),
        (0.19, True, False),
        (0.2, True, True),
        (0.59, True, True),
        (0.6, False, True),
        (1.0, False, True),
    ],
)
def test_phases_are_a_function_of_progress(progress: float, observing: bool, quantizing: bool) -> None:
    module = _module(replace(SCHEDULE, enable_fake_quant=0.2, freeze_observers=0.6))
    for start in (0.0, 1.0):  # from any previous phase
        module.set_phase(start)
        module.set_phase(progress)
        assert _phase(module) == ({observing}, {quantizing}, {quantizing})


def test_the_control_never_quantizes() -> None:
    module = _module(quantize=False)
    for progress in (0.0, 0.5, 1.0):
        module.set_phase(progress)
        assert _phase(module) == ({False}, {False}, {False})
    module.ready_to_convert()
    images = noise(8, 3, 12, 12)
    np.testing.assert_allclose(
        run_torch(module.eval(), images), run_torch(_model(), images), rtol=1e-3, atol=1e-5
    )


def _batch_norms(module: QATModule) -> list[bool]:
    """Returns whether each remaining BatchNorm would use batch statistics in a step under Lightning."""
    module.eval()
    module.train()
    return [m.training for m in module.modules() if isinstance(m, nn.BatchNorm2d)]


def test_batchnorm_folded() -> None:
    assert _batch_norms(_module(replace(SCHEDULE, batch_norm="fold"))) == []


def test_batchnorm_frozen_from_the_start() -> None:
    module = _module(replace(SCHEDULE, batch_norm="freeze"))
    assert _batch_norms(module) == [False, False]
    module.set_phase(0.0)
    assert _batch_norms(module) == [False, False]


@pytest.mark.parametrize("batch_norm", ["freeze", "train"])
def test_a_checkpoint_holds_every_tensor_once(batch_norm: str) -> None:
    """A BatchNorm that is not folded has only one path, inside its operator."""
    state = _module(replace(SCHEDULE, batch_norm=batch_norm)).state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    assert "graph.body.conv1.bn.running_var" in state and "graph.body.bn1.running_var" not in state


def test_batchnorm_trained_until_its_milestone() -> None:
    module = _module(replace(SCHEDULE, batch_norm="train", freeze_batch_norm=0.5))
    for progress, alive in ((0.0, True), (0.49, True), (0.5, False), (1.0, False)):
        module.set_phase(progress)
        assert _batch_norms(module) == [alive, alive], progress


def test_ready_to_convert_is_what_convert_makes(tmp_path: Path) -> None:
    module = _module(replace(SCHEDULE, enable_fake_quant=0.9))
    images = noise(16, 3, 12, 12)
    module.calibrate([images])
    module.set_phase(0.1)
    module.ready_to_convert()
    assert _phase(module) == ({False}, {True}, {True})
    simulated, converted = run_torch(module.eval(), images), run_torch(module.convert().graph, images)
    assert np.abs(simulated - converted).max() < 2 / 255 * np.ptp(simulated)


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule.batch_norm=both"):
        _module(replace(SCHEDULE, batch_norm="both"))
    with pytest.raises(ConfigError, match=r"backend.overrides=nothing.here"):
        _module(overrides={"nothing.here": OverrideConfig(float=True)})
    with pytest.raises(ConfigError, match="no Conv, Linear, LSTM"):
        QATModule(nn.Sequential(nn.ReLU()), noise(2, 4))


def _fit(module: lightning.LightningModule, steps: int) -> lightning.Trainer:
    data = TensorDataset(noise(32, 3, 12, 12), torch.arange(32) % 4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    return trainer


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_fine_tuned_by_a_plain_trainer_and_shipped(batch_norm: str, tmp_path: Path) -> None:
    """Trains with a plain Lightning Trainer, without the pipeline, and compares the file with the module."""
    module = _module(replace(SCHEDULE, lr=0.01, batch_norm=batch_norm), backend=QNNPACK)
    module.calibrate([noise(16, 3, 12, 12)])
    before = {k: v.clone() for k, v in module.graph.state_dict().items()}
    _fit(module, 8)
    assert not torch.equal(before["body.conv1.weight"], module.graph.get_parameter("body.conv1.weight"))
    if batch_norm != "fold":
        moved = not torch.equal(
            before["body.conv1.bn.running_mean"], module.graph.get_buffer("body.conv1.bn.running_mean")
        )
        assert moved == (batch_norm == "train")
    module.ready_to_convert()
    converted = module.eval().convert().graph
    images = noise(16, 3, 12, 12, seed=9)
    export_onnx(converted, images[:2], tmp_path / "m.onnx")
    want = run_torch(converted, images)
    got = run_ort(tmp_path / "m.onnx", images, options=QNNPACK.session_options)
    np.testing.assert_allclose(got, want, atol=float(1.2 / 255 * np.ptp(want)))


def test_phases_advance_under_the_trainer() -> None:
    seen: list[tuple[set[bool], set[bool]]] = []

    class Watched(QATModule):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            seen.append(_phase(self)[:2])
            return super().training_step(batch, index)

    module = Watched(
        _model(), noise(2, 3, 12, 12), replace(SCHEDULE, enable_fake_quant=0.25, freeze_observers=0.5)
    )
    module.calibrate([noise(16, 3, 12, 12)])
    _fit(module, 8)
    assert seen == [({True}, {False})] * 2 + [({True}, {True})] * 2 + [({False}, {True})] * 4


def test_the_float_module_trains_what_it_is_given() -> None:
    torch.manual_seed(0)
    model = Mlp().eval()
    module = FloatModule(model, replace(SCHEDULE, float_lr=0.3))
    assert module.graph is model and model.training and module.lr == 0.3
    images, labels = noise(6, 12), torch.arange(6) % 5
    assert module.loss(images, labels).item() == pytest.approx(F.cross_entropy(model(images), labels).item())
