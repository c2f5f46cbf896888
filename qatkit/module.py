"""The LightningModule: a float model on its way to INT8, in hooks that each can be used alone.

    module = QATModule(model, example)       fuse → stub → prepare_qat
    module.adjust(batches)                   the algorithms that look at activations first, if there are any
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

from qatkit.algorithms import Algorithm, dead_channels
from qatkit.algorithms.base import CALIBRATED, FUSED, OBSERVED, PREPARED
from qatkit.backends import FBGEMM, Backend
from qatkit.calibration import calibrate
from qatkit.classifier import Batch, Classifier
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.distillation import Feature, feature_loss, find_features, soft_loss, tapped, watched
from qatkit.graph.align_scales import Alignment, align
from qatkit.graph.batch_norm import reestimate
from qatkit.graph.convert import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.learning import begin, dampening, follow_oscillation, learners, update_oscillation
from qatkit.graph.nodes import Outputs
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import freeze_batch_norm, set_phase
from qatkit.graph.prepare import BY_OVERRIDE, prepare_qat, ready_to_place
from qatkit.graph.proof import prove
from qatkit.graph.signature import (
    Example,
    flatten,
    graph_axes,
    graph_inputs,
    in_float32,
    like,
    on,
    output_leaves,
    resized,
    unflatten,
)
from qatkit.graph.single_precision import in_single_precision
from qatkit.graph.stub import stub
from qatkit.graph.weight_only import WEIGHT_ONLY
from qatkit.learned.oscillation import FIRST_THRESHOLD, annealed
from qatkit.weight_fake_quantize import Quantizers
from qatkit_verify.errors import ConfigError

NOTHING, IDLE = "finds nothing to change", "idle"


class QATModule(Classifier):
    """A prepared model.

    Args:
        model: the float model; left untouched. One in another type than float32 is quantized from a float32 copy,
            and so are its inputs.
        example: what the model is called with, of the real shapes: images [N, C, H, W], a tuple of positional or a
            mapping of keyword arguments, with tensors anywhere in them (`qatkit.graph.signature`).
        schedule: fine-tuning; BatchNorm mode and milestones.
        backend: what is quantized and how.
        overrides: by pattern (`qatkit.graph.overrides`).
        quantizers: make the quantizers of activations and weights, and the observers.
        algorithms: corrections without labels, each at its stage, in this order.
        quantize: False makes the control: the same graph and schedule in float.

    Attributes:
        graph: the prepared GraphModule, called with the example's tensors one after the other.
        example: a batch of one, in the same form; of a model that takes one size of batch alone, that size.
        skipped: (site, reason) of what was left float, over all hooks.
        notes: (site, reason) of what the corrections left as it was, and of dead channels.

    Raises:
        ConfigError: a model that can't be traced or quantized, or an override that matches nothing.
    """

    graph: fx.GraphModule

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        schedule: ScheduleConfig | None = None,
        backend: Backend = FBGEMM,
        overrides: Mapping[str, OverrideConfig] | None = None,
        quantizers: Quantizers = Quantizers(),  # noqa: B008  frozen, without state
        *,
        algorithms: Sequence[Algorithm] = (),
        quantize: bool = True,
    ) -> None:
        schedule = schedule or ScheduleConfig()
        model, given = in_single_precision(model)
        example = in_float32(example)
        super().__init__(schedule, schedule.lr)
        self.backend, self.overrides, self.quantize = backend, overrides or {}, quantize
        self.quantizers, self.algorithms = quantizers, tuple(algorithms)
        self.example = example
        # In tuples: no submodules, so not part of checkpoints.
        self.teacher: tuple[nn.Module, ...] = ()
        self._tapped: tuple[fx.GraphModule, ...] = ()
        self.features: list[Feature] = []
        fused = self.fuse(model)
        self.example = _of_one(fused.graph, example)
        stubbed = self.stub(fused.graph)
        prove(model, stubbed.graph, example)
        changed = self.run_algorithms(self.of_stage(FUSED), stubbed.graph, self.example)
        prepared = self.prepare_qat(changed.graph)
        corrected = self.run_algorithms(self.of_stage(PREPARED), prepared.graph, self.example)
        self.skipped = fused.skipped + stubbed.skipped + prepared.skipped
        self.notes = dead_channels(corrected.graph) + changed.skipped + corrected.skipped
        self.notes += corrected.graph.meta.get("notes", [])
        self.notes += [("model", f"is {_plainly(dtype)}: it is quantized from float32") for dtype in given]
        self.notes += [note for one in self.algorithms for note in one.notes(corrected.graph)]
        self.graph = corrected.graph.train()
        if quantize and schedule.oscillation != "ignore":
            follow_oscillation(self.graph)
        self._observing = True
        self._counted = -1  # the step whose integers were counted last
        self._alignment: Alignment | None = None  # of learned scales, once fine-tuning has begun
        if self._distills and not (schedule.distill_teacher or schedule.distill_checkpoint):
            self.learn_from(model)

    def opened(self, model: nn.Module) -> fx.GraphModule:
        """The graph that `prepare_qat` was given, made of the float model anew: what placement can be asked of."""
        fused = self.fuse(in_single_precision(model)[0])
        graph: fx.GraphModule = self.run_algorithms(
            self.of_stage(FUSED), self.stub(fused.graph).graph, self.example
        ).graph
        ready_to_place(graph, self.example)
        return graph

    def fuse(self, model: nn.Module) -> PassResult:
        """Hook: BatchNorms into their operators (a traced copy of `model`)."""
        return fuse(model, self.schedule.batch_norm, self.example, depthwise=True)

    def stub(self, model: nn.Module) -> PassResult:
        """Hook: opens attention and gated activations."""
        in_int8 = [pattern for pattern, override in self.overrides.items() if override.int8]
        return stub(model, self.example, in_int8)

    def run_algorithms(self, algorithms: Iterable[Algorithm], graph: Any, inputs: Any) -> PassResult:
        """Hook: `algorithms`, all of one stage, one after the other, on a graph of that stage."""
        result = PassResult(graph)
        for algorithm in algorithms:
            done = algorithm(result.graph, inputs)
            if not isinstance(done, PassResult):
                raise ConfigError("algorithm", type(algorithm).__name__, "a call that returns a PassResult")
            idle = [] if done.changed else [(type(algorithm).__name__, NOTHING)]
            result = PassResult(
                done.graph, result.changed + done.changed, result.skipped + done.skipped + idle
            )
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

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The graph's outputs, flat: a tensor, or a tuple in the order of `graph.meta["outputs"]`.

        Args:
            inputs, named: what the model is called with, or one batch of the example's form, or the graph's tensors.

        Raises:
            ConfigError: another form than the example's.
        """
        return self.graph(*self.tensors(*inputs, **named))

    def tensors(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        """The graph's inputs of a call, or of a batch of the example's form; what is floating in float32."""
        if named and inputs:
            raise ConfigError(
                "batch", ", ".join(named), "positional or keyword arguments, or one mapping of all"
            )
        batch = named or (inputs[0] if len(inputs) == 1 else inputs)
        try:
            return flatten(in_float32(like(self.example, batch, graph_inputs(self.graph))))
        except ConfigError:
            if len(inputs) != 1 or isinstance(self.example, Tensor):
                raise
            # one argument that holds several tensors
            return flatten(in_float32(like(self.example, inputs, graph_inputs(self.graph))))

    @property
    def left_float(self) -> list[str]:
        """Sites that are float in the file with good reason: an override says so, or nobody has an int8 kernel.

        What else was skipped is for the audit to find.
        """
        return [where for where, reason in self.skipped if reason.startswith((BY_OVERRIDE, WEIGHT_ONLY))]

    def adjust(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Hook: before `calibrate`, the algorithms of the stage "observed" (or those given), each on `batches`."""
        self._with_images(self.of_stage(OBSERVED) if algorithms is None else list(algorithms), batches)

    def calibrate(self, batches: Iterable[Any]) -> int:
        """Finds the ranges from `batches` of the example's form; returns how many images there were."""
        return calibrate(self.graph, map(self.tensors, batches))

    def correct(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Hook: after `calibrate`, the algorithms of that stage (or those given), each on `batches`."""
        self._with_images(self.of_stage(CALIBRATED) if algorithms is None else list(algorithms), batches)

    def _with_images(self, chosen: list[Algorithm], batches: Iterable[Any]) -> None:
        given = batches if isinstance(self.example, Tensor) else map(self.tensors, batches)
        seen = given if len(chosen) < 2 else list(given)  # a generator serves one of them
        done = self.run_algorithms(chosen, self.graph, seen)
        idle = [name for name, reason in done.skipped if reason == NOTHING]
        self.about[IDLE] = [
            *self.about.get(IDLE, ()),
            *idle,
        ]  # in the checkpoint: a resumed run calls none of them

    def heads(self, outputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The first output; the others are no logits, but for those of auxiliary heads."""
        main, others = super().heads(outputs)
        return main, others if any(isinstance(m, Outputs) for m in self.graph.children()) else ()

    def loss(self, images: Example, labels: Tensor) -> Tensor:
        """Cross entropy, with the teacher's soft targets and features mixed in if the schedule asks for them.

        (1 - distill)·cross entropy + distill·T²·KL + distill_feature_weight·(mean over features of their relative
        squared error). Source of the mix: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        schedule = self.schedule
        if not self.teacher:
            if self._distills:
                allowed = "a model that was given to QATModule.learn_from"
                raise ConfigError("schedule.distill_teacher", schedule.distill_teacher, allowed)
            return super().loss(images, labels)
        outputs, ours = self._with_features(images)
        logits, _ = self.heads(outputs)
        teacher = self.teacher[0].to(logits.device)
        answer, theirs = watched(teacher, in_float32(images), [f.theirs for f in self.features])
        loss = logits.new_zeros(())
        if schedule.distill < 1:  # there may be no labels then
            loss = (1 - schedule.distill) * self.hard_loss(logits, labels)
        if schedule.distill > 0:
            target, t = output_leaves(answer)[1][0], schedule.distill_temperature
            loss = loss + schedule.distill * soft_loss(logits, target, t)
        if self.features:
            errors = [feature_loss(one, other) for one, other in zip(ours, theirs, strict=True)]
            loss = loss + schedule.distill_feature_weight * torch.stack(errors).mean()
        return loss

    @property
    def _distills(self) -> bool:
        return self.schedule.distill > 0 or bool(self.schedule.distill_features)

    def _with_features(self, images: Example) -> tuple[Any, Sequence[Tensor]]:
        """The graph's outputs, and the values of `features`."""
        if not self.features:
            return self(images), ()
        if not self._tapped:  # only now: modules and parameters are those of the device that trains
            self._tapped = (tapped(self.graph, [f.node for f in self.features]),)
        found: tuple[Any, Sequence[Tensor]] = self._tapped[0](*self.tensors(images))
        return found

    def learn_from(self, model: nn.Module, teacher: nn.Module | None = None) -> None:
        """Says who teaches, and finds `schedule.distill_features` in both.

        Args:
            model: the float model of this module.
            teacher: None: the model itself.

        Raises:
            ConfigError: a feature that one of them does not have, or of another shape.
        """
        pairs = self.schedule.distill_features
        model = in_single_precision(model)[0].cpu().eval()
        other = model if teacher is None else in_single_precision(teacher)[0].cpu().eval()
        self.teacher, self._tapped = (other,), ()
        if pairs and self.of_stage(OBSERVED):
            allowed = "[] with an algorithm that divides the channels which would be compared (smooth_quant)"
            raise ConfigError("schedule.distill_features", ", ".join(pairs), allowed)
        if pairs:
            tensors = self.tensors(self.example)
            self.features = find_features(self.graph, tensors, model, other, pairs, self.example)

    def setup(self, stage: str) -> None:
        """Before a checkpoint is loaded and the optimizer is made: quantizers that learn begin."""
        if self.quantize and stage == "fit":
            self.begin()

    def begin(self) -> None:
        """Hook: what quantizers learn starts from calibration."""
        begin(self.graph)
        self.on_train_start()

    def on_train_start(self) -> None:
        self._alignment = Alignment(self.graph) if self.quantize and learners(self.graph) else None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_phase(self._progress)
        kind, step = self.schedule.oscillation, self.trainer.global_step
        if self.quantize and kind != "ignore" and step != self._counted:
            self._counted = step
            last = self.schedule.freeze_above
            threshold = annealed(max(FIRST_THRESHOLD, last), last, self._progress)
            update_oscillation(self.graph, threshold if kind == "freeze" else None)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.quantize and self.schedule.oscillation == "dampen":
            loss = loss + annealed(0.0, self.schedule.dampening, self._progress) * dampening(self.graph)
        return loss

    @property
    def _progress(self) -> float:
        """Share of all optimizer steps that are done."""
        return self.trainer.global_step / max(1, int(self.trainer.estimated_stepping_batches))

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
        if self._alignment is not None:  # scales that the last step has moved, into place for the next one
            self._alignment()
        if schedule.batch_norm == "train" and progress >= schedule.freeze_batch_norm:
            freeze_batch_norm(self.graph)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.ready_to_convert()

    def reestimate(self, batches: Iterable[Any]) -> int:
        """Gives the BatchNorms that were kept the statistics of `batches`, as they are with quantization on.

        Returns how many there are.
        """
        self.ready_to_convert()
        device = next(self.graph.parameters()).device
        tensors = (on(device, self.tensors(batch)) for batch in batches)
        return reestimate(self.graph, tensors, quantize=self.quantize)

    def ready_to_convert(self) -> None:
        """Ranges fixed and fake quantization on: what `convert` will make, in simulation."""
        set_phase(self.graph, observe=False, quantize=self.quantize)
        align(self.graph)


def _plainly(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_one(graph: fx.GraphModule, example: Example) -> Example:
    """A copy of `example` with one row along the batch axes of the graph's inputs."""
    tensors = flatten(example)
    return unflatten(example, [t.clone() for t in resized(tensors, 1, graph_axes(graph, tensors))])
