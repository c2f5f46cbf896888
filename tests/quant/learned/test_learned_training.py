"""Tests of fine-tuning with learned quantizers: aligned scales, resuming, weight decay and shared weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from chain import noise, run_ort, run_torch, settle
from learned_net import INT4, KINDS, LSQ, Residual, data, module_of
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.learning import follow_oscillation, oscillating
from qatkit.graph.quantizers import clip_weights, fake_quantizers, inference_weight, quantized_weights
from qatkit.graph.scales.align import align
from qatkit.quant.learned.lsq import LSQWeightFakeQuantize
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

STEPS = 6


def fit(module: QATModule, steps: int, folder: Path, resume: Path | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=None if resume is None else str(resume))
    return trainer


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["lsq", pytest.param("lsq_plus", marks=SLOW), pytest.param("pact", marks=SLOW)]
)
def test_scales_are_learned_and_what_ships_is_what_was_trained(kind: str, tmp_path: Path) -> None:
    module = module_of(kind)
    calibrated = {name: float(q.scale) for name, q in fake_quantizers(module.graph).items()}
    fit(module, STEPS, tmp_path)
    module.eval()
    module.ready_to_convert()
    moved = {name for name, q in fake_quantizers(module.graph).items() if float(q.scale) != calibrated[name]}
    assert len(moved) >= 3
    images = noise(64, 3, 12, 12, seed=9)
    simulated, converted = run_torch(module, images), module.convert().graph
    export_onnx(converted, images[:2], tmp_path / "model.onnx")
    expected = run_torch(converted, images)
    tolerance = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(simulated, expected, rtol=0, atol=tolerance)
    for optimize in (False, True):
        got = run_ort(tmp_path / "model.onnx", images, optimize=optimize)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_the_scale_of_the_images_stays_as_calibrated(tmp_path: Path) -> None:
    """The scale does not follow the training images, and the first operator's input needs no gradient."""
    module = module_of("lsq", freeze_observers=1.0)
    images, *others = fake_quantizers(module.graph).values()
    before = float(images.scale)
    fit(module, STEPS, tmp_path)
    assert float(images.scale) == before
    assert not images.learns and not images(noise(2, 3, 12, 12) * 4).requires_grad
    assert sum(quantizer.learns for quantizer in others) >= 4


def test_scales_are_aligned_at_every_step(tmp_path: Path) -> None:
    """The scales that each training step uses are those that `align` would set."""
    module, seen = module_of("lsq"), []

    class Watch(lightning.Callback):
        def on_after_backward(self, *_: Any) -> None:
            quantizers = fake_quantizers(module.graph)
            used = {name: float(q.scale) for name, q in quantizers.items()}
            align(module.graph)
            seen.append({name: (used[name], float(q.scale)) for name, q in quantizers.items()})

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit(module, data())
    assert len(seen) == STEPS
    assert all(used == aligned for step in seen for used, aligned in step.values())
    assert len({tuple(step.values()) for step in seen}) == STEPS


def test_scales_are_aligned_on_the_device_they_have_moved_to() -> None:
    module = module_of("lsq")
    module.begin()
    module.to("meta")  # a device whose tensors cannot be combined with others
    module.set_phase(0.0)
    assert {q.scale.device.type for q in fake_quantizers(module.graph).values()} == {"meta"}


@pytest.mark.parametrize(
    ("kind", "oscillation", "enable"),
    [
        ("lsq_plus", "freeze", 0.0),
        ("lsq_plus", "ignore", 0.6),  # interrupted before quantization begins
        pytest.param("lsq", "ignore", 0.0, marks=SLOW),
        pytest.param("pact", "dampen", 0.0, marks=SLOW),
    ],
)
def test_a_resumed_training_ends_bit_for_bit_the_same(
    kind: str, oscillation: str, enable: float, tmp_path: Path
) -> None:
    settings = {"oscillation": oscillation, "freeze_above": 0.005, "decay": "constant", "warmup": 0.0,
                "enable_fake_quant": enable, "freeze_observers": max(enable, 0.5)}  # fmt: skip
    whole = module_of(kind, **settings)
    fit(whole, STEPS, tmp_path)
    path = tmp_path / "half.ckpt"
    half = module_of(kind, **settings)

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            if trainer.global_step == STEPS // 2:
                trainer.save_checkpoint(path)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[Save()],
    )  # fmt: skip
    trainer.fit(half, data())
    torch.manual_seed(0)
    model = settle(Residual(), 3, 12, 12)
    resumed = QATModule(
        model, noise(2, 3, 12, 12), half.schedule, quantizers=KINDS[kind], overrides=INT4
    )  # not calibrated: the checkpoint has everything
    fit(resumed, STEPS, tmp_path, path)
    expected, got = whole.state_dict(), resumed.state_dict()
    assert expected.keys() == got.keys() and any(name.endswith(".step") for name in expected)
    different = [name for name in expected if not torch.equal(expected[name], got[name])]
    assert not different


def test_weight_decay_skips_learned_scales_but_not_clip_values() -> None:
    for kind, decay in (("lsq", 0.0), ("pact", 0.3)):
        module = module_of(kind, weight_decay=0.3, scale_lr=0.05)
        module.begin()
        learned = {
            id(p) for name, p in module.graph.named_parameters() if name.endswith((".step", ".offset"))
        }
        assert learned
        groups = make_optimizer(module.graph, module.schedule, 0.1).param_groups
        of_scales = [g for g in groups if {id(p) for p in g["params"]} & learned]
        assert [g["weight_decay"] for g in of_scales] == [decay]
        assert {id(p) for g in of_scales for p in g["params"]} == learned
        assert [g["lr"] for g in of_scales] == [0.05]


def test_calls_that_share_a_weight_share_its_learned_scale() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.relu(self.conv(torch.relu(self.conv(x)))).mean((2, 3))
            return result

    module = QATModule(Twice().eval(), noise(2, 3, 8, 8), quantizers=LSQ)
    module.calibrate([noise(8, 3, 8, 8)])
    module.begin()
    steps = [
        fake.step for _, _, fake in quantized_weights(module.graph) if isinstance(fake, LSQWeightFakeQuantize)
    ]
    assert len(steps) == 2 and steps[0] is steps[1]


def test_calls_with_separate_norms_learn_separate_scales() -> None:
    """Each norm multiplies the shared weight by its own γ/σ; training starts from the calibrated model."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2))
            self.second.weight = self.first.weight
            self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.norms[0](self.first(x)))
            result: Tensor = self.norms[1](self.second(x)).mean((2, 3))
            return result

    module = QATModule(settle(Tied(), 3, 8, 8), noise(2, 3, 8, 8), quantizers=LSQ, overrides=INT4)
    module.calibrate([noise(8, 3, 8, 8)])
    module.eval()
    images = noise(8, 3, 8, 8, seed=1)
    module.ready_to_convert()
    calibrated = run_torch(module, images)
    module.begin()
    module.ready_to_convert()
    np.testing.assert_allclose(run_torch(module, images), calibrated, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_learned_scales_start_from_those_when_quantizing_begins(kind: str) -> None:
    """After float steps that changed weights and ranges, learning starts from scales that followed them."""
    images, labels = 3 * noise(24, 3, 12, 12, seed=5) + 1, torch.arange(24) % 4
    plain, module = (module_of(one, enable_fake_quant=0.5, freeze_observers=0.9) for one in ("plain", kind))
    begun: dict[str, Tensor] = {}
    for one in (plain, module):
        one.begin()
        one.train()
        begun = {n: q.scale.clone() for n, q in fake_quantizers(one.graph).items()}
        optimizer = make_optimizer(one.graph, one.schedule, 0.05)
        for step in range(4):
            one.set_phase(step / 10)
            optimizer.zero_grad()
            F.cross_entropy(one(images), labels).backward()
            optimizer.step()
        one.set_phase(0.4)
        one.set_phase(0.5)
    expected = fake_quantizers(plain.graph)
    learned = {n: q for n, q in fake_quantizers(module.graph).items() if q.learns}
    moved = list[float]()
    for name, quantizer in learned.items():
        wanted = quantizer.get_parameter("step") / getattr(quantizer, "unit", 1.0)
        torch.testing.assert_close(wanted.detach(), expected[name].scale, rtol=1e-5, atol=0)
        assert int(quantizer.zero_point) == int(expected[name].zero_point)
        moved.append(abs(float(wanted) / float(begun[name]) - 1))
    assert max(moved) > 0.05
    weights = {path: fake for path, _, fake in quantized_weights(module.graph)}
    for path, operator, fake in quantized_weights(plain.graph):
        if weights[path].learns:
            scale = fake.wanted_scale(inference_weight(operator, fake))
            torch.testing.assert_close(
                weights[path].get_parameter("step").detach(), scale.detach(), rtol=1e-5, atol=0
            )
    kept = weights["fc"].get_parameter("step").clone() if weights["fc"].learns else None
    with torch.no_grad():
        module.graph.get_submodule("fc").get_parameter("weight").mul_(2)
    module.set_phase(0.6)  # from now on, only the optimizer changes them
    if weights["fc"].learns:
        torch.testing.assert_close(weights["fc"].get_parameter("step"), kept)


class Text(nn.Module):
    """A text model from token ids [N, 7] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, 4)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.rnn(self.table(words))[0].mean(1))
        return logits


def test_recurrent_and_embedding_weight_scales_learn_and_count() -> None:
    torch.manual_seed(0)
    words, labels = torch.randint(0, 50, (64, 7)), torch.arange(64) % 4
    schedule = ScheduleConfig(lr=0.05, optimizer="sgd", oscillation="count")
    module = QATModule(Text().eval(), words[:2], schedule, quantizers=LSQ, overrides=INT4)
    module.calibrate([words])
    clip_weights(module.graph)
    follow_oscillation(module.graph)
    module.begin()
    weights = {path: fake for path, _, fake in quantized_weights(module.graph)}
    suffixes = [f"{part}_l0{way}" for way in ("", "_reverse") for part in ("weight_ih", "weight_hh")]
    assert sorted(weights) == sorted(["table", "fc", *(f"rnn.{name}" for name in suffixes)])
    assert all(bool((fake.clip < 1).any()) for fake in weights.values())
    before = {path: fake.get_parameter("step").detach().clone() for path, fake in weights.items()}
    module.train()
    optimizer = make_optimizer(module.graph, schedule, schedule.lr)
    for step in range(6):
        module.set_phase(step / 6)
        module.follow_oscillation(step / 6)
        optimizer.zero_grad()
        F.cross_entropy(module(words), labels).backward()
        optimizer.step()
    still = [path for path, fake in weights.items() if torch.equal(fake.get_parameter("step"), before[path])]
    assert not still
    assert [one.path for one in oscillating(module.graph)] == [*weights]
    module.eval()
    module.ready_to_convert()
    simulated, expected = run_torch(module, words), run_torch(module.convert().graph, words)
    np.testing.assert_allclose(simulated, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
