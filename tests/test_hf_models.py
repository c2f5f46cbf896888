"""Tests of Hugging Face classifiers: names, preprocessing, quantization; skipped without transformers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain import noise
from PIL import Image

from qatkit import QATModule
from qatkit.config.schema import ModelConfig
from qatkit.models import build, weights_preprocessing
from qatkit_verify.errors import ConfigError

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
       "image_size": 16, "patch_size": 8}  # fmt: skip
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
SMALL: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "deit": VIT,
    "dinov2": {key: value for key, value in VIT.items() if key != "intermediate_size"},
    "beit": VIT,
    "swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4],
             "window_size": 4},
    "convnext": STAGES,
    "convnextv2": STAGES,
    "segformer": {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 2]},
    "mobilevit": {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [8, 8, 8, 8, 12, 16, 16]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Returns a folder written by `save_pretrained`: a small ViT of five classes and its image processor."""
    transformers: Any = importlib.import_module("transformers")
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=5))
    model.save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.5], resample=3
    )
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def refused(config: ModelConfig, num_classes: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config, num_classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert (
        "the model needs the extra transformers; install it with uv sync --inexact --extra transformers"
        in refused(ModelConfig("hf/vit"))
    )


@needs_transformers
@pytest.mark.parametrize("name", SMALL)
def test_an_architecture_gives_logits_alone(name: str) -> None:
    torch.manual_seed(0)
    model = build(ModelConfig(f"hf/{name}", kwargs=SMALL[name]), num_classes=7)
    size = 16 if "image_size" in SMALL[name] else 64
    assert not any(module.training for module in model.modules())
    with torch.inference_mode():
        assert model(noise(2, 3, size, size)).shape == (2, 7)


@needs_transformers
def test_a_folder_gives_its_weights_under_their_own_names(saved: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    model = build(ModelConfig(f"hf/{saved}", weights="DEFAULT"), num_classes=5)
    theirs = transformers.ViTForImageClassification.from_pretrained(saved).eval()
    state = theirs.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    images = noise(2, 3, 16, 16)
    with torch.inference_mode():
        assert torch.equal(model(images), theirs(images).logits)


@needs_transformers
def test_a_folder_gives_its_configuration_without_weights(saved: Path) -> None:
    model = build(ModelConfig(f"hf/{saved}", kwargs={"hidden_size": 32, "num_attention_heads": 4}))
    assert model.state_dict()["classifier.weight"].shape == (5, 32)


@needs_transformers
def test_another_number_of_classes_gets_a_new_head(saved: Path) -> None:
    old = build(ModelConfig(f"hf/{saved}", weights="DEFAULT")).state_dict()
    new = build(ModelConfig(f"hf/{saved}", weights="DEFAULT"), num_classes=9).state_dict()
    assert new["classifier.weight"].shape == (9, 16)
    assert [key for key in old if not torch.equal(old[key], new[key])] == [
        "classifier.weight",
        "classifier.bias",
    ]


@needs_transformers
def test_preprocessing_is_the_one_of_the_image_processor(saved: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    found = weights_preprocessing(ModelConfig(f"hf/{saved}", weights="DEFAULT"))
    assert found is not None
    assert (found.image_size, found.resize, found.interpolation) == (16, 16, "bicubic")
    assert (found.mean, found.std) == ((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    theirs = transformers.AutoImageProcessor.from_pretrained(saved)(
        Image.fromarray(pixels), return_tensors="pt"
    )["pixel_values"]
    torch.testing.assert_close(found.eval_batch([Image.fromarray(pixels)]), theirs, atol=0.02, rtol=0)


@needs_transformers
@pytest.mark.parametrize(
    ("processor", "settings", "expected"),
    [
        # ConvNeXt crops 224 pixels from 256; EfficientNet divides by the standard deviation twice.
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}}, (224, 256, 0.5, 0.5)),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}, (384, 384, 0.5, 0.5)),
        (
            "PoolFormerImageProcessor",
            {"size": {"shortest_edge": 224}, "crop_pct": 0.95},
            (224, 235, 0.485, 0.229),
        ),
        (
            "EfficientNetImageProcessor",
            {"image_mean": [0.4] * 3, "image_std": [0.5] * 3},
            (346, 346, 0.4, 0.25),
        ),
        ("ViTImageProcessor", {"do_normalize": False}, (224, 224, 0.0, 1.0)),
    ],
)
def test_every_kind_of_image_processor_is_understood(
    processor: str, settings: dict[str, Any], expected: tuple[int, int, float, float], saved: Path
) -> None:
    import transformers

    getattr(transformers, processor)(**settings).save_pretrained(saved)
    found = weights_preprocessing(ModelConfig(f"hf/{saved}", weights="DEFAULT"))
    assert found is not None
    assert (found.image_size, found.resize, found.mean[0], found.std[0]) == expected


@needs_transformers
def test_weights_for_another_order_of_channels_are_refused(saved: Path) -> None:
    import transformers

    transformers.MobileViTImageProcessor().save_pretrained(saved)
    with pytest.raises(ConfigError, match=r"model\.weights=DEFAULT: .* another order of the channels"):
        weights_preprocessing(ModelConfig(f"hf/{saved}", weights="DEFAULT"))


@needs_transformers
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig("hf/vitt"),
            "model.name=hf/vitt: expected an architecture with an image classifier (did you mean vit",
        ),
        (ModelConfig("hf/bert"), "an architecture with an image classifier"),
        (
            ModelConfig("hf/imagegpt", kwargs={"n_embd": 8, "n_layer": 1, "n_head": 2}),
            "model.name=hf/imagegpt: expected an image model whose forward accepts pixel_values; ImageGPT",
        ),
        (ModelConfig("hf//absent/folder"), "a folder with a config.json"),
        (
            ModelConfig("hf/vit", weights="DEFAULT"),
            "model.weights=DEFAULT: expected null, since hf/vit is an architecture",
        ),
        (
            ModelConfig("hf/vit", kwargs={"hiden_size": 8}),
            "model.kwargs.hiden_size=8: ViTConfig has no such setting (did you",
        ),
        (
            ModelConfig("hf/vit", kwargs={"hidden_size": "x"}),
            "arguments that hf/vit accepts (Validation error for field",
        ),
        (ModelConfig("hf/vit", kwargs=VIT | {"patch_size": 0}), "arguments that hf/vit accepts ("),
    ],
)
def test_mistakes_are_one_line(config: ModelConfig, message: str) -> None:
    assert message in refused(config)


@needs_transformers
def test_a_folder_has_no_revisions_and_keeps_its_shapes(saved: Path) -> None:
    assert "DEFAULT or null for a folder" in refused(ModelConfig(f"hf/{saved}", weights="v1"))
    text = refused(ModelConfig(f"hf/{saved}", weights="DEFAULT", kwargs={"intermediate_size": 64}))
    assert "the weights do not fit the model; missing or of another shape: vit." in text


@needs_transformers
@pytest.mark.parametrize("weights", [None, "DEFAULT"])
def test_what_cannot_be_fetched_says_where_to_put_it(
    weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = refused(ModelConfig("hf/nobody/nothing", weights=weights))
    assert "cannot be fetched (We couldn't connect to" in text
    assert (
        "`hf download nobody/nothing` on a machine with network access, then copy the folder models--nobody--nothing"
        in text
    )


@needs_transformers
def test_a_small_vit_is_quantized_and_trained() -> None:
    torch.manual_seed(0)
    model = build(ModelConfig("hf/vit", kwargs=VIT), num_classes=3)
    images = noise(8, 3, 16, 16)
    with torch.inference_mode():
        expected = model(images)
    module = QATModule(model, images[:2])
    module.calibrate([images])
    loss = module(images).square().mean()
    loss.backward()
    assert all(p.grad is not None for name, p in module.named_parameters() if name.endswith("query.weight"))
    module.eval()
    module.ready_to_convert()
    with torch.inference_mode():
        error = module.convert().graph(images) - expected
    assert error.square().mean() < 1e-3 * expected.square().mean()
