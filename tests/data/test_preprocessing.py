"""Tests of preprocessing against torchvision's own transforms and manual arithmetic."""

from __future__ import annotations

import random
import shlex
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import EfficientNet_B0_Weights, ResNet50_Weights
from torchvision.transforms import v2

from qatkit.config.schema import DataConfig
from qatkit.data import (
    DataModule,
    Preprocessing,
    digits,
)
from qatkit.data.resolve import resolve_preprocessing
from qatkit_verify.errors import ConfigError

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def colour(height: int, width: int, seed: int = 0) -> Image.Image:
    """Returns a smooth colour image with some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(-10, 11, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse, dtype=np.int64) + noise, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("weights", [ResNet50_Weights.IMAGENET1K_V2, EfficientNet_B0_Weights.IMAGENET1K_V1])
def test_eval_batch_equals_the_weights_own_transforms(weights: Any) -> None:
    official = weights.transforms()
    preprocessing = Preprocessing(
        official.crop_size[0],
        official.resize_size[0],
        tuple(official.mean),
        tuple(official.std),
        official.interpolation.value,
    )
    images = [colour(300, 400), colour(500, 333, 1)]
    expected = torch.stack([official(image) for image in images])
    # Pillow's fixed-point resize may differ from torch's uint8 resize by one level: 1/255, divided by std.
    difference = (preprocessing.eval_batch(images) - expected).abs()
    assert difference.max() <= 1.01 / 255 / min(official.std)
    assert difference.mean() < 0.05 / 255 / min(official.std)


def test_enlarging_a_small_image_equals_enlarging_its_tensor() -> None:
    images = [colour(32, 32, seed) for seed in range(4)]
    mean, std = torch.tensor(CIFAR_MEAN).view(3, 1, 1), torch.tensor(CIFAR_STD).view(3, 1, 1)
    arrays = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    expected = nn.functional.interpolate((arrays / 255 - mean) / std, size=(64, 64), mode="bilinear")
    batch = Preprocessing(64, 64, CIFAR_MEAN, CIFAR_STD).eval_batch(images)
    torch.testing.assert_close(batch, expected, atol=1e-5, rtol=0)


def test_grey_and_colour_are_brought_to_the_channels_of_the_mean() -> None:
    grey = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    three = Preprocessing(8, 8, (0.0,) * 3, (1.0,) * 3).eval_batch([grey, Image.fromarray(grey[0].numpy())])
    torch.testing.assert_close(three, (grey / 255).expand(2, 3, 8, 8), atol=1e-6, rtol=0)
    red = torch.zeros(3, 8, 8, dtype=torch.uint8)
    red[0] = 100
    one = Preprocessing(8, 8, (0.0,), (1.0,)).eval_batch([red])
    assert one.shape == (1, 1, 8, 8)
    assert one.mean().item() == pytest.approx(0.299 * 100 / 255, abs=1 / 255)
    with pytest.raises(
        ConfigError, match=r"images=3 channels: expected 1 or 2 channels, since data\.mean has 2"
    ):
        Preprocessing(8, 8, (0.0,) * 2, (1.0,) * 2).eval_batch([red])
    with pytest.raises(ConfigError, match=r"data\.source=Tensor torch\.float32 \(3, 8, 8\)"):
        Preprocessing(8, 8, (0.0,), (1.0,)).eval_batch([red.float()])


def test_crop_flip_gives_every_window_of_the_reflected_image() -> None:
    image = torch.randint(0, 256, (1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = np.pad(image[0].numpy(), 2, mode="reflect").astype(np.float32)
    windows = {padded[t : t + 16, left : left + 16].tobytes() for t in range(5) for left in range(5)}
    windows |= {
        np.ascontiguousarray(padded[t : t + 16, left : left + 16][:, ::-1]).tobytes()
        for t in range(5)
        for left in range(5)
    }
    draws = [random.Random(seed) for seed in range(500)]
    preprocessing = Preprocessing(16, 16, (0.0,), (1.0,))
    batch = preprocessing.train_batch([image] * 500, "crop_flip", draws).mul(255).round()
    seen = {picture[0].numpy().tobytes() for picture in batch}
    assert seen == windows  # all 50 and nothing else


def test_flip_mirrors_about_half_of_the_images_and_nothing_else() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    preprocessing = Preprocessing(8, 8, (0.0,), (1.0,))
    plain = preprocessing.eval_batch([image])[0]
    batch = preprocessing.train_batch([image] * 400, "flip", [random.Random(seed) for seed in range(400)])
    same = [torch.equal(picture, plain) for picture in batch]
    mirrored = [torch.equal(picture, plain.flip(-1)) for picture in batch]
    assert [a != b for a, b in zip(same, mirrored, strict=True)] == [True] * 400
    assert 150 < sum(mirrored) < 250


def test_resized_crop_shows_a_part_of_the_image() -> None:
    ramp = torch.arange(200, dtype=torch.uint8).view(1, 1, 200).expand(1, 150, 200)
    draws = [random.Random(seed) for seed in range(200)]
    batch = Preprocessing(32, 32, (0.0,), (1.0,)).train_batch([ramp] * 200, "resized_crop", draws) * 255
    assert batch.shape == (200, 1, 32, 32)
    widths = (batch[:, 0, 0].amax(-1) - batch[:, 0, 0].amin(-1)) * 32 / 31
    # An area of 8 to 100 % with ratio 3/4..4/3 is at least sqrt(.08 * 150 * 200 * 3/4) = 42 pixels wide.
    assert 40 < widths.min() < 70
    assert 170 < widths.max() <= 201


POLICIES = {
    "trivial_augment": v2.TrivialAugmentWide,
    "rand_augment": v2.RandAugment,
    "auto_augment": v2.AutoAugment,
    "aug_mix": v2.AugMix,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_match_torchvision_with_random_draws_per_image(policy: str, channels: int) -> None:
    images = [
        torch.from_numpy(np.array(colour(24, 24, seed))).permute(2, 0, 1)[:channels] for seed in range(30)
    ]
    preprocessing = Preprocessing(24, 24, (0.0,) * channels, (1.0,) * channels)
    transform, expected = POLICIES[policy](), []
    for seed, image in enumerate(images):
        torch.manual_seed(random.Random(seed).getrandbits(63))
        expected.append(transform(image))
    torch.manual_seed(5)
    following = torch.rand(3)

    torch.manual_seed(5)
    draws = [random.Random(seed) for seed in range(30)]
    batch = preprocessing.train_batch(images, "none", draws, policy).mul(255).round().to(torch.uint8)

    assert torch.equal(torch.rand(3), following)  # later draws, as by dropout, are unaffected
    assert torch.equal(batch, torch.stack(expected))
    alone = preprocessing.train_batch(images[7:9], "none", [random.Random(7), random.Random(8)], policy)
    assert torch.equal(alone.mul(255).round().to(torch.uint8), batch[7:9])
    changed = sum(not torch.equal(a, b) for a, b in zip(batch, images, strict=True))
    assert changed > 15


def test_a_policy_is_refused_for_images_that_it_cannot_change() -> None:
    config = DataConfig(image_size=8, mean=[0.5] * 4, std=[0.5] * 4, policy="rand_augment")
    with pytest.raises(
        ConfigError, match=r"data\.policy=rand_augment: expected none, since .* 1 or 3 channels.* 4 numbers"
    ):
        resolve_preprocessing(config, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 0}, r"data\.image_size=0: expected an integer of at least 1"),
        ({"resize": 20}, r"data\.resize=20: expected a size that covers data\.image_size=32"),
        (
            {"std": (1.0, 1.0)},
            r"data\.std=\[1\.0, 1\.0\]: expected one positive number for each number in data.mean \(1\)",
        ),
        ({"std": (0.0,)}, r"data\.std"),
        ({"mean": (), "std": ()}, r"data\.mean=\[\]"),
        (
            {"interpolation": "lanczos"},
            r"^interpolation=lanczos: expected one of nearest, bilinear, bicubic in the preprocessing of",
        ),
    ],
)
def test_preprocessing_refuses(values: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"image_size": 32, "resize": 32, "mean": (0.5,), "std": (0.5,)}
    with pytest.raises(ConfigError, match=message):
        Preprocessing(**(good | values))


def test_as_dict_is_plain_json() -> None:
    assert Preprocessing(32, 40, (0.5,), (0.25,)).as_dict() == {
        "channels": 1,
        "image_size": 32,
        "resize": 40,
        "mean": [0.5],
        "std": [0.25],
        "interpolation": "bilinear",
        "upright": False,
    }


def test_preprocessing_prefers_config_then_weights_then_source() -> None:
    weights = Preprocessing(224, 256, (0.1,) * 3, (0.2,) * 3, "bicubic")
    assert DataModule(DataConfig(), digits, 0).preprocessing.image_size == 32
    assert DataModule(DataConfig(), digits, 0, weights).preprocessing == weights
    mixed = DataModule(DataConfig(image_size=64, std=[0.3] * 3), digits, 0, weights)
    assert mixed.preprocessing == Preprocessing(64, 64, (0.1,) * 3, (0.3,) * 3, "bicubic")
    assert mixed.preprocessing.shape == (3, 64, 64)


def test_a_batch_is_the_same_whatever_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares a batch of two image shapes, with equal neighbours stacked or one by one, with each image alone."""
    images = [colour(*size, seed=i) for i, size in enumerate([(40, 50)] * 3 + [(20, 20), (40, 50), (40, 50)])]
    preprocessing = Preprocessing(24, 28, CIFAR_MEAN, CIFAR_STD)
    alone = torch.cat([preprocessing.eval_batch([image]) for image in images])
    assert torch.equal(preprocessing.eval_batch(iter(images)), alone)
    monkeypatch.setattr("qatkit.data.preprocessing._STACKED", 0)
    assert torch.equal(preprocessing.eval_batch(iter(images)), alone)


def _windows(image: torch.Tensor, down: int, across: int) -> set[bytes]:
    """Returns every crop of the reflection-padded image, and every crop mirrored, as the bytes of float32."""
    (height, width), padded = image.shape, np.pad(image.numpy(), [(down,) * 2, (across,) * 2], mode="reflect")
    cut = [
        padded[top : top + height, left : left + width].astype(np.float32)
        for top in range(2 * down + 1)
        for left in range(2 * across + 1)
    ]
    return {np.ascontiguousarray(one).tobytes() for window in cut for one in (window, window[:, ::-1])}


def test_crop_flip_moves_each_side_by_an_eighth_of_it() -> None:
    image = torch.randint(0, 256, (1, 8, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    how = Preprocessing((8, 24), (8, 24), (0.0,), (1.0,), pixels="0..255")
    batch = how.train_batch([image] * 500, "crop_flip", [random.Random(seed) for seed in range(500)])
    assert {picture[0].numpy().tobytes() for picture in batch} == _windows(image[0], 1, 3)


def test_resized_crop_keeps_proportions_near_the_inputs() -> None:
    """Checks a picture whose pixels tell their column and row, for an input four times as wide as high."""
    ramp = torch.arange(240, dtype=torch.uint8)
    image = torch.stack([ramp.expand(240, -1), ramp[:, None].expand(-1, 240), ramp.expand(240, -1)])
    how = Preprocessing((16, 64), (16, 64), (0.0,) * 3, (1.0,) * 3, pixels="0..255")
    batch = how.train_batch([image] * 200, "resized_crop", [random.Random(seed) for seed in range(200)])
    assert batch.shape == (200, 3, 16, 64)
    width = (batch[:, 0].amax((1, 2)) - batch[:, 0].amin((1, 2))) * 64 / 63
    height = (batch[:, 1].amax((1, 2)) - batch[:, 1].amin((1, 2))) * 16 / 15
    assert 0.7 < (width / height / 4).min() < (width / height / 4).max() < 1.4


@pytest.mark.parametrize("align", ["center", "top_left"])
def test_flip_mirrors_a_letterboxed_picture_in_its_place(align: str) -> None:
    image = torch.arange(32, dtype=torch.uint8).view(1, 8, 4)
    how = Preprocessing(8, 8, (0.0,), (1.0,), fit="letterbox", align=align, pad_value=200.0, pixels="0..255")
    left = 2 if align == "center" else 0
    plain = torch.full((8, 8), 200.0)
    plain[:, left : left + 4] = image[0].float()
    assert torch.equal(how.eval_batch([image])[0, 0], plain)
    mirrored = plain.clone()
    mirrored[:, left : left + 4] = image[0].flip(-1).float()
    batch = how.train_batch([image] * 100, "flip", [random.Random(seed) for seed in range(100)])
    seen = [torch.equal(picture[0], mirrored) for picture in batch]
    assert all(one or torch.equal(picture[0], plain) for one, picture in zip(seen, batch, strict=True))
    assert 30 < sum(seen) < 70


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_change_colours_before_they_are_ordered(policy: str) -> None:
    """Checks that an input in BGR order with channels last has the augmented pixels of an RGB input."""
    images = [torch.from_numpy(np.array(colour(12, 30, seed))).permute(2, 0, 1) for seed in range(5)]
    rgb = Preprocessing((12, 30), (12, 30), (0.0,) * 3, (1.0,) * 3)
    bgr = Preprocessing((12, 30), (12, 30), (0.0,) * 3, (1.0,) * 3, order="bgr", layout="nhwc")
    draws = [[random.Random(seed) for seed in range(5)] for _ in range(2)]
    expected = rgb.train_batch(images, "none", draws[0], policy)
    found = bgr.train_batch(images, "none", draws[1], policy)
    assert torch.equal(found, expected.flip(1).permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"image_size": [8, 16, 3]},
            r"data\.image_size=\[8, 16, 3\]: expected an integer of at least 1, or \[height",
        ),
        ({"image_size": (8, 0)}, r"data\.image_size=\[8, 0\]: expected an integer of at least 1"),
        ({"image_size": (8, 33)}, r"data\.resize=32: expected a size that covers data\.image_size=\[8, 33\]"),
        ({"fit": "fill"}, r"data\.fit=fill: expected one of crop, resize, letterbox"),
        ({"pad_value": 256.0}, r"data\.pad_value=256\.0: expected a number from 0 to 255"),
        ({"align": "left"}, r"data\.align=left: expected one of center, top_left"),
        ({"order": "gbr"}, r"data\.channels=gbr: expected one of rgb, bgr"),
        (
            {"order": "bgr"},
            r"data\.channels=bgr: expected rgb, since colours need 3 numbers in data.mean and it has 1",
        ),
        ({"layout": "nwhc"}, r"data\.layout=nwhc: expected one of nchw, nhwc"),
        ({"pixels": "0..2"}, r"data\.pixels=0\.\.2: expected one of 0\.\.1, 0\.\.255"),
    ],
)
def test_preprocessing_refuses_what_no_input_is(values: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"image_size": 32, "resize": 32, "mean": (0.5,), "std": (0.5,)}
    with pytest.raises(ConfigError, match=message):
        Preprocessing(**(good | values))


def test_json_tells_what_is_not_as_usual() -> None:
    how = Preprocessing((4, 8), (4, 8), (0.0,) * 3, (1.0,) * 3, fit="letterbox", order="bgr", layout="nhwc",
                        pixels="0..255")  # fmt: skip
    assert how.as_dict() == {
        "channels": 3, "image_size": [4, 8], "resize": [4, 8], "mean": [0.0] * 3, "std": [1.0] * 3,
        "interpolation": "bilinear", "upright": False, "fit": "letterbox", "pad_value": 114.0, "align": "center",
        "channel_order": "BGR", "layout": "NHWC", "pixels": "0..255",
    }  # fmt: skip
    assert Preprocessing.from_dict(how.as_dict()) == how
    assert Preprocessing((8, 8), 8, (0.5,), (0.5,)) == Preprocessing(8, (8, 8), (0.5,), (0.5,))


BASE = Preprocessing(224, 256, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic")


@pytest.mark.parametrize(
    ("given", "base", "expected"),
    [
        ({"image_size": [48, 192], "pixels": "0..255"}, None,
         Preprocessing((48, 192), (48, 192), (0.0,) * 3, (1.0,) * 3, pixels="0..255")),
        ({"pixels": "0..255", "mean": [9.0] * 3}, BASE,
         Preprocessing(224, 256, (9.0,) * 3, (1.0,) * 3, "bicubic", pixels="0..255")),
        ({"channels": "bgr"}, BASE,
         Preprocessing(224, 256, (0.3, 0.2, 0.1), (0.6, 0.5, 0.4), "bicubic", order="bgr")),
        ({"fit": "resize"}, BASE, Preprocessing(224, 224, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", fit="resize")),
        ({"image_size": [100, 200], "resize": [110, 240]}, BASE,
         Preprocessing((100, 200), (110, 240), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic")),
        ({"pad_value": 0.0}, Preprocessing(8, 8, (0.0,), (1.0,), fit="letterbox"),
         Preprocessing(8, 8, (0.0,), (1.0,), fit="letterbox", pad_value=0.0)),
    ],
)  # fmt: skip
def test_settings_are_joined_with_what_is_known(
    given: dict[str, Any], base: Preprocessing | None, expected: Preprocessing
) -> None:
    assert resolve_preprocessing(DataConfig(**given), base) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"resize": 40, "fit": "letterbox"},
            r"data\.resize=40: expected null with data\.fit=letterbox, which does not crop",
        ),
        (
            {"pad_value": 0.0},
            r"data\.pad_value=0\.0: expected null with data\.fit=crop, which adds no padding",
        ),
        ({"align": "center", "fit": "resize"}, r"data\.align=center: expected null with data\.fit=resize"),
        (
            {"augment": "crop_flip", "fit": "letterbox"},
            r"data\.augment=crop_flip: expected one of none, flip, scale_flip with",
        ),
        (
            {"augment": "resized_crop", "fit": "letterbox"},
            r"data\.augment=resized_crop: expected one of none, flip, scale_flip",
        ),
        ({"mean": None, "std": None}, r"data\.mean=null: expected a value, since neither"),
    ],
)
def test_settings_without_a_use_are_refused(given: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    config = DataConfig(**(usual | given))
    with pytest.raises(ConfigError, match=message):
        resolve_preprocessing(config, None)


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({}, ["data.image_size=224", "data.mean=[0.485,0.456,0.406]", "data.std=[0.229,0.224,0.225]"]),
        ({"image_size": 32, "mean": [0.5]}, ["data.std=[0.229,0.224,0.225]"]),
    ],
)
def test_one_message_names_every_missing_key(given: dict[str, Any], typed: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_preprocessing(DataConfig(**given), None)
    assert shlex.split(str(caught.value).partition("for example ")[2].partition(" (or ")[0]) == typed


def test_noise_for_a_model_of_0_to_255_is_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    how = Preprocessing((6, 9), (6, 9), (100.0,) * 3, (2.0,) * 3, layout="nhwc", pixels="0..255")
    noise = how.noise(50, generator)
    assert noise.shape == (50, 6, 9, 3)
    assert -50 <= noise.min() < -48 and 75.5 < noise.max() <= 77.5
    usual = Preprocessing(8, 8, (0.5,), (0.5,)).noise(4, torch.Generator().manual_seed(1))
    assert torch.equal(usual, torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
