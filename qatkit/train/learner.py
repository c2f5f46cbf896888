"""Training on Lightning's Trainer: the task's loss, optimizer, learning rate, and the state to resume a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from qatkit.config.schema import ScheduleConfig
from qatkit.data.loading import seed_of
from qatkit.graph.nodes import outputs_in_inference
from qatkit.graph.phase import inference
from qatkit.graph.signature import Example, call, output_leaves
from qatkit.quant.fake_quantize import Quantizer
from qatkit.quant.learned.by_shares import BY_SHARES, RELATIVE, AdamWAndScales, SGDAndScales
from qatkit.records.scores import SCORE, with_score
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.train.weight_average import WeightAverage
from qatkit_verify.errors import ConfigError

Batch = tuple[Any, Tensor]  # the model's input, targets
EMA = "ema"  # key in the record of a float checkpoint; the value is the decay, if the weights are an average


class Learner(lightning.LightningModule):
    """A Lightning module that trains `self.graph` on batches (images [N, C, H, W], targets [N, ...]).

    Instead of images, batches may contain any other input of a model (`qatkit.graph.signature.Example`). The loss is
    computed from the outputs that `Task.trained` returns. A `ScheduleConfig` has the settings.

    Checkpoints contain the state of torch's random generator, so that dropout after a resume is the same as in an
    uninterrupted run. They also contain the average of the weights, the best weights, and the metrics of the epochs so
    far.

    Raises:
        ConfigError: a checkpoint is to be written, but the weights are not finite.

    Attributes:
        schedule, lr: the settings, and the initial learning rate.
        task: the task that is learned.
        about: entries for export that are written into checkpoints.
        keys: the prefix of the configuration keys of this training's settings, for messages.
        average: the average of the weights, if `schedule.ema` is set, from the first step until
            `take_average`.
        curve: the metrics of each evaluated epoch (`qatkit.records.tried.Epoch`).
        best: the state_dict of the best epoch, if epochs are selected; None before there is one.
        finished: whether the weights are final.
        told: notes on the last training, for the report.
    """

    keys: ClassVar[str] = "schedule."
    graph: nn.Module

    def __init__(self, schedule: ScheduleConfig, lr: float, task: Task = CLASSIFICATION) -> None:
        super().__init__()
        self.schedule, self.lr, self.task = schedule, lr, task
        self.about: dict[str, Any] = {}  # in checkpoints, for export
        self.average: WeightAverage | None = None
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] | None = None
        self.finished = False
        self.told: list[str] = []  # notes on the last training, for the report
        # The float model, whose loss a task may use, in a tuple so that it is not a submodule.
        self._original: tuple[nn.Module, ...] = ()
        self._rng: Tensor | None = None
        self._device_rng: Tensor | None = None
        self._validated: AbstractContextManager[None] = nullcontext()
        self._stored_average: dict[str, Tensor] | None = None

    @property
    def original(self) -> nn.Module | None:
        """The float model from which the graph was made; None if there is none."""
        return self._original[0] if self._original else None

    def learn(self, task: Task) -> None:
        """Sets the task to learn."""
        self.task = task.of_model(self._original[0]) if self._original else task

    def heads(self, outputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the outputs that the task trains, and the training-only outputs (auxiliary heads)."""
        found = output_leaves(outputs)[1]
        kept = self.kept(outputs)
        return self.task.trained(found[:kept]), () if kept is None else tuple(found[kept:])

    def kept(self, outputs: Any) -> int | None:
        """Returns the number of outputs that the exported file has; None: all outputs of the graph."""
        return outputs_in_inference(self.graph, outputs)

    def loss(self, images: Example, targets: Tensor) -> Tensor:
        """Returns the task's loss, including auxiliary heads."""
        return self.of_targets(*self.heads(self(images)), targets)

    def of_targets(self, output: Tensor, auxiliary: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Returns the loss of the outputs of `heads`."""
        return self.task.whole_loss(output, auxiliary, targets, self.schedule)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return self.loss(*batch)  # not logged, since Lightning would wait for the device at each step

    def validation_step(self, batch: Batch, _: int) -> None:
        images, targets = batch
        output = self.heads(self(images))[0]
        figure = self.task.figure(self.task.total(output, targets).float(), len(output))
        self.log(self.task.names.main.key, figure, prog_bar=True, sync_dist=True)

    def on_validation_start(self) -> None:
        self._validated = self.untouched()
        self._validated.__enter__()
        self.ready_to_validate()

    def on_validation_end(self) -> None:
        validated, self._validated = self._validated, nullcontext()
        validated.__exit__(None, None, None)

    def configure_callbacks(self) -> list[lightning.Callback]:
        return [_EndFailedValidation()]

    def ready_to_validate(self) -> None:
        """Switches to the weights that would be exported (their average, if any); called within `untouched`."""
        self.swap_average()

    def on_validation_epoch_end(self) -> None:
        """Adds the main metric to the curve."""
        step = self.trainer.global_step
        found = self.trainer.callback_metrics.get(self.task.names.main.key)
        if found is not None and all(row["step"] != step for row in self.curve):
            self.curve.append({"step": step, SCORE: float(found)})

    def on_train_start(self) -> None:
        for parameter, state in self.trainer.optimizers[0].state.items():
            # A checkpoint has the memory format of its run (trainer.channels_last), and fused kernels follow the
            # memory order.
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if self.schedule.ema is not None and self.average is None:
            self.average = WeightAverage(self.graph, self.schedule.ema, self._stored_average)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.after_step()
        if self.average is not None:
            self.average.update(self.trainer.global_step + 1)  # Lightning counts a step once this returns

    def after_step(self) -> None:
        """Runs after an optimizer step, before the weights are averaged and a checkpoint may be written (hook)."""

    def swap_average(self) -> None:
        """Exchanges the weights and their average, if there is one."""
        if self.average is not None:
            self.average.swap()

    def take_average(self, stored: Mapping[str, Tensor] | None = None) -> None:
        """Replaces the weights by their average, if there is one, for export, and drops the average.

        After a training with `schedule.ema` by a plain Trainer, the caller must call this.

        Args:
            stored: the average in the checkpoint from which the weights were read; None: the average of this
                training.
        """
        stored = stored or self._stored_average
        if self.average is None and stored is not None and self.schedule.ema is not None:
            self.average = WeightAverage(self.graph, self.schedule.ema, stored)
        self.swap_average()
        self.average = self._stored_average = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Sets the graph to inference mode within the context; its weights and their average may be changed there.

        Weights, averages, modes and random generators are restored afterwards, even after an exception.
        """
        average, stored = self.average, self._stored_average
        values = {} if average is None else {name: one.clone() for name, one in average.state.items()}
        weights = {name: one.clone() for name, one in self.state_dict().items()}
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with inference(self.graph), torch.random.fork_rng(devices):
                yield
        finally:
            self.load_state_dict(weights)
            self.average, self._stored_average = average, stored
            if average is not None:
                average.state.update(values)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.graph, self.schedule, self.lr)
        if self.trainer.gradient_clip_val:
            # Under autocast, Lightning clips only if no fused kernel would unscale the gradients afterwards.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch reads it by name
        total = int(self.trainer.estimated_stepping_batches)
        factor = LambdaLR(optimizer, lambda step: rate_factor(step, total, self.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": factor, "interval": "step"}}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self._rng is not None:  # set late, to undo random draws while loading
            torch.set_rng_state(self._rng)
            self._rng = None
            if self._device_rng is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(self._device_rng.cpu(), self.device)
        if self.global_rank:
            self._draw_apart(batch_idx)

    def _draw_apart(self, batch_idx: int) -> None:
        """Seeds random numbers on ranks other than 0 by the step; the generator of rank 0 is stored in checkpoints."""
        trainer: Any = self.trainer
        seed = getattr(trainer.datamodule, "seed", 0)  # a user's own loaders have no seed
        torch.manual_seed(seed_of("draws", seed, self.global_rank, self.global_step, batch_idx))

    def check_finite(self) -> None:
        """Raises ConfigError if a trained weight is NaN or infinite, so that no checkpoint is written."""
        trained = [p.detach() for p in self.parameters() if p.requires_grad]
        if trained and not bool(torch.stack([one.isfinite().all() for one in trained]).all()):
            raise self.diverged("its weights are NaN or infinite")

    def diverged(self, how: str) -> ConfigError:
        """Returns the error for a diverged training, with the learning rate and advice.

        Args:
            how: the symptom, as a clause.
        """
        step = self.trainer.global_step
        allowed = (
            f"a smaller value, such as {self.lr / 10:g}, unless schedule.warmup is increased or"
            f" trainer.gradient_clip=1 is set; the training had diverged by step {step} ({how})"
        )
        return ConfigError(f"{self.keys}lr", self.lr, allowed)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite()
        checkpoint["rng_state"], checkpoint["qatkit"] = torch.get_rng_state(), self.about
        if self.device.type == "cuda":  # dropout on the GPU draws from its own generator
            checkpoint["device_rng_state"] = torch.cuda.get_rng_state(self.device)
        found = {"average": self.average and self.average.state, "curve": self.curve, "best": self.best}
        checkpoint |= {name: value for name, value in found.items() if value}
        checkpoint |= {"finished": self.finished, "accumulate": self.trainer.accumulate_grad_batches}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng, self._device_rng = checkpoint.get("rng_state"), checkpoint.get("device_rng_state")
        self._stored_average, self.best = checkpoint.get("average"), checkpoint.get("best")
        self.curve = [with_score(row) for row in checkpoint.get("curve", [])]
        self.finished = checkpoint.get("finished", False)
        if self._trainer is not None:  # Lightning's `load_from_checkpoint` has no trainer, and trains nothing
            _recount(checkpoint, self.trainer.accumulate_grad_batches)


class _EndFailedValidation(lightning.Callback):
    """Restores the weights if a validation raises an exception; Lightning then does not call `on_validation_end`."""

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        module.on_validation_end()


def _recount(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Converts Lightning's counts of batches if the batches per step have changed; the count of steps stays."""
    before = checkpoint.get("accumulate", accumulate)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]  # within a batch, the other counts are one less
        counts |= {name: ready * accumulate // before - (ready - count) for name, count in counts.items()}


class FloatModule(Learner):
    """A Lightning module that trains a float model as it is, without fusing or quantizing it."""

    keys = "schedule.float_"

    def __init__(self, model: nn.Module, schedule: ScheduleConfig, task: Task = CLASSIFICATION) -> None:
        super().__init__(schedule, schedule.float_lr)
        if schedule.ema is not None:
            self.about[EMA] = schedule.ema
        self.graph, self._original = model.train(), (model,)
        self.learn(task)

    def forward(self, batch: Example) -> Any:
        """Returns the model's outputs for a batch of images or any other input."""
        return call(self.graph, batch)


def rate_factor(step: int, total: int, schedule: ScheduleConfig) -> float:
    """Returns the learning rate at `step` of `total` relative to its initial value: warm-up, then `schedule.decay`."""
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule.decay]


def make_optimizer(model: nn.Module, schedule: ScheduleConfig, lr: float) -> torch.optim.Optimizer:
    """Returns SGD or AdamW for the weights, with learned scales in separate groups.

    Vectors (biases, norms) get no weight decay. Learned scales move by relative steps
    (`qatkit.quant.learned.by_shares`), as do the weights with `schedule.relative_lr`. Among the learned scales, only
    PACT's clipping values decay.
    """
    learned: dict[int, bool] = {
        id(p): q.decayed
        for q in model.modules()
        if isinstance(q, Quantizer)
        for p in q.parameters(recurse=False)
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    plain = [p for p in parameters if id(p) not in learned]
    relative = {RELATIVE: True} if schedule.relative_lr else {}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in plain if p.ndim > 1], "weight_decay": schedule.weight_decay, **relative},
        {"params": [p for p in plain if p.ndim <= 1], "weight_decay": 0.0, **relative},
    ]
    for decayed in (False, True):
        found = [p for p in parameters if learned.get(id(p)) is decayed]
        decay = schedule.weight_decay if decayed else 0.0
        if found:
            groups.append({"params": found, "weight_decay": decay, "lr": schedule.scale_lr, BY_SHARES: True})
    if schedule.optimizer == "adamw":
        adamw = AdamWAndScales if learned or relative else torch.optim.AdamW
        return adamw(groups, lr=lr, fused=True)  # the other implementations read their steps on the host
    sgd = SGDAndScales if learned else torch.optim.SGD
    return sgd(groups, lr=lr, momentum=schedule.momentum)
