"""Training with Lightning's Trainer: from the start, or resumed from the checkpoint of an earlier attempt."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from torch import nn

from qatkit.config.schema import TrainerConfig
from qatkit.data import DataModule
from qatkit.encryption.sealed import seal
from qatkit.encryption.vault import readable, secret
from qatkit.quant.observers.base import with_other_ranks
from qatkit.records.scores import SCORE
from qatkit.run.allocator import keep_freed_memory
from qatkit.run.folder import say
from qatkit.run.loop.compiled import compiled
from qatkit.run.loop.ranks import environment_of, peers, start_together, strategy_of
from qatkit.run.loop.validation import Judging
from qatkit.train.learner import Learner
from qatkit.train.sync_batch_norm import synchronized
from qatkit_verify import stopping

_LOG_EVERY = 50  # steps


@dataclass(frozen=True)
class Stage:
    """The settings of one training stage.

    Attributes:
        title: the title of the progress bar.
        epochs, max_steps: the length of the stage; the shorter one applies.
        judging: the callback that validates the epochs, if they are validated.
        logger: the logger of a tracking server, if there is one.
        finish: a function that is called after the last step; it turns the last weights into the exported
            ones.
    """

    title: str
    epochs: int
    max_steps: int | None = None
    judging: Judging | None = None
    logger: Logger | None = None
    finish: Callable[[], None] = lambda: None


@with_other_ranks(True)
def fit(
    module: Learner, data: DataModule, checkpoint: Path, config: TrainerConfig, stage: Stage
) -> lightning.Trainer:
    """Trains `module` for the length of `stage`, and writes `checkpoint` regularly and at the end.

    If `checkpoint` exists, training continues from it, within an epoch if needed. A finished checkpoint is
    only loaded.
    """
    steps = stage.epochs * data.steps_per_epoch(batches_a_step(config)) if stage.epochs else 0
    steps = steps if stage.max_steps is None else min(steps, stage.max_steps)
    _quiet_lightning()
    keep_freed_memory(data.inputs.bytes)
    several = processes(config) > 1
    if several:
        start_together(module, data, checkpoint, steps, _AtomicCheckpoints())
    trainer = _trainer(config, checkpoint, steps, stage)
    try:
        with (
            synchronized(module if several and config.sync_batch_norm else None),
            compiled(module.graph, config.compile) as made,
            peers(several),
            _innermost_channels(module.graph, config.channels_last),
        ):
            trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if checkpoint.is_file() else None)
    finally:
        stopping.wait(False)
    module.told = [f"{stage.title}: {one}" for one in (data.pace, made.note if made.graphs else "") if one]
    for line in module.told:
        say(line)
    module.check_finite()
    if not module.finished:
        if stage.judging is not None:
            stage.judging.make_up(trainer)
        stage.finish()
    module.finished = True
    trainer.save_checkpoint(checkpoint)
    return trainer


@contextmanager
def _innermost_channels(graph: nn.Module, wanted: bool) -> Iterator[None]:
    """Stores the graph's 4-D tensors channels-last within the context; convolutions then return this layout."""
    if not wanted:
        yield
        return
    _lay_out(graph, torch.channels_last)
    try:
        yield
    finally:
        _lay_out(graph, torch.contiguous_format)


def _lay_out(graph: nn.Module, layout: torch.memory_format) -> None:
    """Changes the layout of 4-D tensors only, since `Module.to` fails on 5-D tensors."""
    for tensor in (*graph.parameters(), *graph.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=layout)


def _trainer(config: TrainerConfig, checkpoint: Path, steps: int, stage: Stage) -> lightning.Trainer:
    every = max(1, min(_LOG_EVERY, steps // 2))
    callbacks: list[Callback] = [] if stage.judging is None else [stage.judging]
    callbacks.append(_Saving(checkpoint, config.checkpoint_every))
    if config.progress:
        callbacks.append(_Bar(stage.title))
    if stage.logger is not None:
        callbacks.append(_Tracked(every))
    return lightning.Trainer(
        accelerator="gpu" if on_gpu(config) else "cpu",
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=strategy_of(config.strategy, processes(config)),
        accumulate_grad_batches=config.accumulate,
        precision=config.precision,  # type: ignore[arg-type]
        deterministic=config.deterministic,
        gradient_clip_val=config.gradient_clip,
        # Limited by steps only, since Lightning counts an epoch twice if it resumes at its end.
        max_epochs=-1,
        max_steps=steps,
        callbacks=callbacks,
        enable_progress_bar=config.progress,
        enable_model_summary=False,
        logger=stage.logger or False,
        log_every_n_steps=every,
        num_sanity_val_steps=0,
        limit_val_batches=0,  # `Judging` validates instead
        use_distributed_sampler=False,
        plugins=[_AtomicCheckpoints(), *environment_of(processes(config))],
    )


def processes(config: TrainerConfig) -> int:
    """Returns how many processes share the images of an epoch; `devices=-1` means all GPUs of each node."""
    return (max(1, torch.cuda.device_count()) if config.devices == -1 else config.devices) * config.num_nodes


def accelerator(config: TrainerConfig) -> torch.device:
    """Returns the device for simulations after the training: the CPU, or the first GPU in full float32 precision.

    The converted module stays on the CPU, where its integer sums are exact. A GPU library may choose
    convolution algorithms that are not exact, such as Winograd's.
    """
    if not on_gpu(config):
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")


def on_gpu(config: TrainerConfig) -> bool:
    """Returns whether to use a CUDA device. Apple devices, which Lightning may choose, lack float64 for scales."""
    return config.accelerator != "cpu" and torch.cuda.is_available()


def batches_a_step(config: TrainerConfig) -> int:
    """Returns the number of batches per optimizer step, over all processes."""
    return processes(config) * config.accumulate


class _AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoint IO that writes a temporary file next to the target and renames it.

    Lightning's own temporary file may be on another file system. A process killed during the copy would then
    leave an incomplete checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written to a stream: torch.save would store the name of a path in the file, and equal checkpoints
        # would differ.
        with secret(target) as temporary:
            with temporary.open("wb") as stream:
                torch.save(checkpoint, stream)
            seal(temporary)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with readable(path) as plain:
            return super().load_checkpoint(plain, *args, **kwargs)


class _Saving(ModelCheckpoint):
    """Saves every `every` steps, and at the end of the current step if a signal ends the run.

    All ranks end at the same step.
    """

    def __init__(self, path: Path, every: int) -> None:
        super().__init__(
            str(path.parent.absolute()),  # a folder may be called ~, or a::b
            path.stem,
            every_n_train_steps=every,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.path, self._done = path, -1

    def on_train_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        # With several batches per step, the step count changes only after the last one. Nothing is saved
        # before, since accumulated gradients are not part of a checkpoint.
        self._done = self._last_global_step_saved = trainer.global_step
        stopping.wait(True)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if not stopping.serving() or trainer.global_step == self._done:
            return
        self._done = trainer.global_step
        asked = trainer.strategy.reduce_boolean_decision(stopping.wanted() is not None, all=False)
        if asked:
            trainer.save_checkpoint(self.path)
            raise stopping.Stopped(
                stopping.wanted() or signal.SIGTERM, f"at step {trainer.global_step} of {trainer.max_steps}"
            )


class _Bar(TQDMProgressBar):
    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10)
        self.title, self._loss = title, None

    def on_exception(self, *args: Any) -> None:
        """Closes the bar, so that the next message begins on its own line."""
        with suppress(TypeError):  # the bar does not exist yet
            self.train_progress_bar.close()

    def get_metrics(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, Any]:
        """Adds the loss and the latest score to the metrics of the bar; called only when the bar is refreshed."""
        shown = super().get_metrics(trainer, module)
        if self._loss is not None:
            shown["loss"] = float(self._loss)
        if isinstance(module, Learner) and module.curve:
            shown[module.task.names.main.key] = module.curve[-1][SCORE]
        return shown

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self._loss = outputs["loss"].detach() if isinstance(outputs, dict) else outputs
        super().on_train_batch_end(trainer, module, outputs, *args)

    def on_train_epoch_start(self, trainer: lightning.Trainer, *args: object) -> None:
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(f"{self.title}, epoch {trainer.current_epoch + 1}")


class _Tracked(Callback):
    """Logs loss and learning rate to a tracking server every few steps; Lightning itself would read them each step."""

    def __init__(self, every: int) -> None:
        self.every, self._last = every, 0

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        step = trainer.global_step
        if step % self.every or step == self._last or trainer.logger is None:
            return
        self._last = step  # with accumulated gradients, the first batch of a step counts
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        trainer.logger.log_metrics({"loss": float(loss), "lr": float(rate)}, step)


def _quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
