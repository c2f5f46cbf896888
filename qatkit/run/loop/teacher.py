"""The teacher of a fine-tuning: the float model itself or another model, which is checked before the long stages."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from qatkit import models
from qatkit.config.schema import Config, ModelConfig
from qatkit.data import DataModule
from qatkit.graph.phase import inference
from qatkit.graph.signature import call, output_leaves
from qatkit.run.sound import with_features
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import described

_NAME, _FILE = "schedule.distill_teacher", "schedule.distill_checkpoint"


def teacher_of(config: Config, data: DataModule) -> nn.Module | None:
    """Returns the model of `schedule.distill_teacher` and `schedule.distill_checkpoint`.

    None means that the float model itself is the teacher. The teacher gets the same images as the student.

    Raises:
        ConfigError: the teacher cannot be built, does not accept the images, or has other classes than the
            data.
    """
    name, file = config.schedule.distill_teacher, config.schedule.distill_checkpoint
    if name is None and file is None:
        return None
    key, shown = (_NAME, name) if name is not None else (_FILE, file)
    own = replace(config.model, weights=None)  # without a name, the file has weights of the run's own model
    wanted = own if name is None else ModelConfig(name, weights=_pretrained(name, file))
    try:
        if wanted.weights is not None:
            _check_classes(models.weights_classes(wanted), data, key, shown)
        classes = None if wanted.weights else data.num_classes
        teacher = with_features(config, models.build(replace(wanted, checkpoint=file), classes, config.task))
    except ConfigError as error:
        if not error.key.startswith("model."):
            raise
        given = _FILE if error.key.startswith("model.checkpoint") else _NAME
        raise ConfigError(given, error.value, reason=error.problem) from error
    _check(teacher, data, key, shown)
    return teacher


def _pretrained(name: str, file: str | None) -> str | None:
    """Returns the name of the pretrained weights to load.

    None if `file` has the weights, or for a user's own builder, which loads them itself.
    """
    return "DEFAULT" if file is None and models.has_weights(name) else None


def _check(teacher: nn.Module, data: DataModule, key: str, shown: str | None) -> None:
    batch = data.first_batch(2)
    try:
        with inference(teacher):
            output = output_leaves(call(teacher, batch))[1][0]
    except Exception as error:  # a forward pass may raise any error
        reason = f"the teacher failed on {data.inputs.text}, as {data.inputs.said_by} ({described(error)})"
        raise ConfigError(key, shown, reason=reason) from error
    width = data.task.width_of(output.shape) if isinstance(output, Tensor) else None
    if width is None:
        found = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        wanted = f"a model that returns {data.task.names.outputs} {data.task.shape_text(None)}; it returned {found}"
        raise ConfigError(key, shown, wanted)
    _check_classes(width, data, key, shown)


def _check_classes(count: int | None, data: DataModule, key: str, shown: str | None) -> None:
    if None not in (count, data.num_classes) and count != data.num_classes:
        allowed = f"a teacher with the {data.num_classes} classes of the data; the given one has {count}"
        raise ConfigError(key, shown, allowed)
