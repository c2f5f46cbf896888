"""Builds the data and the prepared module of a run from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from qatkit import models
from qatkit.algorithms.base import algorithms_of
from qatkit.config.argv import left_open
from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import Config
from qatkit.config.schema.model import TEXT
from qatkit.config.selectors import naming_the_list
from qatkit.data import DataModule
from qatkit.data.inputs import ArrayInputs, Batch, Inputs
from qatkit.graph.captured import Captured
from qatkit.models.onnx_files import PREFIX
from qatkit.run.backend import backend_of
from qatkit.run.declared_images import check_channels, other_images, other_recordings
from qatkit.run.folder import main_process, say
from qatkit.run.loop.fit import batches_a_step
from qatkit.run.memory import check_inputs
from qatkit.run.quantizers import quantizers_of
from qatkit.run.sound import overrides_of
from qatkit.tasks import task_of
from qatkit.train.module import QATModule
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError

_EXAMPLE = 48  # tokens
LEAST_IMAGES = 32  # images needed to choose methods or algorithms: of fewer, fewer than 8 are held out


def data_of(config: Config) -> DataModule:
    """Returns the data of a run after checking that it suffices for the stages of the run.

    A batch size that the user has not set is reduced to the number of images, with a note.

    Raises:
        ConfigError: the data do not suffice for a stage, do not fit into memory, or lack labels or pictures that a
            setting needs; or `opened_data` raises it.
    """
    data = opened_data(config)
    if not data.labelled:
        check_unlabelled(config)
    if not data.of_pictures:
        check_arrays(config)
    if config.schedule.epochs or config.schedule.float_epochs:
        if left_open("data.batch_size"):
            data.adapt_batch(batches_a_step(config.trainer))
        data.steps_per_epoch(batches_a_step(config.trainer))  # at least one image
    if config.export.mode == "static":
        chosen, least = config.calibration, LEAST_IMAGES if holds_out(config) else 1
        adapt = left_open("calibration.batch_size")
        data.check_calibration(chosen.images, chosen.batch_size, least, adapt=adapt)
    for note in data.notes:
        say(f"note: {note}")
    check_inputs(config, data)
    return data


def opened_data(config: Config) -> DataModule:
    """Returns the data of a run without checking what its stages need.

    Raises:
        ConfigError: the channels of the images differ from those that the model declares, or `DataModule`
            raises it.
    """
    told = models.declared(config.model, config.data.layout, config.task)
    size = None
    if told.image is not None:
        size = told.image.size(config.data.image_size, config.model.name.removeprefix(PREFIX))
    data = DataModule(
        config.data,
        resolve(config.data.source, "data.source"),
        config.seed,
        models.weights_preprocessing(config.model, config.task) or told.preprocessing,
        progress=config.trainer.progress and main_process(),
        held_out=held_out(config),
        task=task_of(config.task, config.verify.decision),
        ports=told.ports,
        states=models.states(config.model),
        image_size=size,
        about=told.about,
    )
    if config.data.source == TEXT and isinstance(data.inputs, ArrayInputs):
        data.inputs = replace(data.inputs, lengths=_short(config, data.inputs))
    if data.of_pictures:
        check_channels(config, told.image, data.preprocessing)
        data.notes = (*other_images(config.model, told.preprocessing, data.preprocessing), *data.notes)
    if data.recordings is not None:
        data.notes = (*other_recordings(config.model, told.recordings, data.about_inputs()), *data.notes)
    return data


def _short(config: Config, inputs: ArrayInputs) -> dict[str, dict[int, int]]:
    """Returns {input: {axis: length in the example}} for the axes of a text that `export.dynamic_axes` names.

    The result is empty if the model has several inputs, or if no axes are named (none, auto). The capture ends
    the run if the model does not support other lengths along the named axes.
    """
    named = config.export.dynamic_axes
    if isinstance(named, str) or not inputs.lone:
        return {}
    (name,), (axes, *_) = inputs.samples, named.values()
    return {name: {axis: _EXAMPLE for axis in axes if axis != inputs.axes[name]}}


def held_out(config: Config) -> int | None:
    """Returns how many training images `DataModule` holds out: 0 if nothing uses them; None for its default share."""
    return config.verify.held_out if config.verify.validation or chooses_epochs(config) else 0


def chooses_epochs(config: Config) -> bool:
    """Returns whether the best epoch is chosen by the accuracy of its file on held-out training images."""
    return config.verify.every is not None and config.schedule.epochs > 0


def holds_out(config: Config) -> bool:
    """Returns whether some calibration images are held out, to judge candidates calibrated on the others."""
    searches = (config.calibration.search == "tournament", config.algorithm_choice == "auto")
    return any(searches) or config.precision.search == "auto"


def check_unlabelled(config: Config) -> None:
    """Checks that images without labels are only used to calibrate, verify, or learn the float model's outputs.

    Raises:
        ConfigError: a stage needs labels.
    """
    schedule, without = config.schedule, f"data.source={config.data.source}, which has no labels"
    if schedule.float_epochs:
        allowed = f"0 with {without} (schedule=calibrate_only)"
        raise ConfigError("schedule.float_epochs", schedule.float_epochs, allowed)
    if schedule.epochs and schedule.distill < 1:
        allowed = (
            f"0 with {without} (schedule=calibrate_only), or schedule.distill=1, "
            "which learns from the float model"
        )
        raise ConfigError("schedule.epochs", schedule.epochs, allowed)
    if config.verify.control:
        allowed = f"false with {without}, so that the accuracy of a control cannot be measured"
        raise ConfigError("verify.control", True, allowed)


def check_arrays(config: Config) -> None:
    """Rejects settings that only apply to pictures.

    Raises:
        ConfigError: a bundle's demo page (which shows pictures) or uint8 inputs and outputs are requested.
    """
    source = f"data.source={config.data.source}"
    if config.export.demo:
        raise ConfigError("export.demo", True, f"false with {source}, since the demo only shows pictures")
    if config.export.io == "uint8":
        allowed = f"float32 with {source}, since only pictures have uint8 pixels"
        raise ConfigError("export.io", "uint8", allowed)


def qat_module(
    config: Config,
    model: nn.Module | Captured,
    inputs: Inputs,
    module_type: type[QATModule],
    *,
    quantize: bool = True,
    algorithms: Sequence[str] | None = None,
    floats: Iterable[str] = (),
) -> QATModule:
    """Returns the prepared module; with `quantize=False`, the float control.

    Args:
        model: the float model. A captured one is traced and checked when the first module is made from it.
        algorithms: the names of the configured algorithms to use; None means all.
        floats: the sites of operators that stay float in addition to those of the overrides.
    """
    known = algorithms_of(config.algorithm)
    with naming_the_list(config.backend):
        module = module_type(
            model,
            inputs.example(2),
            config.schedule,
            backend_of(config),
            {**overrides_of(config), **float_overrides(floats)},
            quantizers_of(config),
            algorithms=[one for name, one in known.items() if algorithms is None or name in algorithms],
            quantize=quantize,
            task=task_of(config.task, config.verify.decision),
        )
    module.mixed_scales = config.calibration.mixed_scales
    module.mean_shifts = config.calibration.mean_shifts
    module.progress = config.trainer.progress and main_process()
    return module


def captured(config: Config, model: nn.Module, inputs: Inputs) -> Captured:
    """Returns the captured float model from which all modules of a run are made (`qat_module`).

    The example has two samples, since the exporter might treat a batch size of one as a constant.
    """
    return Captured(model, inputs.example(2), config.export.dynamic_axes)


def example_batch(config: Config, inputs: Inputs) -> Batch:
    """Returns the example batch for the export. A file with a fixed batch size gets a batch of that size."""
    return inputs.example(examples(config))


def examples(config: Config) -> int:
    """Returns the number of samples in the example batch for the export."""
    return 2 if config.export.dynamic_batch else config.verify.latency_batch
