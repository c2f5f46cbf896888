"""Tests of timm models: names, construction, preprocessing, export; skipped without timm."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch
from chain import noise, run_ort, run_torch, settle, ship

from qatkit.config.schema import ModelConfig
from qatkit.models import build, weights_preprocessing
from qatkit_verify.errors import ConfigError

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


def test_without_timm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"model.name=timm/resnet18: .*extra timm"):
        build(ModelConfig("timm/resnet18"))


@needs_timm
def test_the_classes_and_arguments_reach_timm() -> None:
    model = build(ModelConfig("timm/resnet18", kwargs={"in_chans": 1}), num_classes=7)
    assert model(noise(1, 1, 64, 64)).shape == (1, 7) and not model.training


@needs_timm
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig("timm/resnet81"),
            "model.name=timm/resnet81: expected a timm model (did you mean resnet",
        ),
        (ModelConfig("timm/resnet18.a1_in1k"), "without its tag, which belongs in model.weights"),
        (
            ModelConfig("timm/resnet18", weights="nothing"),
            "model.weights=nothing: expected one of DEFAULT, a1_in1k",
        ),
        (ModelConfig("timm/resnet18", kwargs={"widht": 2}), "expected arguments that timm/resnet18 accepts"),
    ],
)
def test_mistakes_are_one_line(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@needs_timm
def test_preprocessing_is_the_one_of_the_weights() -> None:
    found = weights_preprocessing(ModelConfig("timm/vit_tiny_patch16_224", weights="DEFAULT"))
    assert found is not None
    assert (found.image_size, found.resize, found.interpolation) == (224, 248, "bicubic")
    assert found.mean == found.std == (0.5, 0.5, 0.5)
    assert weights_preprocessing(ModelConfig("timm/resnet18")) is None


@needs_timm
@pytest.mark.parametrize("name", ["regnety_002", "repvgg_a0"])
def test_norms_that_call_their_activation_are_folded(name: str) -> None:
    torch.manual_seed(0)
    model = settle(build(ModelConfig(f"timm/{name}"), num_classes=10), 3, 64, 64)
    images = noise(8, 3, 64, 64)
    case = ship(model, images, name)
    assert not [m for m in case.simulated.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    np.testing.assert_array_equal(run_torch(case.converted, images), run_ort(case.path, images))
