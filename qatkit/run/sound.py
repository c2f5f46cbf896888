"""Models that compute the features of recordings themselves: the features are the first, float part of the graph."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qatkit.config.schema import Config, OverrideConfig
from qatkit.config.selectors import every_override
from qatkit.data.recordings import recordings_of
from qatkit.models.onnx_files import PREFIX
from qatkit.models.sound_features import FEATURES, WithFeatures


def with_features(config: Config, model: nn.Module) -> nn.Module:
    """Returns the model; with `data.features_in=graph`, a model that first computes the features of recordings.

    An imported ONNX file stays unchanged, since it computes its features itself if its input is samples.
    """
    if not _in_front(config):
        return model
    return WithFeatures(recordings_of(config.data).sound, model).train(model.training)


def overrides_of(config: Config) -> Mapping[str, OverrideConfig]:
    """Returns the overrides of a run: its own, and those that follow from `backend.exclude` and `backend.only`.

    If the graph computes the features of recordings, the first override keeps these operators float.
    """
    own = {f"{FEATURES}.*": OverrideConfig(float=True)} if _in_front(config) else {}
    return own | every_override(config.backend)


def _in_front(config: Config) -> bool:
    return config.data.features_in == "graph" and not config.model.name.startswith(PREFIX)
