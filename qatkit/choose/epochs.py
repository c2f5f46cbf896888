"""Chooses the epoch of a fine-tuning by the accuracy of its exported file in ONNX Runtime (`verify.every`).

    before the first step,
    every N epochs        weights, or their average ─ BatchNorm statistics ─ scales aligned ─> what would ship
                          ─ convert ─> file ─ ONNX Runtime ─> metric on held-out training images ─ the best so far?
    at the end            the best one becomes the module

The first file is exported; the others are the same file with other values (`qatkit.choose.judge.Files`). For
images without labels, the float model's decision replaces the label. Among equal epochs the latest is kept.
The state before the first step is kept if every epoch is worse. The judged weights depend only on the
checkpoint: a run that was killed during a judgement has a checkpoint of that step and judges again. The
epochs of a float control (the same training without quantization) are judged on the same images in PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning

from qatkit.choose.contest import decided
from qatkit.choose.judge import Files, judging_options
from qatkit.data import DataModule
from qatkit.graph.precomputed import settled_graph
from qatkit.progress import Batches, shown
from qatkit.records.scores import SCORE
from qatkit.records.tried import Curve, Epoch
from qatkit.run.build import example_batch
from qatkit.run.folder import Run, main_process, say
from qatkit.run.loop.fit import batches_a_step
from qatkit.run.loop.validation import Judging
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import NotFiniteError, accuracy, in_parts, module_accuracy, predictor
from qatkit.verify.module_outputs import module_outputs
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import counted
from qatkit_verify.records import Metric
from qatkit_verify.session import open_session


def make_ready(run: Run, module: QATModule, data: DataModule) -> None:
    """Prepares a module for its export, and aligns its scales.

    If the schedule requests it, the weights are averaged and the BatchNorm statistics are re-estimated.
    """
    module.take_average()
    _statistics(run, module, data)
    module.ready_to_convert()


def _statistics(run: Run, module: QATModule, data: DataModule) -> None:
    images = run.config.schedule.batch_norm_images
    if images:
        # a single image has no variance
        batches = data.calibration_batches(images, min(images, max(2, run.config.calibration.batch_size)))
        seen = shown(batches, "BatchNorm statistics", run.config.trainer.progress and main_process())
        module.reestimate(pixels for pixels, _ in seen if len(pixels) > 1)


def curves_of(run: Run, data: DataModule) -> list[Curve]:
    """Returns, for the report, the curve of each training stage whose epochs were validated or judged."""
    found = []
    for stage, rows in run.curves.items():
        an_epoch = data.steps_per_epoch(batches_a_step(run.config.trainer)) if rows else 1
        epochs = [
            Epoch(row["step"] / an_epoch, row["step"], row[SCORE], row.get("seconds"), row.get("kept", False))
            for row in rows
        ]
        chosen = any("seconds" in row for row in rows)
        apart = bool(data.held_out)
        found += [Curve(stage, chosen, data.validation_count, epochs, apart)] if epochs else []
    return found


def latest_of_the_best(judged: Mapping[str, float], metric: Metric = NAMES.main) -> tuple[str, str]:
    """Returns the step of the epoch with the best metric (the latest of equals), and the reason.

    Args:
        judged: the metric by step, in chronological order.
        metric: the metric, which decides whether higher or lower values are better.
    """
    best = metric.best(judged.values())
    return next(
        step for step in reversed(list(judged)) if judged[step] == best
    ), f"the best {metric.name} of its file"


def _judged_before(module: QATModule) -> dict[str, float]:
    """Returns the metric of the judged epochs by step, from the curve, which is stored in checkpoints."""
    return {str(row["step"]): row[SCORE] for row in module.curve}


class Choosing(Judging):
    """Keeps the best epoch in the module (`curve`, `best`), whose checkpoints contain it.

    Args:
        run: the run.
        module: the module in training.
        data: the data of the run.
        checkpoint, interval: the same as in `Judging`.
        title: the title of the stage.
    """

    module: QATModule
    judges_start = True

    def __init__(
        self, run: Run, module: QATModule, data: DataModule, checkpoint: Path, interval: int, title: str
    ) -> None:
        super().__init__(module, checkpoint, interval)
        self.run, self.data, self.title = run, data, title
        self.files: Files | None = None

    def end(self) -> None:
        """Replaces the module's state by the best epoch's, after the last judgement."""
        module = self.module
        assert module.best is not None
        module.load_state_dict(module.best)
        module.average = module.best = None
        outcomes = decided(_judged_before(module), self._best)
        for row in module.curve:
            row["kept"] = outcomes[str(row["step"])].kept

    def row(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Judges the current weights, and keeps them if no earlier ones are better.

        Raises:
            ConfigError: the outputs have NaNs or infinities, since the training diverged.
        """
        start, module = time.monotonic(), self.module
        make_ready(self.run, module, self.data)
        try:
            score = trainer.strategy.broadcast(self._score() if main_process() else 0.0)
        except NotFiniteError as error:
            raise module.diverged(f"{self._what()} gives NaN or infinity") from error
        step = str(trainer.global_step)
        if decided({**_judged_before(module), step: score}, self._best)[step].kept:
            module.best = {name: value.cpu().clone() for name, value in module.state_dict().items()}
        seconds = round(time.monotonic() - start, 1)
        images = counted(len(self.data.held_out), f"held-out training {self.data.task.names.sample}")
        found = f"{self._metric.name} {self._metric.of(score).text}"
        say(f"{self.title}, step {step}: {found} of {self._what()} on {images}, {seconds:.1f} s")
        return {SCORE: score, "seconds": seconds}

    def _best(self, judged: Mapping[str, float]) -> tuple[str, str]:
        return latest_of_the_best(judged, self._metric)

    def _what(self) -> str:
        return "the file in ONNX Runtime" if self.module.quantize else "the float control"

    @property
    def _metric(self) -> Metric:
        return self.data.task.names.main

    def _score(self) -> float:
        """Returns the main metric of the module's current weights on the held-out images."""
        config, task = self.run.config, self.data.task
        batches: Batches = self.data.held_out_batches()
        if not self.data.labelled:
            batches = self._with_answers(batches)
        if not self.module.quantize:
            control = in_parts(predictor(settled_graph(self.module.graph), task))
            return module_accuracy(control, batches, config.trainer.progress, "control", task=task).score
        if self.files is None:
            folder = self.run.scratch / self.title
            folder.mkdir(exist_ok=True)
            self.files = Files(example_batch(config, self.data.inputs), folder, config.export)
        path = self.files.write(self.module.graph)
        options = judging_options(self.module)
        session = open_session(path, threads=config.verify.threads, options=options)
        return accuracy(session, batches, config.trainer.progress, task=task).score

    def _with_answers(self, batches: Batches) -> Iterator[tuple[Any, Any]]:
        """Yields the batches with the float model's decisions in place of labels."""
        task = self.data.task
        for images, _ in batches:
            yield images, task.answers(task.joined(module_outputs(self.module.teacher[0], images)))
