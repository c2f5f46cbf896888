"""A model that computes the features of recordings itself: what a run puts in front of it, and leaves float."""

from __future__ import annotations

from torch import nn

from qatkit.config.schema import DataConfig, OverrideConfig
from qatkit.data.recordings import recordings_of
from qatkit.models.sound_features import FEATURES, WithFeatures


def with_features(config: DataConfig, model: nn.Module) -> nn.Module:
    """Returns a model that takes what the data give: itself, or with `data.features_in=graph` behind its features."""
    if config.features_in != "graph":
        return model
    return WithFeatures(recordings_of(config).sound, model).train(model.training)


def features_overrides(config: DataConfig) -> dict[str, OverrideConfig]:
    """Returns the override that leaves features in the graph float; none without them."""
    return {f"{FEATURES}.*": OverrideConfig(float=True)} if config.features_in == "graph" else {}
