"""Checks that a model can be trained, and that a head without weights is trained."""

from __future__ import annotations

from torch import nn

from qatkit.config.schema import Config
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError


def check_trains(model: nn.Module, config: Config) -> None:
    """Checks, if the run trains, that the model has trainable parameters and a loss.

    Raises:
        ConfigError: all parameters are frozen, or the task has no loss for the model.
    """
    schedule, parameters = config.schedule, list(model.parameters())
    if (
        (schedule.epochs or schedule.float_epochs)
        and parameters
        and not any(p.requires_grad for p in parameters)
    ):
        allowed = (
            "a model with trainable parameters; all parameters of this model have requires_grad=False, so use"
            " schedule=calibrate_only"
        )
        raise ConfigError("model.name", config.model.name, allowed)
    of_targets = schedule.float_epochs or (schedule.epochs and schedule.distill < 1)
    if of_targets and (wanted := task_of(config.task).of_model(model).untrainable):
        raise ConfigError("model.name", config.model.name, wanted)


def check_head(model: nn.Module, config: Config) -> None:
    """Checks that the weights of a new head are loaded or trained in float first.

    Raises:
        ConfigError: the head would stay untrained.
    """
    fresh = getattr(model, "fresh_head", ())
    if fresh and not config.schedule.float_epochs:
        reason = (
            f"{config.model.name} has no pretrained weights for this head ({fresh[0]}); train the float model"
            " first (schedule.float_epochs=3 schedule.float_lr=5e-5 schedule.optimizer=adamw)"
        )
        raise ConfigError("model.weights", config.model.weights, reason=reason)
