"""Builds the parts of a run from its configuration: data, backend, observers, quantizers, and the prepared module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from qatkit import models
from qatkit.algorithms.base import algorithms_of
from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import CalibrationConfig, Config, ModelConfig
from qatkit.config.schema.model import TEXT
from qatkit.config.selectors import naming_the_list
from qatkit.data import DataModule
from qatkit.data.inputs import ArrayInputs, Batch, Inputs
from qatkit.graph.captured import Captured
from qatkit.graph.phase import inference
from qatkit.graph.signature import call, output_leaves
from qatkit.importing import ImportedModel, prove_import
from qatkit.models.onnx_files import PREFIX
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import HistogramObserver, Observer
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit.run.auxiliary_outputs import check_auxiliary, with_auxiliary
from qatkit.run.backend import backend_of
from qatkit.run.declared_images import check_channels, other_images, other_recordings
from qatkit.run.folder import main_process, say
from qatkit.run.loop.fit import batches_a_step
from qatkit.run.memory import Cost, check_inputs, check_model, check_weights_fit, measured
from qatkit.run.sound import overrides_of, with_features
from qatkit.run.trainable import check_head, check_trains
from qatkit.tasks import task_of
from qatkit.train.module import QATModule
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import by_name
from qatkit_verify.foreign import described

_EXAMPLE = 48  # tokens
LEAST_IMAGES = 32  # needed to choose methods or algorithms: with fewer, fewer than 8 are held out


def data_of(config: Config) -> DataModule:
    """Returns the data of a run, checked for the needs of its stages.

    Raises:
        ConfigError: as in `DataModule`, or too few images for a batch.
    """
    data = opened_data(config)
    for note in data.notes:
        say(f"note: {note}")
    if not data.labelled:
        check_unlabelled(config)
    if not data.of_pictures:
        check_arrays(config)
    if config.schedule.epochs or config.schedule.float_epochs:
        data.steps_per_epoch(batches_a_step(config.trainer))  # at least one
    if config.export.mode == "static":
        chooses = holds_out(config)
        least = LEAST_IMAGES if chooses else 1
        data.check_calibration(config.calibration.images, config.calibration.batch_size, least)
    check_inputs(config, data)
    return data


def opened_data(config: Config) -> DataModule:
    """Returns the data of a run without checks for its stages.

    Raises:
        ConfigError: as in `DataModule`, or images with other channels than the model declares.
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
    """Returns the lengths of a text example along axes that are requested by name.

    These axes must be free, or the capture ends the run.
    """
    named = config.export.dynamic_axes
    if isinstance(named, str) or not inputs.lone:
        return {}
    (name,), (axes, *_) = inputs.samples, named.values()
    return {name: {axis: _EXAMPLE for axis in axes if axis != inputs.axes[name]}}


def held_out(config: Config) -> int | None:
    """Returns how many training images are held out, in the form of `DataModule`."""
    return config.verify.held_out if config.verify.validation or chooses_epochs(config) else 0


def chooses_epochs(config: Config) -> bool:
    """Returns whether the kept epoch is chosen by its file, on training images held out for that."""
    return config.verify.every is not None and config.schedule.epochs > 0


def holds_out(config: Config) -> bool:
    """Returns whether some of the calibration images are held out, to judge the result of the others."""
    searches = (config.calibration.search == "tournament", config.algorithm_choice == "auto")
    return any(searches) or config.precision.search == "auto"


def check_unlabelled(config: Config) -> None:
    """Checks that images without labels only calibrate, verify, and fine-tune towards the float model's outputs.

    Raises:
        ConfigError: a stage that needs labels.
    """
    schedule, without = config.schedule, f"data.source={config.data.source}, which has no labels"
    if schedule.float_epochs:
        allowed = f"0 with {without} (schedule=calibrate_only)"
        raise ConfigError("schedule.float_epochs", schedule.float_epochs, allowed)
    if schedule.epochs and schedule.distill < 1:
        allowed = (
            f"0 with {without} (schedule=calibrate_only), or schedule.distill=1, which learns from float"
        )
        raise ConfigError("schedule.epochs", schedule.epochs, allowed)
    if config.verify.control:
        allowed = f"false with {without}: the accuracy of a control is not known"
        raise ConfigError("verify.control", True, allowed)


def built(config: Config, data: DataModule) -> nn.Module:
    """Returns the model, checked on a batch: memory, time, and finite outputs of the kind that the task needs.

    Raises:
        ConfigError: no parameter can be trained where training is requested, the forward pass fails, or its
            outputs do not fit.
    """
    check_weights_fit(config, models.parameters(config.model))
    model = float_model(config, config.model, data.num_classes)
    check_trains(model, config)
    check_head(model, config)
    try:
        outputs, cost = _outputs_of(model, config, data)
        several = _fits(outputs, config, data) and _alone_alike(model, outputs, data)
        again = not several and _one_at_a_time(model, data)
    except ConfigError:
        if not _one_at_a_time(model, data):
            raise
        again = True
    if again:
        outputs, cost = _outputs_of(model, config, data)
    count, tensors = data.rows(examples(config)), list(outputs.values())
    if wanted := _wrong_output(tensors[0] if tensors else None, count, data):
        raise ConfigError("model.name", config.model.name, wanted)
    check_auxiliary(config, model, outputs)
    if config.schedule.epochs and not any(one.is_floating_point() for one in tensors):
        allowed = (
            "0 with a model that gives whole numbers alone, which no gradient leads to (recipe=onnx_ptq)"
        )
        raise ConfigError("schedule.epochs", config.schedule.epochs, allowed)
    data.task = data.task.suited([one.numpy() for one in tensors], list(outputs), count)
    check_model(config, data, cost)
    return model


@contextmanager
def naming_the_file(model: nn.Module) -> Iterator[None]:
    """Makes errors of an imported model name its file instead of a class that the user does not know."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(model, ImportedModel) or error.value != type(model).__name__:
            raise
        raise ConfigError("onnx", model.file, reason=error.problem) from error


def float_model(config: Config, wanted: ModelConfig, classes: int | None = None) -> nn.Module:
    """Returns the float model of a run, with the features of recordings in front of it where the graph has them.

    Raises:
        ConfigError: as in `models.build`.
    """
    return with_auxiliary(config, with_features(config, models.build(wanted, classes, config.task)))


def _fits(outputs: Mapping[str, Tensor], config: Config, data: DataModule) -> bool:
    """Returns whether the first output has a row for each sample."""
    count, width = data.rows(examples(config)), data.num_classes if data.labelled else None
    first = next(iter(outputs.values()), None)
    return first is not None and data.task.fits(first.shape, count, width)


def _one_at_a_time(model: nn.Module, data: DataModule) -> bool:
    """Makes every batch a single sample, for the data and for the capture; returns whether that is a change."""
    changed = data.one_at_a_time()
    if changed and isinstance(model, ImportedModel):
        model.batch_axes = dict.fromkeys(model.inputs)
    return changed


def _alone_alike(model: nn.Module, outputs: Mapping[str, Tensor], data: DataModule) -> bool:
    """Returns whether an imported file gives outputs of as many axes for one sample as for several.

    A Squeeze without axes, for example, removes the batch axis of a single sample.
    """
    if not isinstance(model, ImportedModel) or not data.of_arrays or data.rows(2) < 2:
        return True
    with inference(model):
        _, alone, _ = output_leaves(call(model, data.first_batch(1)))
    return [one.ndim for one in alone] == [one.ndim for one in outputs.values()]


def _outputs_of(model: nn.Module, config: Config, data: DataModule) -> tuple[dict[str, Tensor], Cost]:
    """Returns the outputs for a batch by their names, and their cost; an imported file is checked with it.

    Raises:
        ConfigError: an error in the forward pass.
    """
    count = data.rows(examples(config))
    batch = data.first_batch(count)
    try:
        with inference(model):
            given, cost = measured(model, batch, count)
        names, tensors, _ = output_leaves(given)
    except ConfigError:
        raise
    except Exception as error:  # whatever a forward raises
        allowed = f"a model of {data.inputs.text}, as {data.inputs.said_by} ({described(error)})"
        raise ConfigError("model.name", config.model.name, allowed) from error
    if isinstance(model, ImportedModel):
        try:
            prove_import(model, feeds_of(model, batch))
        except ConfigError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            allowed = f"a file that ONNX Runtime runs on {data.inputs.text} ({described(error)})"
            raise ConfigError("onnx", model.file, allowed) from error
        names = model.outputs
    return dict(zip(names, tensors, strict=True)), cost


def feeds_of(model: ImportedModel, batch: Batch) -> dict[str, NDArray[Any]]:
    """Returns a batch as arrays by the names of a file's inputs."""
    return {name: one.numpy() for name, one in by_name(model.inputs, batch).items()}


def _wrong_output(output: Tensor | None, count: int, data: DataModule) -> str:
    """Returns what a model should have given for `count` images; "" for finite outputs that suit the task."""
    task, width = data.task, data.num_classes if data.labelled else None
    name = task.names.outputs
    kind = "" if task.every_output else "float "
    told = f"a model that gives {kind}{name} {task.shape_text(width)}; of {count} images it gives "
    if output is None:
        return f"{told}no tensor"
    if not task.fits(output.shape, count, width) or not (task.every_output or output.is_floating_point()):
        return f"{told}{list(output.shape)} of {str(output.dtype).removeprefix('torch.')}"
    return (
        ""
        if output.isfinite().all()
        else f"a model with finite {name}; of {count} images it gives NaN or infinity"
    )


def check_arrays(config: Config) -> None:
    """Rejects settings that only apply to pictures.

    Raises:
        ConfigError: the demo page of a bundle, which shows pictures, or uint8 inputs and outputs.
    """
    of_pictures = f"with data.source={config.data.source}: it is for pictures"
    if config.export.demo:
        raise ConfigError("export.demo", True, f"false {of_pictures}")
    if config.export.io == "uint8":
        raise ConfigError("export.io", "uint8", f"float32 {of_pictures}")


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
    """Returns the prepared module; `quantize=False` makes the float control.

    Args:
        model: the float model; if captured, it is traced and checked with the first module made from it.
        algorithms: names of the configured algorithms that it gets; None: all.
        floats: sites of operators that are float in addition to the overrides.
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
    """Returns the captured float model that all modules of a run are made from (`qat_module`).

    Its example has two samples, which the exporter does not take for a constant.
    """
    return Captured(model, inputs.example(2), config.export.dynamic_axes)


def quantizers_of(config: Config) -> Quantizers:
    """Returns the arguments of `prepare_qat`.

    Raises:
        ConfigError: a class of another kind, one that does not support the backend's weights, or as in `observer_of`.
    """
    kinds = {"activation": FakeQuantize, "weight": WeightFakeQuantize}
    found, backend = {}, backend_of(config)
    for name, base in kinds.items():
        key, path = f"quantizer.{name}", getattr(config.quantizer, name)
        found[name] = resolve(path, key)
        if not (inspect.isclass(found[name]) and issubclass(found[name], base)):
            allowed = f"the dotted path of a class derived from {base.__module__}.{base.__name__}"
            raise ConfigError(key, path, allowed)
        asked = {"backend": config.backend.scale_type}
        asked |= {
            f"backend.overrides.{name}": one.scale_type for name, one in config.backend.overrides.items()
        }
        for place, kind in asked.items():
            if kind is not None and kind not in found[name].scale_types:
                raise ConfigError(key, path, f"a class that learns no scales with {place}.scale_type={kind}")
    found["weight"].check(backend.weight)
    return Quantizers(observer_of(config.calibration), **found)


def observer_of(config: CalibrationConfig) -> Callable[[], Observer]:
    """Returns the factory of the observers, with the settings that it accepts.

    Raises:
        ConfigError: no observer, a setting that it does not accept, or no histogram where a search needs one.
    """
    make: Callable[..., Observer] = resolve(config.observer, "calibration.observer")
    if not (inspect.isclass(make) and issubclass(make, Observer) and make.update is not Observer.update):
        allowed = "the dotted path of a class derived from qatkit.quant.observers.Observer that can update"
        raise ConfigError("calibration.observer", config.observer, allowed)
    settings = {"percentile": config.percentile, "deviations": config.deviations}
    given = {name: value for name, value in settings.items() if value is not None}
    taken = inspect.signature(make).parameters
    for name, value in given.items():
        if config.search != "none":
            allowed = f"null with calibration.search={config.search}, which tries its own"
            raise ConfigError(f"calibration.{name}", value, allowed)
        if name not in taken:
            allowed = f"null with calibration.observer={config.observer}, which has no such setting"
            raise ConfigError(f"calibration.{name}", value, allowed)
    missing = [p.name for p in taken.values() if p.default is p.empty and p.name not in given]
    if missing:
        allowed = f"an observer that needs no arguments (it needs {', '.join(missing)})"
        raise ConfigError("calibration.observer", config.observer, allowed)
    if config.search != "none" and not issubclass(make, HistogramObserver):
        allowed = f"an observer with a histogram, for calibration.search={config.search}"
        raise ConfigError("calibration.observer", config.observer, allowed)
    if config.search != "none" and config.random:
        allowed = f"false with calibration.search={config.search}: noise says nothing of what images clip"
        raise ConfigError("calibration.random", True, allowed)
    return functools.partial(make, **given)


def example_batch(config: Config, inputs: Inputs) -> Batch:
    """Returns a batch to export a file with; a fixed batch has exactly the file's size."""
    return inputs.example(examples(config))


def examples(config: Config) -> int:
    """Returns the number of samples in the batch that a file is exported with."""
    return 2 if config.export.dynamic_batch else config.verify.latency_batch
