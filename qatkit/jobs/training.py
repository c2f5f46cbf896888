"""The training stages: of the float model, of the quantized model, and of the float control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
from torch import Tensor, nn

from qatkit.algorithms.base import OBSERVED
from qatkit.choose.epochs import Choosing, make_ready
from qatkit.choose.placement.measured import about_placement
from qatkit.config.schema import ModelConfig
from qatkit.data import DataModule
from qatkit.graph.phase import inference
from qatkit.graph.signature import inputs_of
from qatkit.jobs.calibrate import forget_partial
from qatkit.jobs.prepare import module_of
from qatkit.jobs.stages import Always, Conditional, State
from qatkit.records.plan import Planned
from qatkit.records.run_files import CHECKPOINT_FILE, CONTROL_CHECKPOINT, FLOAT_CHECKPOINT
from qatkit.run.build import chooses_epochs
from qatkit.run.folder import Run, read_checkpoint
from qatkit.run.loop.fit import Stage, batches_a_step, fit
from qatkit.run.loop.validation import Validating
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.run.timing import Parts
from qatkit.run.tracking import tracker
from qatkit.train.learner import FloatModule, Learner
from qatkit.train.module import QATModule
from qatkit.warning import warn
from qatkit_verify.errors import counted

_SGD_AND_SCALES = (
    "schedule.optimizer=sgd is used with an algorithm that rescales channels (SmoothQuant): its steps depend on the"
    " scale of a weight, and accuracy can fall; schedule.optimizer=adamw is not affected"
)


class TrainFloat(Conditional):
    """Trains the float model; the module is then built again."""

    def done(self, state: State) -> bool:
        return not state.run.config.schedule.float_epochs

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        epochs = state.run.config.schedule.float_epochs
        if not epochs:
            return ()
        training = Length(state, FLOAT_CHECKPOINT, epochs, None)
        done = state.stored is not None or training.finished

        def seconds() -> float:
            judging = training.judged * pace.forward if epochs > 1 else 0.0
            return training.seconds(pace.float_step, pace.load) + judging

        return (stage("float_training", training.text, seconds, done=done),)

    def run(self, state: State) -> State:
        train_float(state.run, state.model, state.data)
        state.captured.trained()
        return replace(state, module=None)


class FineTune(Always):
    """Fine-tunes the quantized model, and writes the checkpoint with all choices of the run, even without epochs."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        return _fine_tuning(state, pace, "QAT", CHECKPOINT_FILE)

    def run(self, state: State) -> State:
        run, module = state.run, state.prepared
        module.about |= about_placement(run) | dict(state.begun_with)
        fine_tune(run, module, state.data, CHECKPOINT_FILE, "QAT", state.teach)
        forget_partial(run)
        return state


class Control(Conditional):
    """Fine-tunes the float control: a module with the same algorithms and settings that is not quantized."""

    def done(self, state: State) -> bool:
        return not state.run.config.verify.control

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        if self.done(state):
            return ()
        return _fine_tuning(state, pace, "float_control", CONTROL_CHECKPOINT)

    def run(self, state: State) -> State:
        control = module_of(replace(state, stored=state.prepared.about), quantize=False)
        fine_tune(state.run, control, state.data, CONTROL_CHECKPOINT, "float control", state.teach)
        return replace(state, control=control)


@dataclass(frozen=True)
class Length:
    """The length of a training, and the part that remains in a resumed run.

    Attributes:
        state: the state of the run.
        checkpoint: the name of the training's checkpoint in the run's folder.
        epochs: the number of epochs.
        most: the maximum number of optimizer steps; None means no limit.
    """

    state: State
    checkpoint: str
    epochs: int
    most: int | None

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        steps = self.epochs * self._an_epoch
        return steps if self.most is None else min(steps, self.most)

    @property
    def finished(self) -> bool:
        """Returns whether the checkpoint is that of the finished training."""
        return bool(self._stored.get("finished"))

    @property
    def text(self) -> str:
        """A description of the length for the plan."""
        done = int(self._stored.get("global_step", 0))
        images = self._images
        begun = f", {done:,} of them done" if done and not self.finished else ""
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        names = self.state.data.task.names
        return f"{epochs}, {counted(self.steps, 'step')} of {images:,} {names.samples}{begun}"

    @property
    def judged(self) -> float:
        """The number of samples on which the remaining epochs are judged, summed over these epochs."""
        return self._share * self.epochs * self.state.data.validation_count

    def seconds(self, step: Parts, load: float) -> float:
        """Returns the duration of the remaining steps in seconds.

        Args:
            step: the time of a training step.
            load: the seconds to load a sample.
        """
        config = self.state.run.config
        each = self.state.data.config.batch_size * (step.each + load) * config.trainer.accumulate
        return self._share * self.steps * (each + step.once)

    @property
    def _share(self) -> float:
        return max(0.0, 1 - int(self._stored.get("global_step", 0)) / max(1, self.steps))

    @property
    def _images(self) -> int:
        return self.state.data.config.batch_size * batches_a_step(self.state.run.config.trainer)

    @property
    def _an_epoch(self) -> int:
        return self.state.data.steps_per_epoch(batches_a_step(self.state.run.config.trainer))

    @cached_property
    def _stored(self) -> Mapping[str, Any]:
        path = self.state.run.folder / self.checkpoint
        return read_checkpoint(str(path), "resume") if path.is_file() else {}


def _fine_tuning(state: State, pace: Pace, name: str, checkpoint: str) -> Sequence[Planned]:
    """Returns the rows of a fine-tuning in the plan; the time includes the evaluation of its epochs."""
    config = state.run.config
    schedule = config.schedule
    if not schedule.epochs:
        return ()
    training = Length(state, checkpoint, schedule.epochs, schedule.max_steps)
    quantized = name == "QAT"

    def seconds() -> float:
        step = pace.step if quantized else pace.float_step
        judging, samples = 0.0, training.judged
        if chooses_epochs(config):
            samples /= config.verify.every or 1
            judging = pace.file("int8") if quantized else pace.forward
        elif schedule.epochs > 1 and state.data.labelled:
            judging = pace.simulated if quantized else pace.forward
        return training.seconds(step, pace.load) + samples * judging

    return (stage(name, training.text, seconds, done=training.finished),)


def train_float(run: Run, model: nn.Module, data: DataModule) -> None:
    """Trains, in place, the float model that is quantized later."""
    config = run.config
    module = FloatModule(model, config.schedule, data.task)
    path = run.folder / FLOAT_CHECKPOINT
    with run.stage("float_training", f"training the float model{_from(path)}"):
        epochs = config.schedule.float_epochs
        judging = _validating(run, module, data, path, "float", epochs)
        trained = Stage("float", epochs, judging=judging, logger=tracker(run, "float"),
                      finish=module.take_average)  # fmt: skip
        fit(module, data, path, config.trainer, trained)
    run.curves["float"] = module.curve
    model.cpu().eval()


def fine_tune(
    run: Run,
    module: QATModule,
    data: DataModule,
    checkpoint: str,
    title: str,
    teach: Callable[[QATModule], None] | None = None,
) -> None:
    """Trains with the QAT schedule and Lightning's Trainer; without epochs, only the checkpoint is written.

    Args:
        run: the run.
        module: the module to train.
        data: the data to train on.
        checkpoint: the name of the checkpoint in the run's folder.
        title: the title of the stage.
        teach: a function that sets another teacher than the float model on the module.
    """
    config, path = run.config, run.folder / checkpoint
    if teach is not None:
        teach(module)
    lightning.seed_everything(config.seed, verbose=False)
    module.learn(data.task)  # this task includes what `Task.of_data` found in the data
    classes = data.num_classes or _own_width(module, config.model)
    if config.schedule.epochs and config.schedule.optimizer == "sgd" and module.of_stage(OBSERVED):
        warn(_SGD_AND_SCALES)
    module.about |= {**data.inputs.stored(), "num_classes": classes}
    with run.stage(
        title.replace(" ", "_"), f"fine-tuning: {title}{_from(path)}" if config.schedule.epochs else ""
    ):
        choosing = _choosing(run, module, data, path, title)
        trained = Stage(
            title,
            config.schedule.epochs,
            config.schedule.max_steps,
            judging=choosing or _validating(run, module, data, path, title, config.schedule.epochs),
            logger=tracker(run, title),
            finish=choosing.end if choosing else lambda: make_ready(run, module, data),
        )
        fit(module, data, path, config.trainer, trained)
    run.curves[title] = module.curve
    module.cpu().eval()
    for teacher in module.teacher:
        teacher.cpu()  # the float model will be exported, which happens on the CPU
    module.ready_to_convert()


def _validating(
    run: Run, module: Learner, data: DataModule, checkpoint: Path, title: str, epochs: int
) -> Validating | None:
    """Returns the callback that validates each epoch; None for a single epoch or data without labels."""
    if epochs < 2 or not data.labelled:
        return None
    trainer = run.config.trainer
    an_epoch = data.steps_per_epoch(batches_a_step(trainer))
    return Validating(module, data, checkpoint, an_epoch, title if trainer.progress else None)


def _choosing(run: Run, module: QATModule, data: DataModule, checkpoint: Path, title: str) -> Choosing | None:
    """Returns the callback that chooses the best epoch if requested, else None."""
    every, trainer = run.config.verify.every, run.config.trainer
    if every is None or not chooses_epochs(run.config):
        return None
    return Choosing(
        run, module, data, checkpoint, every * data.steps_per_epoch(batches_a_step(trainer)), title
    )


def _own_width(module: QATModule, model: ModelConfig) -> int | None:
    """Returns the number of classes that is configured or else, with pretrained weights, that of the model's output.

    It is None if neither is known.
    """
    if model.num_classes is not None or model.weights is None:
        return model.num_classes
    with inference(module.graph):
        outputs = module.graph(*inputs_of(module.graph, module.example))
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    return module.task.width_of(output.shape) if isinstance(output, Tensor) else None


def _from(checkpoint: Path) -> str:
    return f", from {checkpoint.name}" if checkpoint.is_file() else ""
