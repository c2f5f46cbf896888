"""The LightningModule: a float model on its way to INT8, in hooks that each can be used alone.

    module = QATModule(model, example)       fuse → stub → (equalize) → prepare_qat
    module.calibrate(batches)                ranges from real data
    module.correct_biases(batches)           if `algorithm` asks for it
    trainer.fit(module, loader)              fine-tuning with fake quantization
    converted = module.convert().graph       int8 weights, explicit quantize and dequantize

A subclass may override any hook; `pipeline.train(config, module_type=...)` runs the whole chain with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from qatkit.algorithms import BiasCorrection, Equalize, dead_channels
from qatkit.algorithms.bias_correction import targets
from qatkit.backends import FBGEMM, Backend
from qatkit.calibration import calibrate
from qatkit.config import AlgorithmConfig, OverrideConfig, ScheduleConfig
from qatkit.graph import prepare
from qatkit.graph.align import align
from qatkit.graph.convert import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.result import PassResult
from qatkit.graph.stub import stub
from qatkit.observers import MovingAverageMinMaxObserver, Observer

Batch = tuple[Tensor, Tensor]
AUXILIARY_WEIGHT = 0.3


class Classifier(lightning.LightningModule):
    """Trains `self.graph` on (images [N, C, H, W], labels [N]) batches by a `ScheduleConfig`.

    The state of torch's random generator travels in checkpoints, so that a run resumed in mid-epoch drops
    the same activations as one that was never stopped.
    """

    graph: nn.Module

    def __init__(self, schedule: ScheduleConfig, lr: float) -> None:
        super().__init__()
        self.schedule, self.lr = schedule, lr
        self.about: dict[str, Any] = {}  # written into checkpoints: what export needs beside the weights
        self._rng: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits [N, classes]; in training with those of auxiliary heads after them."""
        result: Tensor | tuple[Tensor, ...] = self.graph(x)
        return result

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, with that of each auxiliary head at a weight of 0.3.

        Source of the weight: Szegedy et al., "Going deeper with convolutions", 2015, section 5.
        """
        outputs = self(images)
        main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = self.hard_loss(main, labels)
        for logits in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * self.hard_loss(logits, labels)
        return loss

    def hard_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=self.schedule.label_smoothing)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        images, labels = batch
        self.log(
            "top1", (self(images).argmax(1) == labels).float().mean() * 100, prog_bar=True, sync_dist=True
        )

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.graph, self.schedule, self.lr)
        total = int(self.trainer.estimated_stepping_batches)
        factor = LambdaLR(optimizer, lambda step: rate_factor(step, total, self.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": factor, "interval": "step"}}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self._rng is not None:  # only now: whatever drew numbers while loading is undone
            torch.set_rng_state(self._rng)
            self._rng = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng_state"], checkpoint["qatkit"] = torch.get_rng_state(), self.about

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng = checkpoint.get("rng_state")


class FloatModule(Classifier):
    """Plain float training of a model as it is."""

    def __init__(self, model: nn.Module, schedule: ScheduleConfig) -> None:
        super().__init__(schedule, schedule.float_lr)
        self.graph = model.train()


class QATModule(Classifier):
    """A prepared model.

    Args:
        model: the float model; left untouched.
        example: one input of the real shape, [N, C, H, W].
        schedule: fine-tuning; BatchNorm mode and milestones.
        backend: what is quantized and how.
        overrides: by pattern (`qatkit.graph.overrides`).
        observer: makes the observer of each activation.
        algorithm: corrections without labels: equalization here, those of biases in `correct_biases`.
        quantize: False makes the control: the same graph and schedule in float.

    Attributes:
        graph: the prepared GraphModule.
        skipped: (site, reason) of what was left float, over all hooks.
        notes: (site, reason) of what the corrections left as it was, and of dead channels.

    Raises:
        ConfigError: a model that can't be traced or quantized, or an override that matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        schedule: ScheduleConfig | None = None,
        backend: Backend = FBGEMM,
        overrides: Mapping[str, OverrideConfig] | None = None,
        observer: Callable[[], Observer] = MovingAverageMinMaxObserver,
        *,
        algorithm: AlgorithmConfig | None = None,
        quantize: bool = True,
    ) -> None:
        schedule = schedule or ScheduleConfig()
        super().__init__(schedule, schedule.lr)
        self.backend, self.overrides, self.observer, self.quantize = (
            backend,
            overrides or {},
            observer,
            quantize,
        )
        self.algorithm = algorithm or AlgorithmConfig()
        self.example = example[:1].clone()
        self.teacher: tuple[nn.Module, ...] = ()  # in a tuple: no submodule, so not part of checkpoints
        if schedule.distill > 0:
            self.teacher = (model.eval(),)
        fused = self.fuse(model)
        stubbed = self.stub(fused.graph)
        equalized = self.equalize(stubbed.graph)
        prepared = self.prepare_qat(equalized.graph)
        self.skipped = fused.skipped + stubbed.skipped + prepared.skipped
        self.notes = dead_channels(prepared.graph) + equalized.skipped
        if self.algorithm.bias_correction != "none":
            self.notes += targets(prepared.graph)[1]
        self.graph = prepared.graph.train()
        self._observing = True

    def fuse(self, model: nn.Module) -> PassResult:
        """Hook: BatchNorms into their operators (a traced copy of `model`)."""
        return fuse(model, self.schedule.batch_norm, self.example, depthwise=True)

    def stub(self, model: nn.Module) -> PassResult:
        """Hook: opens attention and gated activations."""
        return stub(model, self.example)

    def equalize(self, graph: Any) -> PassResult:
        """Hook: ranges of channels evened out between operators, if the configuration asks for it."""
        if not self.algorithm.equalize:
            return PassResult(graph)
        return Equalize(self.algorithm.relu6)(graph, self.example)

    def prepare_qat(self, graph: Any) -> PassResult:
        """Hook: FakeQuantize on edges and weights."""
        return prepare.prepare_qat(graph, self.backend, self.example, self.overrides, self.observer)

    def convert(self) -> PassResult:
        """Hook: the converted copy, on the CPU."""
        return convert(self.graph)  # type: ignore[arg-type]

    def calibrate(self, batches: Iterable[Tensor]) -> int:
        """Finds the ranges from `batches` of images; returns how many images there were."""
        return calibrate(self.graph, batches)  # type: ignore[arg-type]

    def correct_biases(self, batches: Iterable[Tensor]) -> None:
        """After `calibrate`: takes mean errors on `batches` of images out of biases, if asked for."""
        if self.algorithm.bias_correction != "none":
            correction = BiasCorrection(self.algorithm.bias_correction, self.algorithm.bias_images)
            correction(self.graph, batches)  # type: ignore[arg-type]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, with the float model's soft targets mixed in if the schedule asks for it.

        Source of the mix: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        if not self.teacher:
            return super().loss(images, labels)
        outputs, share, t = self(images), self.schedule.distill, self.schedule.distill_temperature
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        with torch.no_grad():
            target = self.teacher[0].to(images.device)(images)
        soft = F.kl_div(
            (logits / t).log_softmax(1), (target / t).log_softmax(1), log_target=True, reduction="batchmean"
        )
        return (1 - share) * self.hard_loss(logits, labels) + share * t * t * soft

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_phase(self.trainer.global_step / max(1, int(self.trainer.estimated_stepping_batches)))

    def set_phase(self, progress: float) -> None:
        """What is observed, quantized and frozen after the share `progress` of all steps: a function of the
        step alone, so that a resumed run is in the phase it was stopped in.
        """
        schedule = self.schedule
        observe = self.quantize and progress < schedule.freeze_observers
        prepare.set_phase(
            self.graph,  # type: ignore[arg-type]
            observe=observe,
            quantize=self.quantize and progress >= schedule.enable_fake_quant,
        )
        if self._observing and not observe:
            align(self.graph)  # type: ignore[arg-type]
        self._observing = observe
        if schedule.batch_norm == "train" and progress >= schedule.freeze_batch_norm:
            prepare.freeze_batch_norm(self.graph)  # type: ignore[arg-type]

    def on_validation_start(self) -> None:
        self.ready_to_convert()

    def ready_to_convert(self) -> None:
        """Ranges fixed and fake quantization on: what `convert` will make, in simulation."""
        prepare.set_phase(self.graph, observe=False, quantize=self.quantize)  # type: ignore[arg-type]
        align(self.graph)  # type: ignore[arg-type]


def rate_factor(step: int, total: int, schedule: ScheduleConfig) -> float:
    """Learning rate at `step` of `total`, as a share of the configured one: linear warm-up, then decay to 0."""
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule.decay]


def make_optimizer(model: nn.Module, schedule: ScheduleConfig, lr: float) -> torch.optim.Optimizer:
    """SGD or AdamW; vectors (biases, norms) get no weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": schedule.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if schedule.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return torch.optim.SGD(groups, lr=lr, momentum=schedule.momentum)
