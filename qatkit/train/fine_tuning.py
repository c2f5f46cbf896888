"""Fine-tuning of a prepared graph: its phases, its loss, and its scales from step to step.

    before a step   phase (observe, quantize, frozen statistics) ─ learned scales aligned ─ oscillation recorded
    the loss        targets, a teacher's outputs and features, weights pulled towards their quantized values
    at the end      ranges fixed, scales aligned, as in `convert`

`qatkit.train.module.QATModule` creates the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.batch_norm import follow, moving_variances, reestimate
from qatkit.graph.gradients import stopped
from qatkit.graph.learning import begin, begin_anew, dampening, idle, learners, resting, update_oscillation
from qatkit.graph.nodes import Outputs
from qatkit.graph.phase import freeze_batch_norm, observe_in_parts, set_phase
from qatkit.graph.scales.align import Alignment, align
from qatkit.graph.signature import Example, flatten, graph_inputs, in_float32, like, on, output_leaves
from qatkit.quant.learned.oscillation import FIRST_THRESHOLD, annealed
from qatkit.train.distillation import Feature, feature_loss, tapped, watched
from qatkit.train.learner import Batch, Learner
from qatkit.warning import warn
from qatkit_verify.errors import ConfigError


class FineTuning(Learner):
    """A Lightning module that trains a prepared graph by a `ScheduleConfig`.

    Args:
        schedule: the milestones, learning rates and terms of the loss.
        example: an input of the model (`qatkit.graph.signature`).
        quantize: whether to quantize; False trains the same graph in float.

    Attributes:
        graph: the prepared GraphModule, called with the example's tensors as positional arguments.
        teacher: the teacher model, in a tuple; empty without one.
        features: pairs of modules for feature distillation.
    """

    graph: fx.GraphModule

    def __init__(self, schedule: ScheduleConfig, example: Example, *, quantize: bool) -> None:
        super().__init__(schedule, schedule.lr)
        self.example, self.quantize = example, quantize
        # In tuples, so that they are not submodules and not part of checkpoints.
        self.teacher: tuple[nn.Module, ...] = ()
        self._tapped: tuple[fx.GraphModule, ...] = ()
        self.features: list[Feature] = []
        self._observing = True
        self._step = -1  # the last step that has begun
        self._alignment: Alignment | None = None  # that of learned scales, once fine-tuning has begun
        self._variances: dict[nn.Module, Tensor] = {}  # those of training BatchNorms when the step begins

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the graph's outputs, flat: a tensor, or a tuple in the order of `graph.meta["outputs"]`.

        Args:
            inputs, named: the model's arguments, one batch with the structure of the example, or the graph's tensors.

        Raises:
            ConfigError: the inputs do not have the structure of the example, or are partly positional and partly
                named.
        """
        return self.graph(*self.tensors(*inputs, **named))

    def tensors(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        """Returns the graph's inputs for a call or a batch; floating-point tensors are converted to float32.

        Raises:
            ConfigError: the call or batch does not have the structure of the example, or arguments are partly
                positional and partly named.
        """
        if named and inputs:
            raise ConfigError(
                "batch", ", ".join(named), "only positional arguments, only keyword arguments, or one mapping"
            )
        batch = named or (inputs[0] if len(inputs) == 1 else inputs)
        try:
            return flatten(in_float32(like(self.example, batch, graph_inputs(self.graph))))
        except ConfigError:
            if len(inputs) != 1 or isinstance(self.example, Tensor):
                raise
            # The only argument of the example contains several tensors.
            return flatten(in_float32(like(self.example, inputs, graph_inputs(self.graph))))

    def kept(self, outputs: Any) -> int | None:
        ends = [module.kept for module in self.graph.children() if isinstance(module, Outputs)]
        return ends[0] if ends else None

    def loss(self, images: Example, targets: Tensor) -> Tensor:
        """Returns the task's loss, mixed with distillation from the teacher's outputs and features if scheduled.

        (1 - distill)·loss + distill·distillation + distill_feature_weight·(mean over features of
        their relative squared error). Source of the mix: Hinton et al., "Distilling the knowledge in a neural
        network", 2015.

        Raises:
            ConfigError: the schedule distills, but there is no teacher.
        """
        schedule = self.schedule
        if not self.teacher:
            if self._distills:
                reason = "distillation needs a teacher; pass it to QATModule.learn_from before training"
                raise ConfigError("schedule.distill_teacher", schedule.distill_teacher, reason=reason)
            return super().loss(images, targets)
        outputs, ours = self._with_features(images)
        output, auxiliary = self.heads(outputs)
        teacher = self.teacher[0].to(output.device)
        answer, theirs = watched(teacher, in_float32(images), [f.theirs for f in self.features])
        loss = output.new_zeros(())
        if schedule.distill < 1:  # otherwise there may be no targets
            loss = (1 - schedule.distill) * self.of_targets(output, auxiliary, targets)
        else:  # with several processes every parameter needs a gradient
            loss = loss + sum(0.0 * head.sum() for head in auxiliary)
        if schedule.distill > 0:
            loss = loss + schedule.distill * self._distillation(output, outputs, answer)
        if self.features:
            errors = [feature_loss(one, other) for one, other in zip(ours, theirs, strict=True)]
            loss = loss + schedule.distill_feature_weight * torch.stack(errors).mean()
        return loss

    def _distillation(self, output: Tensor, outputs: Any, answer: Any) -> Tensor:
        """Returns the task's distillation loss of `output`, or its mean over all outputs if the task uses all.

        The mean is over floating-point outputs; in training, only over those with a gradient.
        """
        task, wanted, t = self.task, output_leaves(answer)[1], self.schedule.distill_temperature
        if not task.every_output:
            return task.distillation(output, task.trained(wanted), t)
        pairs = zip(output_leaves(outputs)[1], wanted, strict=True)
        every = not torch.is_grad_enabled()  # in training, only outputs with a gradient
        learned = [(a, b) for a, b in pairs if b.is_floating_point() and (every or a.requires_grad)]
        return torch.stack([task.distillation(a, b, t) for a, b in learned]).mean()

    @property
    def _distills(self) -> bool:
        return self.schedule.distill > 0 or bool(self.schedule.distill_features)

    def _with_features(self, images: Example) -> tuple[Any, Sequence[Tensor]]:
        """Returns the graph's outputs and the values of `features`."""
        if not self.features:
            return self(images), ()
        if not self._tapped:  # created late, when modules and parameters are on the training device
            self._tapped = (tapped(self.graph, [f.node for f in self.features]),)
            if self.graph._compiled_call_impl is not None:  # compiled by trainer.compile
                self._tapped[0].compile(dynamic=False)
        found: tuple[Any, Sequence[Tensor]] = self._tapped[0](*self.tensors(images))
        return found

    def setup(self, stage: str) -> None:
        """Initializes learned quantizers, before a checkpoint is loaded and the optimizer is created."""
        if stage == "fit":
            self.check_gradients()
        if self.quantize and stage == "fit":
            self.begin()

    def check_gradients(self) -> None:
        """Checks that the gradient of the loss reaches all weights.

        Nothing is checked without epochs, or with feature distillation, whose gradient starts inside the graph.

        Raises:
            ConfigError: the gradient does not reach some weights; the message names the first operator with such
                weights and the module that torch does not compute.
        """
        trains = self.schedule.epochs and not self.schedule.distill_features
        if trains and (found := stopped(self.graph.graph)) is not None:
            allowed = "0 with this model (schedule=calibrate_only), since the weights of "
            allowed += (
                f"'{found.weights}' reach its outputs only through '{found.by}', which ONNX Runtime computes "
            )
            allowed += "without a gradient"
            raise ConfigError("schedule.epochs", self.schedule.epochs, allowed)

    def begin(self) -> None:
        """Initializes learned scales from calibration (hook)."""
        begin(self.graph)
        self._align_what_is_learned()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.quantize and self.global_rank == 0 and (note := idle(self.graph)):
            warn(note)
        self._align_what_is_learned()

    def _align_what_is_learned(self) -> None:
        self._alignment = Alignment(self.graph) if self.quantize and learners(self.graph) else None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_phase(self._progress)
        if self.trainer.global_step != self._step:  # only at the first batch of a step
            self._step = self.trainer.global_step
            self._begin_step()

    def _begin_step(self) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            observe_in_parts(self.graph, wanted=True)
        self.follow_oscillation(self._progress)

    def after_step(self) -> None:
        """Makes learned and fixed scales of weights follow their BatchNorms (`qatkit.graph.batch_norm.follow`).

        Called after each optimizer step. A custom training loop must also call it, and `set_phase` before the step.
        """
        follow(self.graph, self._variances)
        self._variances = {}

    def follow_oscillation(self, progress: float) -> None:
        """Records the integers of the weights once per step, unless `schedule.oscillation` is ignore.

        If it is freeze, oscillating weights are frozen.
        """
        kind, last = self.schedule.oscillation, self.schedule.freeze_above
        if self.quantize and kind != "ignore":
            threshold = annealed(max(FIRST_THRESHOLD, last), last, progress)
            update_oscillation(self.graph, threshold if kind == "freeze" else None)

    def dampening(self, progress: float) -> Tensor:
        """Returns the loss term that pulls weights to their quantized values, for `schedule.oscillation=dampen`."""
        return annealed(0.0, self.schedule.dampening, progress) * dampening(self.graph)

    def on_train_end(self) -> None:
        observe_in_parts(self.graph, wanted=False)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.quantize and self.schedule.oscillation == "dampen":
            loss = loss + self.dampening(self._progress)
        if _ranks() > 1 and (idle := resting(self.graph)):
            # DDP waits for a gradient of each parameter.
            loss = loss + 0 * torch.stack([one.sum() for one in idle]).sum()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for one in resting(self.graph) if _ranks() > 1 else ():
            one.grad = None  # as without DDP

    @property
    def _progress(self) -> float:
        """The share of all optimizer steps that are done."""
        return self.trainer.global_step / max(1, int(self.trainer.estimated_stepping_batches))

    def set_phase(self, progress: float) -> None:
        """Sets what is observed, quantized and frozen when the share `progress` (0 to 1) of all steps is done.

        Called before each batch. The phase is a function of the step only, so a resumed run continues in the phase in
        which it stopped.
        """
        schedule = self.schedule
        observe = self.quantize and progress < schedule.freeze_observers
        quantize = self.quantize and progress >= schedule.enable_fake_quant
        set_phase(self.graph, observe=observe, quantize=quantize)
        if self.quantize and not quantize:
            begin_anew(self.graph)
        if self._observing and not observe:
            align(self.graph)
        self._observing = observe
        if self._alignment is not None:  # aligns the scales that the last step moved
            self._alignment()
        if schedule.batch_norm == "train" and progress >= schedule.freeze_batch_norm:
            freeze_batch_norm(self.graph)
        if self.quantize and not self._variances:  # only at the first batch of a step
            self._variances = moving_variances(self.graph)

    def ready_to_validate(self) -> None:
        super().ready_to_validate()
        self.ready_to_convert()

    def reestimate(self, batches: Iterable[Any]) -> int:
        """Re-estimates the statistics of the remaining BatchNorms on `batches`, quantized unless `quantize` is False.

        Returns:
            The number of these BatchNorms.
        """
        self.ready_to_convert()
        device = next(self.graph.parameters()).device
        tensors = (on(device, self.tensors(batch)) for batch in batches)
        return reestimate(self.graph, tensors, quantize=self.quantize)

    def ready_to_convert(self) -> None:
        """Fixes ranges, and quantizes (unless `quantize` is False) to simulate the result of `convert`."""
        set_phase(self.graph, observe=False, quantize=self.quantize)
        align(self.graph)


def _ranks() -> int:
    """Returns the number of processes that train together; 1 without distributed training."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
