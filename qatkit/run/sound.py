"""A model that computes the features of recordings itself: the run puts them in front of it, and leaves them float."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qatkit.config.schema import Config, OverrideConfig
from qatkit.config.selectors import every_override
from qatkit.data.recordings import recordings_of
from qatkit.models.onnx_files import PREFIX
from qatkit.models.sound_features import FEATURES, WithFeatures


def with_features(config: Config, model: nn.Module) -> nn.Module:
    """Returns a model that accepts the data: itself, or with `data.features_in=graph` with the features in front.

    An ONNX file that takes samples includes its features.
    """
    if not _in_front(config):
        return model
    return WithFeatures(recordings_of(config.data).sound, model).train(model.training)


def overrides_of(config: Config) -> Mapping[str, OverrideConfig]:
    """Returns the overrides of a run: its own, and those of `backend.exclude` and `only`.

    They follow the one that leaves features in the graph float.
    """
    own = {f"{FEATURES}.*": OverrideConfig(float=True)} if _in_front(config) else {}
    return own | every_override(config.backend)


def _in_front(config: Config) -> bool:
    return config.data.features_in == "graph" and not config.model.name.startswith(PREFIX)
