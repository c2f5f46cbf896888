"""Validates the model at the end of each epoch; training then continues as if it had not been interrupted.

    the last step of an epoch ─ checkpoint ─ judged, state restored ─ a row of the curve ─ the listener is called
    stopped before the row    ─ the continued run judges before its first step, or at its end if none is left

Lightning's own loop skips the validation of an epoch if the run was stopped between the epoch's last step and
its validation. `Validating` therefore runs the module itself. `qatkit.choose.epochs` judges epochs by their
files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qatkit.data import DataModule
from qatkit.graph.signature import on_device
from qatkit.progress import shown
from qatkit.records.scores import SCORE
from qatkit.run.folder import main_process
from qatkit.run.loop import epoch_listener
from qatkit.train.learner import Learner
from qatkit_verify import stopping


class Judging(Callback, ABC):
    """Judges the model in training every `interval` optimizer steps, such as those of an epoch.

    Args:
        module: the trained module; a row is added to its `curve` for each judgement.
        checkpoint: the checkpoint that is written before a judgement, so that a stop need not wait for the
            judgement.
        interval: the number of optimizer steps between judgements; there is also one at the end of the
            training.
    """

    judges_start = False  # whether there is also a judgement before the first step

    def __init__(self, module: Learner, checkpoint: Path, interval: int) -> None:
        self.module, self.path, self.interval = module, checkpoint, interval

    @abstractmethod
    def row(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Returns the results for the current weights: `score` (the task's main metric) and more values of the curve.

        The module may be left in any state, since the caller restores it.
        """

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._due(trainer):  # the run was stopped during a judgement
            self._judge_in_between(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._due(trainer):
            trainer.save_checkpoint(self.path)
            self._judge_in_between(trainer)

    def make_up(self, trainer: lightning.Trainer) -> None:
        """Judges the last step if the run was stopped before that judgement."""
        if self._due(trainer):
            self._judge(trainer)

    def _judge_in_between(self, trainer: lightning.Trainer) -> None:
        stopping.wait(False)  # there is a checkpoint of this step
        stopping.check()
        self._judge(trainer)
        stopping.wait(True)

    def _due(self, trainer: lightning.Trainer) -> bool:
        step = trainer.global_step
        boundary = step % self.interval == 0 or step == trainer.max_steps
        return (
            (step > 0 or self.judges_start)
            and boundary
            and all(row["step"] != step for row in self.module.curve)
        )

    def _judge(self, trainer: lightning.Trainer) -> None:
        self.module.check_finite()
        with self.module.untouched():
            row = self.row(trainer)
        step = trainer.global_step
        self.module.curve.append({"step": step, **row})
        if trainer.logger is not None:
            trainer.logger.log_metrics({self.module.task.names.main.key: row[SCORE]}, step)
        if step > 0:  # the last interval may be shorter
            epoch_listener.validated(self.path.stem, -(-step // self.interval), row[SCORE])


class Validating(Judging):
    """Validates the module in PyTorch, in the training precision. The processes share the validation images.

    Args:
        data: the data module with the validation images, which are not used for training.
        title: the title of the progress bar; None shows no bar.
    """

    def __init__(
        self, module: Learner, data: DataModule, checkpoint: Path, interval: int, title: str | None
    ) -> None:
        super().__init__(module, checkpoint, interval)
        self.data, self.title = data, title
        self._batches: Any = None  # kept from epoch to epoch with its worker processes

    def row(self, trainer: lightning.Trainer) -> dict[str, float]:
        if self._batches is None:
            self._batches = self.data.validation_batches(trainer.global_rank, trainer.world_size)
        module, device = self.module, next(self.module.parameters()).device
        module.ready_to_validate()
        task, totals = module.task, list[Tensor]()
        as_trained: AbstractContextManager[Any] = trainer.precision_plugin.val_step_context()
        with as_trained:
            bar = self.title is not None and main_process()
            for images, targets in shown(self._batches, f"{self.title}, validation", bar):
                output = module.heads(module(on_device(images, device)))[0]
                totals.append(task.total(output, targets.to(device)))
        total = torch.stack(totals).sum(0).double() if totals else torch.zeros((), device=device).double()
        total = trainer.strategy.reduce(total, reduce_op="sum")
        summed = total if total.ndim else total.item()
        return {SCORE: float(task.figure(summed, self.data.validation_count))}
