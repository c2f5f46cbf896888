"""Models of recordings: the size of DS-CNN as published, and features in the graph against those before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from qatkit.config.rules import validate
from qatkit.config.schema import Config, DataConfig, ExportConfig, ModelConfig, ScheduleConfig
from qatkit.config.schema.model import TONES
from qatkit.data.tones import Tones
from qatkit.models.ds_cnn import ds_cnn
from qatkit.models.sound_features import SoundFeatures
from qatkit.run.sound import overrides_of, with_features
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound import SoundPreprocess


def test_the_small_ds_cnn_has_the_published_cost() -> None:
    model, counted = ds_cnn(12).eval(), list[int]()
    for one in model.modules():
        if isinstance(one, nn.Conv2d):
            one.register_forward_hook(
                lambda conv, _, out: counted.append(out[0, 0].numel() * conv.weight.numel())
            )
    assert model(torch.zeros(2, 1, 49, 10)).shape == (2, 12)
    assert 2 * sum(counted) == pytest.approx(5.4e6, rel=0.02)  # table 5 of the paper: 5.4 M operations
    weights = sum(one.weight.numel() for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear))
    assert weights == 64 * 40 + 4 * (64 * 9 + 64 * 64) + 64 * 12


@pytest.mark.parametrize("features", ["log_mel", "mfcc"])
def test_features_in_the_graph_are_those_before_it(features: str) -> None:
    sound = SoundPreprocess(8000, 4000, features, 320, 160, mean=-2.0, std=3.0)
    source = Tones(8, 4000, 8000, "graph")
    recordings = [source[index][0] for index in range(8)]
    module = SoundFeatures(sound)
    found = module(torch.from_numpy(np.stack(recordings) / np.float32(2**15)))
    np.testing.assert_allclose(found.numpy(), sound.batch(recordings), rtol=0, atol=2e-4)
    assert found.shape == (8, *sound.shape) and not any(one.requires_grad for one in module.parameters())


def test_a_model_gets_features_where_the_graph_has_them() -> None:
    model = ds_cnn(4, channels=8, blocks=1).eval()
    assert with_features(Config(data=DataConfig(source=TONES)), model) is model
    config = Config(data=DataConfig(source=TONES, features_in="graph"))
    wrapped = with_features(config, model)
    assert wrapped(torch.zeros(2, 8000)).shape == (2, 4) and not wrapped.training
    assert overrides_of(config)["features.*"].float and not overrides_of(Config())
    of_file = replace(config, model=ModelConfig("onnx/model.onnx"))  # which takes samples itself
    assert with_features(of_file, model) is model and not overrides_of(of_file)


def test_modes_that_leave_nothing_float_take_features_alone() -> None:
    data = DataConfig(source=TONES, features_in="graph")
    config = Config(data=data, schedule=ScheduleConfig(epochs=0), export=ExportConfig(mode="float16"))
    with pytest.raises(
        ConfigError, match=r"data\.features_in=graph: expected data with export\.mode=float16"
    ):
        validate(config)
