"""Tests of models for recordings: DS-CNN and a conformer against their papers, features in the graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.rules import validate
from qatkit.config.schema import Config, DataConfig, ExportConfig, ModelConfig, ScheduleConfig
from qatkit.config.schema.model import TONES
from qatkit.data.tones import Tones
from qatkit.models.conformer import Conformer, ConformerBlock
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


def by_hand(block: ConformerBlock, x: Tensor, heads: int) -> Tensor:
    """Returns the output of a conformer block, computed from its weights by section 2 of the paper."""
    weights = dict(block.named_parameters()) | dict(block.named_buffers())

    def norm(y: Tensor, name: str) -> Tensor:
        deviations = y - y.mean(-1, keepdim=True)
        scaled = deviations / (deviations.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(y: Tensor, name: str) -> Tensor:
        return y @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def swish(y: Tensor) -> Tensor:
        return y / (1 + (-y).exp())

    def feed_forward(y: Tensor, name: str) -> Tensor:
        return linear(swish(linear(norm(y, f"{name}.0"), f"{name}.1")), f"{name}.4")

    x = x + feed_forward(x, "first") / 2
    name, y = "attention.attention", norm(x, "attention.norm")
    whole = y @ weights[f"{name}.in_proj_weight"].T + weights[f"{name}.in_proj_bias"]
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in whole.chunk(3, -1))
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1)
    x = x + linear((scores @ value).transpose(1, 2).flatten(2), f"{name}.out_proj")
    y = norm(x, "convolution.norm")
    y = linear(y, "convolution.value") / (1 + (-linear(y, "convolution.gate")).exp())
    taps = weights["convolution.depthwise.weight"][:, 0]
    half = taps.shape[1] // 2
    padded = F.pad(y, (0, 0, half, half))
    y = sum(padded[:, tap : tap + y.shape[1]] * taps[:, tap] for tap in range(2 * half + 1))  # type: ignore[assignment]
    mean, variance = (weights[f"convolution.batch_norm.running_{kind}"] for kind in ("mean", "var"))
    y = (y - mean) / (variance + 1e-5).sqrt()
    y = y * weights["convolution.batch_norm.weight"] + weights["convolution.batch_norm.bias"]
    x = x + linear(swish(y), "convolution.project")
    return norm(x + feed_forward(x, "last") / 2, "norm")


def test_a_conformer_block_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    block, x = ConformerBlock(16, 4, 2, 5, 0.1).eval(), torch.randn(3, 11, 16)
    for values in block.state_dict().values():
        if values.is_floating_point():
            values.copy_(0.3 * torch.randn(values.shape)).abs_()
    torch.testing.assert_close(block(x), by_hand(block, x, 4), rtol=1e-4, atol=1e-4)


def test_the_conformer_takes_any_number_of_frames() -> None:
    model = Conformer(12).eval()
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(225_000, rel=0.01)
    for shape in ((2, 1, 49, 40), (1, 1, 98, 40), (3, 1, 1, 40)):
        assert model(torch.zeros(shape)).shape == (shape[0], 12)
    assert Conformer(12, bands=10, width=16).eval()(torch.zeros(2, 1, 49, 10)).shape == (2, 12)


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
    of_file = replace(config, model=ModelConfig("onnx/model.onnx"))  # this model accepts samples itself
    assert with_features(of_file, model) is model and not overrides_of(of_file)


def test_modes_that_leave_nothing_float_take_features_alone() -> None:
    data = DataConfig(source=TONES, features_in="graph")
    config = Config(data=data, schedule=ScheduleConfig(epochs=0), export=ExportConfig(mode="float16"))
    with pytest.raises(
        ConfigError, match=r"data\.features_in=graph: expected data with export\.mode=float16"
    ):
        validate(config)
