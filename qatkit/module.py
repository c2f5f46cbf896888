"""The LightningModule: a float model on its way to INT8, in hooks that each can be used alone.

    module = QATModule(model, example)       fuse → stub → prepare_qat
    module.calibrate(batches)                ranges from real data
    module.correct(batches)                  the algorithms that come after calibration, if there are any
    trainer.fit(module, loader)              fine-tuning with fake quantization
    converted = module.convert().graph       int8 weights, explicit quantize and dequantize

A subclass may override any hook; `pipeline.train(config, module_type=...)` runs the whole chain with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms import Algorithm, dead_channels
from qatkit.algorithms.base import CALIBRATED, FUSED, PREPARED
from qatkit.backends import FBGEMM, Backend
from qatkit.calibration import calibrate
from qatkit.classifier import Batch, Classifier
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.align_scales import align
from qatkit.graph.convert import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import freeze_batch_norm, set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.weight_fake_quantize import Quantizers


class QATModule(Classifier):
    """A prepared model.

    Args:
        model: the float model; left untouched.
        example: one input of the real shape, [N, C, H, W].
        schedule: fine-tuning; BatchNorm mode and milestones.
        backend: what is quantized and how.
        overrides: by pattern (`qatkit.graph.overrides`).
        quantizers: make the quantizers of activations and weights, and the observers.
        algorithms: corrections without labels, each at its stage, in this order.
        quantize: False makes the control: the same graph and schedule in float.

    Attributes:
        graph: the prepared GraphModule.
        skipped: (site, reason) of what was left float, over all hooks.
        notes: (site, reason) of what the corrections left as it was, and of dead channels.

    Raises:
        ConfigError: a model that can't be traced or quantized, or an override that matches nothing.
    """

    graph: fx.GraphModule

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        schedule: ScheduleConfig | None = None,
        backend: Backend = FBGEMM,
        overrides: Mapping[str, OverrideConfig] | None = None,
        quantizers: Quantizers = Quantizers(),  # noqa: B008  frozen, without state
        *,
        algorithms: Sequence[Algorithm] = (),
        quantize: bool = True,
    ) -> None:
        schedule = schedule or ScheduleConfig()
        super().__init__(schedule, schedule.lr)
        self.backend, self.overrides, self.quantize = backend, overrides or {}, quantize
        self.quantizers, self.algorithms = quantizers, tuple(algorithms)
        self.example = example[:1].clone()
        self.teacher: tuple[nn.Module, ...] = ()  # in a tuple: no submodule, so not part of checkpoints
        if schedule.distill > 0:
            self.teacher = (model.eval(),)
        fused = self.fuse(model)
        stubbed = self.stub(fused.graph)
        changed = self.run_algorithms(self.of_stage(FUSED), stubbed.graph, self.example)
        prepared = self.prepare_qat(changed.graph)
        corrected = self.run_algorithms(self.of_stage(PREPARED), prepared.graph, self.example)
        self.skipped = fused.skipped + stubbed.skipped + prepared.skipped
        self.notes = dead_channels(corrected.graph) + changed.skipped + corrected.skipped
        self.notes += [note for one in self.algorithms for note in one.notes(corrected.graph)]
        self.graph = corrected.graph.train()
        self._observing = True

    def fuse(self, model: nn.Module) -> PassResult:
        """Hook: BatchNorms into their operators (a traced copy of `model`)."""
        return fuse(model, self.schedule.batch_norm, self.example, depthwise=True)

    def stub(self, model: nn.Module) -> PassResult:
        """Hook: opens attention and gated activations."""
        return stub(model, self.example)

    def run_algorithms(self, algorithms: Iterable[Algorithm], graph: Any, inputs: Any) -> PassResult:
        """Hook: `algorithms`, all of one stage, one after the other, on a graph of that stage."""
        result = PassResult(graph)
        for algorithm in algorithms:
            done = algorithm(result.graph, inputs)
            result = PassResult(done.graph, result.changed + done.changed, result.skipped + done.skipped)
        return result

    def of_stage(self, stage: str) -> list[Algorithm]:
        """The module's algorithms of a stage (`qatkit.algorithms.base`), in their order."""
        return [algorithm for algorithm in self.algorithms if algorithm.stage == stage]

    def prepare_qat(self, graph: Any) -> PassResult:
        """Hook: FakeQuantize on edges and weights."""
        return prepare_qat(graph, self.backend, self.example, self.overrides, self.quantizers)

    def convert(self) -> PassResult:
        """Hook: the converted copy, on the CPU."""
        return convert(self.graph)

    def calibrate(self, batches: Iterable[Tensor]) -> int:
        """Finds the ranges from `batches` of images; returns how many images there were."""
        return calibrate(self.graph, batches)

    def correct(self, batches: Iterable[Tensor], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Hook: after `calibrate`, the algorithms of that stage (or those given), each on `batches` of images."""
        chosen = self.of_stage(CALIBRATED) if algorithms is None else list(algorithms)
        seen = batches if len(chosen) < 2 else list(batches)  # a generator serves one of them
        self.run_algorithms(chosen, self.graph, seen)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, with the float model's soft targets mixed in if the schedule asks for it.

        Source of the mix: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        if not self.teacher:
            return super().loss(images, labels)
        outputs, share, t = self(images), self.schedule.distill, self.schedule.distill_temperature
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        hard = self.hard_loss(logits, labels) if share < 1 else 0.0  # there may be no labels then
        with torch.no_grad():
            target = self.teacher[0].to(images.device)(images)
        soft = F.kl_div(
            (logits / t).log_softmax(1), (target / t).log_softmax(1), log_target=True, reduction="batchmean"
        )
        return (1 - share) * hard + share * t * t * soft

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_phase(self.trainer.global_step / max(1, int(self.trainer.estimated_stepping_batches)))

    def set_phase(self, progress: float) -> None:
        """What is observed, quantized and frozen after the share `progress` of all steps: a function of the
        step alone, so that a resumed run is in the phase it was stopped in.
        """
        schedule = self.schedule
        observe = self.quantize and progress < schedule.freeze_observers
        set_phase(
            self.graph,
            observe=observe,
            quantize=self.quantize and progress >= schedule.enable_fake_quant,
        )
        if self._observing and not observe:
            align(self.graph)
        self._observing = observe
        if schedule.batch_norm == "train" and progress >= schedule.freeze_batch_norm:
            freeze_batch_norm(self.graph)

    def on_validation_start(self) -> None:
        self.ready_to_convert()

    def ready_to_convert(self) -> None:
        """Ranges fixed and fake quantization on: what `convert` will make, in simulation."""
        set_phase(self.graph, observe=False, quantize=self.quantize)
        align(self.graph)
