"""Builds the float model of a run, and checks it on a batch of the run's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from qatkit import models
from qatkit.config.schema import Config, ModelConfig
from qatkit.data import DataModule
from qatkit.data.inputs import Batch
from qatkit.graph.phase import inference
from qatkit.graph.signature import call, output_leaves
from qatkit.importing import ImportedModel, prove_import
from qatkit.run.auxiliary_outputs import check_auxiliary, with_auxiliary
from qatkit.run.build import examples
from qatkit.run.memory import Cost, check_model, check_weights_fit, measured
from qatkit.run.sound import with_features
from qatkit.run.trainable import check_head, check_trains
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.feeds import by_name
from qatkit_verify.foreign import described


def built(config: Config, data: DataModule) -> nn.Module:
    """Returns the model after a check on one batch: memory, time, and finite outputs that suit the task.

    Raises:
        ConfigError: the model cannot be trained as requested, or has a new head that would stay untrained; the memory
            does not suffice, or a stage would take over a year; the forward pass fails, or the outputs do not suit
            the task.
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
            "0 with a model whose outputs are all integers, which have no gradient (use recipe=onnx_ptq)"
        )
        raise ConfigError("schedule.epochs", config.schedule.epochs, allowed)
    data.task = data.task.suited([one.numpy() for one in tensors], list(outputs), count)
    check_model(config, data, cost)
    return model


@contextmanager
def naming_the_file(model: nn.Module) -> Iterator[None]:
    """Makes errors of an imported model name its file instead of a class that users do not know."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(model, ImportedModel) or error.value != type(model).__name__:
            raise
        raise ConfigError("onnx", model.file, reason=error.problem) from error


def float_model(config: Config, wanted: ModelConfig, classes: int | None = None) -> nn.Module:
    """Returns the float model of a run; with `data.features_in=graph` it computes the features of recordings itself.

    Raises:
        ConfigError: `models.build` raises it.
    """
    return with_auxiliary(config, with_features(config, models.build(wanted, classes, config.task)))


def _fits(outputs: Mapping[str, Tensor], config: Config, data: DataModule) -> bool:
    """Returns whether the shape of the first output suits the task, with a row for each sample."""
    count, width = data.rows(examples(config)), data.num_classes if data.labelled else None
    first = next(iter(outputs.values()), None)
    return first is not None and data.task.fits(first.shape, count, width)


def _one_at_a_time(model: nn.Module, data: DataModule) -> bool:
    """Sets batches of one sample for the data and the capture; returns whether this changes anything."""
    changed = data.one_at_a_time()
    if changed and isinstance(model, ImportedModel):
        model.batch_axes = dict.fromkeys(model.inputs)
    return changed


def _alone_alike(model: nn.Module, outputs: Mapping[str, Tensor], data: DataModule) -> bool:
    """Returns whether the outputs of an imported file have as many axes for one sample as for several.

    A Squeeze without axes, for example, removes the batch axis of a single sample.
    """
    if not isinstance(model, ImportedModel) or not data.of_arrays or data.rows(2) < 2:
        return True
    with inference(model):
        _, alone, _ = output_leaves(call(model, data.first_batch(1)))
    return [one.ndim for one in alone] == [one.ndim for one in outputs.values()]


def _outputs_of(model: nn.Module, config: Config, data: DataModule) -> tuple[dict[str, Tensor], Cost]:
    """Returns the named outputs for a batch and the cost of the pass; an imported file is checked on the same batch.

    Raises:
        ConfigError: the forward pass fails.
    """
    count = data.rows(examples(config))
    batch = data.first_batch(count)
    try:
        with inference(model):
            given, cost = measured(model, batch, count)
        names, tensors, _ = output_leaves(given)
    except ConfigError:
        raise
    except Exception as error:  # a forward pass may raise any error
        reason = f"the model failed on {data.inputs.text}, as {data.inputs.said_by} ({described(error)})"
        raise ConfigError("model.name", config.model.name, reason=f"{reason}{data.splits.advice}") from error
    if isinstance(model, ImportedModel):
        try:
            prove_import(model, feeds_of(model, batch))
        except ConfigError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            reason = f"ONNX Runtime failed on {data.inputs.text} ({described(error)}){data.splits.advice}"
            raise ConfigError("onnx", model.file, reason=reason) from error
        names = model.outputs
    return dict(zip(names, tensors, strict=True)), cost


def feeds_of(model: ImportedModel, batch: Batch) -> dict[str, NDArray[Any]]:
    """Returns a batch as arrays, keyed by the names of the file's inputs."""
    return {name: one.numpy() for name, one in by_name(model.inputs, batch).items()}


def _wrong_output(output: Tensor | None, count: int, data: DataModule) -> str:
    """Returns the output that the task expects for `count` images and what is wrong with the given one, as text.

    The result is "" if the given output is finite and suits the task.
    """
    task, width = data.task, data.num_classes if data.labelled else None
    name = task.names.outputs
    kind = "" if task.every_output else "float "
    given = counted(count, task.names.sample)
    told = f"a model that returns {kind}{name} {task.shape_text(width)}; for {given} it returned "
    if output is None:
        return f"{told}no tensor"
    if not task.fits(output.shape, count, width) or not (task.every_output or output.is_floating_point()):
        return f"{told}{str(output.dtype).removeprefix('torch.')} {list(output.shape)}"
    return (
        ""
        if output.isfinite().all()
        else f"a model with finite {name}; for {given} it returned NaN or infinity"
    )
