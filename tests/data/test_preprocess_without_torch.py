"""Tests of `qatkit_verify.preprocess`: the same bits as in training, and resizing like torch and Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional

from qatkit.data import Preprocessing
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import is_image_name, open_picture, picture_files
from qatkit_verify.preprocess import Preprocess

GOOD = {
    "image_size": 8,
    "resize": 9,
    "interpolation": "bilinear",
    "channels": 1,
    "mean": [0.5],
    "std": [0.25],
    "crop": "center",
    "input": {"dtype": "float32"},
}


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_every_bit_is_that_of_training(interpolation: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        height, width, resize = (int(one) for one in rng.integers(1, 90, 3))
        size = int(rng.integers(1, resize + 1))
        image = rng.integers(0, 256, (height, width, int(rng.choice([1, 3]))), dtype=np.uint8)
        channels = int(rng.choice([1, 3]))
        mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
        expected = Preprocessing(size, resize, mean, std, interpolation).eval_batch(
            [torch.from_numpy(image).permute(2, 0, 1)]
        )
        found = Preprocess(size, resize, mean, std, interpolation)(image)
        assert found.dtype == np.float32
        assert found.tobytes() == expected.numpy().tobytes(), (height, width, resize, size)


_FITS: list[dict[str, Any]] = [
    {"fit": "crop"},
    {"fit": "resize"},
    {"fit": "letterbox"},
    {"fit": "letterbox", "align": "top_left", "pad_value": 127.5},
]


@pytest.mark.parametrize("fit", _FITS, ids=lambda one: "_".join(map(str, one.values())))
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_every_bit_is_that_of_training_for_any_input(interpolation: str, fit: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    for number in range(60):
        height, width, high, wide = (int(one) for one in rng.integers(1, 90, 4))
        image = rng.integers(0, 256, (height, width, int(rng.choice([1, 3]))), dtype=np.uint8)
        channels = 1 if number % 3 == 0 else 3
        resize = (high + number % 5, wide + number % 7) if fit["fit"] == "crop" else (high, wide)
        settings: dict[str, Any] = {
            "order": "bgr" if channels == 3 and number % 2 else "rgb",
            "layout": ("nchw", "nhwc")[number % 4 > 1],
            "pixels": ("0..1", "0..255")[number % 5 > 2],
        }
        mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
        training = Preprocessing((high, wide), resize, mean, std, interpolation, **settings, **fit)
        expected = training.eval_batch([torch.from_numpy(image).permute(2, 0, 1)]).numpy()
        found = Preprocess((high, wide), resize, mean, std, interpolation, **settings, **fit)(image)
        assert found.shape == expected.shape == (1, *training.shape)
        assert found.tobytes() == expected.tobytes(), (height, width, high, wide, settings)
        told = training.as_dict() | {"crop": "none", "input": {"dtype": "float32"}}
        assert Preprocess.from_dict(told)(image).tobytes() == expected.tobytes()
        assert Preprocessing.from_dict(training.as_dict()) == training


def test_a_letterboxed_picture_is_that_of_pillow() -> None:
    """Checks that BGR pixels of 0..255 differ by at most 1 from Pillow's resized image pasted onto grey."""
    image = np.random.default_rng(6).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    canvas = Image.new("RGB", (64, 40), (114, 114, 114))
    canvas.paste(Image.fromarray(image).resize((53, 40), Image.Resampling.BILINEAR), (5, 0))
    how = Preprocess((40, 64), (40, 64), (0.0,) * 3, (1.0,) * 3, fit="letterbox", order="bgr", layout="nhwc",
                     pixels="0..255")  # fmt: skip
    found = how(image)
    assert found.shape == (1, 40, 64, 3)
    assert np.abs(found[0, ..., ::-1] - np.asarray(canvas, np.float32)).max() <= 1
    assert (found[0, :, :5] == 114).all() and (found[0, :, 58:] == 114).all()


def test_bytes_are_the_pixels_whatever_the_range_of_mean_and_std() -> None:
    image = np.random.default_rng(7).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    for mean, std, pixels in (
        ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "0..1"),
        ((104.0, 117.0, 123.0), (58.0,) * 3, "0..255"),
    ):
        how = Preprocess((20, 30), (20, 30), mean, std, dtype="uint8", order="bgr", pixels=pixels)
        np.testing.assert_array_equal(how(image)[0], image[..., ::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_shrunk_image_is_that_of_torch(interpolation: str) -> None:
    image = np.random.default_rng(2).integers(0, 256, (70, 50, 3), dtype=np.uint8)
    resized = interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None],
        size=(44, 32),
        mode=interpolation,
        align_corners=False,
        antialias=True,
    )
    expected = functional.center_crop(resized, [30, 30]).numpy()
    found = Preprocess(30, 32, (0.0,) * 3, (1.0,) * 3, interpolation, "uint8")(image)
    np.testing.assert_array_equal(found, expected)


def test_an_enlarged_image_matches_torch_but_for_the_last_bits() -> None:
    image = np.random.default_rng(3).integers(0, 256, (20, 20, 1), dtype=np.uint8)
    values = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = interpolate(values, size=(33, 33), mode="bicubic", align_corners=False, antialias=True)
    found = Preprocess(33, 33, (0.0,), (1.0,), "bicubic")(image) * 255
    np.testing.assert_allclose(found, expected.numpy(), atol=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [("image_size", 0), ("image_size", [8, 8, 8]), ("resize", 7), ("resize", [9, 7]), ("interpolation", "lanczos"),
     ("channels", 2), ("std", [0.0]), ("crop", "x"), ("fit", "fill"), ("pad_value", 256), ("align", "left"),
     ("channel_order", "GBR"), ("layout", "NCWH"), ("pixels", "0..2"),
     ("upright", 1)],
)  # fmt: skip
def test_bad_values_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"preprocess.json: {key}="):
        Preprocess.from_dict(GOOD | {key: value})
    assert Preprocess.from_dict(GOOD).channels == 1
    with pytest.raises(ConfigError, match="layout=NHWC: expected NCHW with an input of uint8"):
        Preprocess.from_dict(GOOD | {"layout": "NHWC", "input": {"dtype": "uint8"}})
    assert not Preprocess.from_dict(GOOD).upright and Preprocess.from_dict(GOOD | {"upright": True}).upright


def test_pictures_open_as_in_pillow_and_bad_ones_are_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "b.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "a.png")
    (tmp_path / "c.txt").write_text("no picture")
    (tmp_path / "d.jpg").write_text("no picture")
    assert [path.name for path in picture_files(tmp_path)] == ["a.png", "b.png", "d.jpg"]
    np.testing.assert_array_equal(open_picture(tmp_path / "b.png", upright=False), pixels)
    np.testing.assert_array_equal(open_picture(tmp_path / "a.png", upright=False), pixels[..., :1])
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "e.png", exif=exif)
    np.testing.assert_array_equal(open_picture(tmp_path / "e.png", upright=False), pixels)
    np.testing.assert_array_equal(open_picture(tmp_path / "e.png", upright=True), np.rot90(pixels, -1))
    with pytest.raises(ConfigError, match=r"pictures=.*d\.jpg: the file is not a readable image"):
        open_picture(tmp_path / "d.jpg", upright=False)
    assert all(is_image_name(f"x{end}") for end in IMG_EXTENSIONS)
