"""Tests of training step by step: the exported average, ranges under gradient accumulation, frozen modules,
outputs of any form, and the error about divergence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import pytest
import torch
from chain import noise, settle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.quantizers import fake_quantizers
from qatkit.run.loop.fit import _innermost_channels
from qatkit.train.learner import FloatModule, Learner
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

IMAGES = noise(24, 3, 12, 12) * torch.linspace(0.5, 2, 24).view(-1, 1, 1, 1)
LABELS = torch.arange(24) % 4


class Small(nn.Module):
    """A small model from [N, 3, 12, 12] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        result: Tensor = self.fc(torch.relu(self.body(x)).mean((2, 3)))
        return result


def qat(model: nn.Module | None = None, **schedule: Any) -> QATModule:
    torch.manual_seed(0)
    settled = settle(model or Small(), 3, 12, 12)
    module = QATModule(settled, noise(2, 3, 12, 12), ScheduleConfig(**{"lr": 0.05, **schedule}))
    module.calibrate([IMAGES[:8], IMAGES[8:16]])
    return module


class Keep(lightning.Callback):
    """Keeps `body.weight` after every batch."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        self.weights.append(module.graph.get_parameter("body.weight").detach().double().numpy().copy())


def train(
    module: Learner,
    steps: int,
    batch: int = 8,
    callbacks: Iterable[lightning.Callback] = (),
    **options: Any,
) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(IMAGES, LABELS), batch_size=batch))
    return trainer


@pytest.mark.parametrize("moves", [False, True], ids=["in_place", "moved"])
@pytest.mark.parametrize("kind", ["QAT", "float"])
def test_what_ships_is_the_average_of_the_weights(kind: str, moves: bool) -> None:
    """The average is exported even if the parameters have another memory format after training."""
    decay, kept = 0.6, Keep()
    module: Learner = (
        qat(ema=decay) if kind == "QAT" else FloatModule(Small(), ScheduleConfig(ema=decay, float_lr=0.05))
    )
    wanted = module.graph.get_parameter("body.weight").detach().double().numpy().copy()
    train(module, 6, callbacks=[kept])
    for step, weights in enumerate(kept.weights, 1):
        share = min(decay, (1 + step) / (10 + step))
        wanted = share * wanted + (1 - share) * weights
    if moves:
        module.to(memory_format=torch.channels_last)
    module.take_average()
    found = module.graph.get_parameter("body.weight").detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert not np.allclose(found, kept.weights[-1], atol=1e-4)


def test_a_failed_validation_restores_weights_and_average() -> None:
    class Failing(FloatModule):
        def validation_step(self, batch: Any, _: int) -> None:
            raise RuntimeError("out of memory")

    batches, kept = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=8), Keep()
    module = Failing(Small(), ScheduleConfig(ema=0.9, float_lr=0.05))
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[kept],
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(module, batches, batches)
    weight = module.graph.get_parameter("body.weight")
    np.testing.assert_array_equal(weight.detach().double().numpy(), kept.weights[-1])
    assert module.average is not None
    mean = module.average.state["body.weight"].clone()
    with contextlib.suppress(ZeroDivisionError), module.untouched():
        module.ready_to_validate()
        assert torch.equal(weight, mean) and not torch.equal(weight, module.average.state["body.weight"])
        raise ZeroDivisionError
    np.testing.assert_array_equal(weight.detach().double().numpy(), kept.weights[-1])
    assert torch.equal(module.average.state["body.weight"], mean)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gradients_are_clipped_under_any_precision(optimizer: str, precision: Any) -> None:
    def norm(module: torch.nn.Module) -> float:
        gradients = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
        return float(torch.stack(gradients).sum().sqrt())

    class Norms(lightning.Callback):
        def __init__(self) -> None:
            self.given: list[float] = []
            self.taken: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.given.append(norm(module))  # Lightning clips them after this hook

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.taken.append(norm(module))

    norms, most = Norms(), 1e-3
    train(
        qat(optimizer=optimizer, lr=1e-4), 3, callbacks=[norms], precision=precision, gradient_clip_val=most
    )
    assert min(norms.given) > 2 * most
    np.testing.assert_allclose(norms.taken, 3 * [most], rtol=1e-3)


def _moved(ends: list[float], batch: Tensor, share: float) -> list[float]:
    return [
        old + share * (new - old)
        for old, new in zip(ends, (batch.min().item(), batch.max().item()), strict=True)
    ]


def test_ranges_follow_steps_however_many_batches_make_one() -> None:
    """Computes the input's range by hand: each step moves it once, by the extremes of all its batches."""
    module = qat(freeze_observers=1.0)
    train(module, 3, batch=4, accumulate_grad_batches=2)
    ends = [0.0, 0.0]
    batches = [
        IMAGES[:8],
        IMAGES[8:16],
        IMAGES[:8],
        IMAGES[8:16],
        IMAGES[16:],
    ]  # two for calibration, three for steps
    for count, batch in enumerate(batches, 1):
        ends = _moved(ends, batch, max(1 / count, 0.01))
    observer = next(iter(fake_quantizers(module.graph).values())).observer
    assert observer is not None
    assert [observer.low.item(), observer.high.item()] == pytest.approx(ends)
    module.calibrate([IMAGES[:8], IMAGES[:8]])  # each moves the range once
    ends = _moved(_moved(ends, IMAGES[:8], 1 / 6), IMAGES[:8], 1 / 7)
    assert [observer.low.item(), observer.high.item()] == pytest.approx(ends)


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_frozen_parameters_stay(batch_norm: str) -> None:
    """Covers a stem frozen with its BatchNorm, and a frozen stem whose BatchNorm still trains."""
    model = Small()
    for part in (model.stem, model.bn):
        part.requires_grad_(False)
    module = qat(model, batch_norm=batch_norm)
    before = {name: value.clone() for name, value in module.graph.named_parameters()}
    train(module, 3)
    same = {name for name, value in module.graph.named_parameters() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith("stem.")}
    model = Small()
    model.stem.requires_grad_(False)
    module = qat(model, batch_norm=batch_norm)
    trained = {name for name, value in module.graph.named_parameters() if value.requires_grad}
    assert any(name.startswith("stem.") for name in trained)


class Pair(NamedTuple):
    """Two named outputs."""

    logits: Tensor
    features: Tensor


class Yielding(nn.Module):
    """A model that returns logits and other features, in a given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form, self.aux_logits = Small(), form, form == "auxiliary"

    def forward(self, x: Tensor) -> Any:
        logits, features = self.inner(x), x.mean((2, 3)).repeat(1, 2)
        if self.form == "auxiliary":
            return Pair(logits, -logits) if self.training else logits
        return {"tensor": logits, "mapping": {"logits": logits, "features": features},
                "tuple": (logits, features), "named": Pair(logits, features)}[self.form]  # fmt: skip


@pytest.mark.parametrize("form", ["tensor", "mapping", "tuple", "named", "auxiliary"])
def test_a_float_model_learns_by_its_logits_among_other_outputs(form: str) -> None:
    torch.manual_seed(0)
    model = Yielding(form)
    module, logits = FloatModule(model, ScheduleConfig()), model.inner(IMAGES)
    wanted = F.cross_entropy(logits, LABELS)
    if form == "auxiliary":
        wanted = wanted + 0.3 * F.cross_entropy(-logits, LABELS)
    torch.testing.assert_close(module.loss(IMAGES, LABELS), wanted)


@pytest.mark.parametrize(("kind", "key"), [("QAT", "schedule.lr"), ("float", "schedule.float_lr")])
def test_a_diverged_training_saves_nothing_and_names_its_rate(kind: str, key: str, tmp_path: Path) -> None:
    module: Learner = qat(lr=1e30) if kind == "QAT" else FloatModule(Small(), ScheduleConfig(float_lr=1e30))
    trainer = train(module, 4)
    with pytest.raises(
        ConfigError,
        match=rf"{key}=1e\+30: expected a smaller value, such as 1e\+29, .*; the training had diverged by step 4 ",
    ):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_channels_are_innermost_in_kernels_of_images_alone() -> None:
    of_images, of_clips = nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3)
    model, flat, deep = nn.ModuleList([of_images, of_clips]), of_images.weight, of_clips.weight
    before = flat.detach().clone()
    with _innermost_channels(model, True):
        assert flat.is_contiguous(memory_format=torch.channels_last) and not flat.is_contiguous()
        assert deep.is_contiguous()
    assert flat.is_contiguous() and torch.equal(flat, before)


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_a_loss_under_autocast_is_that_of_its_logits_to_float32(distill: float) -> None:
    """On the CPU, autocast computes the cross entropy of bfloat16 logits in bfloat16, with three digits."""
    module = qat(distill=distill)
    module.set_phase(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        logits, found = module(IMAGES), module.loss(IMAGES, LABELS)
        target = module.teacher[0](IMAGES) if distill else logits
    assert logits.dtype == torch.bfloat16 or distill == 0.0
    mine, theirs = ((one.double() / 2).log_softmax(1) for one in (logits, target))
    wanted = (1 - distill) * F.cross_entropy(logits.double(), LABELS)
    wanted = wanted + distill * 4 * (theirs.exp() * (theirs - mine)).sum(1).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
