"""Outputs used only in training, by torchvision's convention: {"out": logits, "aux": logits of an auxiliary head}.

A task defines which output names are auxiliary (`Task.auxiliary`). They are used in training and are not
exported. A model that declares `inference_outputs` has made its own choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from qatkit.config.schema import Config
from qatkit.importing import ImportedModel
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError


def with_auxiliary(config: Config, model: nn.Module) -> nn.Module:
    """Sets the names of the training-only outputs, which `outputs_in_inference` reads; returns the model.

    A model imported from an ONNX file keeps all its outputs.
    """
    names = task_of(config.task).auxiliary
    if names and not isinstance(model, ImportedModel):
        model.auxiliary_outputs = tuple(names)  # type: ignore[assignment]
    return model


def check_auxiliary(config: Config, model: nn.Module, outputs: Mapping[str, Tensor]) -> None:
    """Rejects auxiliary outputs that training can't use.

    Raises:
        ConfigError: an auxiliary output precedes one that is not auxiliary, or, if the run trains, its shape differs
            from that of 'out'.
    """
    marked = getattr(model, "auxiliary_outputs", ())
    if getattr(model, "inference_outputs", None) is not None or "out" not in outputs or not marked:
        return
    names, found = list(outputs), [name for name in outputs if name in marked]
    if found and names[-len(found) :] != found:
        allowed = (
            f"a model that returns 'out' first and '{found[0]}' last; the model returns {', '.join(names)}"
        )
        raise ConfigError("model.name", config.model.name, allowed)
    trains = config.schedule.float_epochs > 0 or config.schedule.epochs > 0
    for name in found if trains else ():
        own, wanted = (list(one.shape) for one in (outputs[name], outputs["out"]))
        if own != wanted:
            allowed = f"a model whose '{name}', trained together with 'out', has shape {wanted}"
            raise ConfigError("model.name", config.model.name, f"{allowed}; '{name}' has shape {own}")
