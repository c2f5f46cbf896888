"""The stages that train, on Lightning's Trainer: fresh, or continued from an earlier attempt's checkpoint."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn

from qatkit.algorithms.base import OBSERVED
from qatkit.bundle import FLOAT_CHECKPOINT
from qatkit.classifier import Classifier, FloatModule
from qatkit.config.schema import ModelConfig, TrainerConfig
from qatkit.data import DataModule
from qatkit.graph.phase import inference
from qatkit.module import QATModule
from qatkit.run import watch
from qatkit.run.folder import Run
from qatkit.sealed import seal
from qatkit_verify import stopping
from qatkit_verify.files import whole

_SGD_AND_SCALES = (
    "schedule.optimizer=sgd behind an algorithm that divides channels (SmoothQuant): its steps follow the scale of a"
    " weight and can end far from float; schedule.optimizer=adamw does not"
)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def train_float(run: Run, model: nn.Module, data: DataModule) -> None:
    """Trains the model that is quantized later, in place."""
    config = run.config
    module = FloatModule(model, config.schedule)
    path = run.folder / FLOAT_CHECKPOINT
    with run.stage("float_training", f"training the float model{_from(path)}"):
        fit(module, data, path, config.trainer,
            epochs=config.schedule.float_epochs, title="float")  # fmt: skip
    model.cpu().eval()


def fine_tune(run: Run, module: QATModule, data: DataModule, checkpoint: str, title: str) -> None:
    """Lightning's Trainer over the QAT schedule; with no epochs, only the checkpoint is written."""
    config, path = run.config, run.folder / checkpoint
    lightning.seed_everything(config.seed, verbose=False)
    classes = data.num_classes or _own_classes(module, config.model)
    if config.schedule.epochs and config.schedule.optimizer == "sgd" and module.of_stage(OBSERVED):
        warnings.warn(_SGD_AND_SCALES, stacklevel=2)
    module.about |= {"input_shape": list(data.input_shape), "num_classes": classes}
    with run.stage(
        title.replace(" ", "_"), f"fine-tuning: {title}{_from(path)}" if config.schedule.epochs else ""
    ):
        fit(module, data, path, config.trainer, epochs=config.schedule.epochs,
            max_steps=config.schedule.max_steps, title=title)  # fmt: skip
    module.cpu().eval()
    module.ready_to_convert()


def _own_classes(module: QATModule, model: ModelConfig) -> int | None:
    """Of a model that has kept its own head: pretrained weights may have more than their builder's default."""
    if model.num_classes is not None or model.weights is None:
        return model.num_classes
    with inference(module.graph):
        outputs = module.graph(module.example)
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return int(logits.shape[1]) if isinstance(logits, Tensor) and logits.ndim == 2 else None


def _from(checkpoint: Path) -> str:
    return f", from {checkpoint.name}" if checkpoint.is_file() else ""


def fit(
    module: Classifier,
    data: DataModule,
    checkpoint: Path,
    trainer_config: TrainerConfig,
    *,
    epochs: int,
    max_steps: int | None = None,
    title: str = "",
) -> lightning.Trainer:
    """Trains `module` for `epochs` (or `max_steps`), writing `checkpoint` on the way and at the end.

    If `checkpoint` exists the training continues from it, in mid-epoch if need be; a finished one is only
    loaded.
    """
    steps = epochs * data.batches_per_epoch(processes(trainer_config)) if epochs else 0
    steps = steps if max_steps is None else min(steps, max_steps)
    _quiet_lightning()
    keep_freed_memory()
    trainer = _trainer(trainer_config, checkpoint, steps, title, validate=epochs > 1 and data.labelled)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if checkpoint.is_file() else None)
    finally:
        stopping.wait(False)
    trainer.save_checkpoint(checkpoint)
    return trainer


def _trainer(
    config: TrainerConfig, checkpoint: Path, steps: int, title: str, *, validate: bool
) -> lightning.Trainer:
    callbacks: list[Callback] = [_Saving(checkpoint, config.checkpoint_every)]
    if config.progress:
        callbacks.append(_Bar(title))
    return lightning.Trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=config.strategy,
        precision=config.precision,  # type: ignore[arg-type]
        deterministic=config.deterministic,
        gradient_clip_val=config.gradient_clip,
        # Bounded by steps alone: Lightning counts an epoch twice when it resumes at the end of one.
        max_epochs=-1,
        max_steps=steps,
        callbacks=callbacks,
        enable_progress_bar=config.progress,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validate else 0,
        use_distributed_sampler=False,
        plugins=[_AtomicCheckpoints()],
    )


def processes(config: TrainerConfig) -> int:
    """How many processes share the images of an epoch; `devices=-1` is every GPU of each node."""
    return (max(1, torch.cuda.device_count()) if config.devices == -1 else config.devices) * config.num_nodes


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed buffers for the next step instead of returning them to the kernel.

    Every activation of a step on the CPU, of training or of calibration, is such a buffer, and fresh pages for it have
    to be cleared (figures: docs/design.md, D15).
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library
    for parameter, value in ((_M_TOP_PAD, 2**28), (_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(parameter, value)


class _AtomicCheckpoints(TorchCheckpointIO):
    """Writes beside the target and renames: Lightning's own temporary file may be on another file system, and
    a kill while it is copied over would leave half a checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # As a stream: torch.save puts the name of a path into the file, and equal checkpoints would differ.
        with whole(target) as temporary:
            with temporary.open("wb") as stream:
                torch.save(checkpoint, stream)
            seal(temporary)


class _Saving(ModelCheckpoint):
    """Every so many steps, and where a signal ends the run: it waits for the end of the step that it is in.

    Before a validation there is a checkpoint too, so that one need not be waited for. All ranks end at one step.
    """

    def __init__(self, path: Path, every: int) -> None:
        super().__init__(
            str(path.parent.absolute()),  # a folder may be called ~, or a::b
            path.stem,
            every_n_train_steps=every,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.path = path

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        stopping.wait(True)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if not stopping.serving():
            return
        asked = trainer.strategy.reduce_boolean_decision(stopping.wanted() is not None, all=False)
        if asked or (trainer.is_last_batch and trainer.enable_validation):
            trainer.save_checkpoint(self.path)
        if asked:
            raise stopping.Stopped(
                stopping.wanted() or signal.SIGTERM, f"at step {trainer.global_step} of {trainer.max_steps}"
            )

    def on_validation_start(self, *args: Any) -> None:
        super().on_validation_start(*args)
        stopping.wait(False)
        stopping.check()

    def on_validation_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        super().on_validation_end(trainer, *args)
        stopping.wait(True)
        watch.validated(self.path.stem, trainer.current_epoch + 1, float(trainer.callback_metrics["top1"]))


class _Bar(TQDMProgressBar):
    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10)
        self.title = title

    def on_exception(self, *args: Any) -> None:
        """What is said next begins a line of its own."""
        with suppress(TypeError):  # there is no bar yet
            self.train_progress_bar.close()

    def on_train_epoch_start(self, trainer: lightning.Trainer, *args: object) -> None:
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(f"{self.title}, epoch {trainer.current_epoch + 1}")


def _quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
