"""Tests of pictures without labels: which calibrate and which verify, pixels of any mode, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qatkit.config.schema import DataConfig
from qatkit.data import NO_LABEL, DataModule, Splits, TensorImages, pictures
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import read_picture

RED = np.zeros((6, 4, 3), np.uint8) + np.array([200, 30, 60], np.uint8)


def _data(root: Path) -> DataModule:
    config = DataConfig(root=str(root), image_size=4, mean=[0.0] * 3, std=[1.0] * 3, workers=0)
    return DataModule(config, pictures, seed=0)


def test_alternate_sorted_paths_calibrate_and_verify(tmp_path: Path) -> None:
    names = ["b.png", "a/2.webp", "a/10.bmp", "c.jpg", ".hidden", ".git/e.png", "no_suffix"]
    for level, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        kind = path.suffix.lstrip(".") or "png"
        plain = Image.new("L", (5 + level, 7), 20 * level)
        plain.save(path, kind if kind in ("webp", "bmp") else "png")

    data = _data(tmp_path)

    ends = ["a/10.bmp", "a/2.webp", "b.png", "c.jpg", "no_suffix"]
    found = [[Path(path) for path, _ in part.samples] for part in (data.splits.train, data.splits.test)]  # type: ignore[attr-defined]
    assert found == [[tmp_path / name for name in ends[0::2]], [tmp_path / name for name in ends[1::2]]]
    assert (data.labelled, data.num_classes, data.classes) == (False, None, ())
    assert data.preprocessing.upright  # recorded for whoever opens pictures for the model
    ((images, labels),) = data.test_batches()
    assert images.shape == (2, 3, 4, 4) and labels.tolist() == [NO_LABEL] * 2
    grey = [float(images[0].mean()), float(images[1].mean())]
    assert grey == pytest.approx([20 / 255, 60 / 255], abs=2 / 255)
    assert len(set(data.digests([0, 1, 2]))) == 3


def _saved(path: Path, image: Image.Image, **options: object) -> Image.Image:
    image.save(path, **options)  # type: ignore[arg-type]
    return read_picture(str(path), "data.root", upright=True)


def test_a_picture_of_any_mode_has_the_colours_that_it_shows(tmp_path: Path) -> None:
    red = Image.fromarray(RED)
    few = red.quantize(4)
    kinds = {
        "a.png": red,
        "b.png": few,
        "c.gif": few,
        "d.png": red.convert("RGBA"),
        "e.tiff": red.convert("CMYK"),
    }
    for name, image in kinds.items():
        found = _saved(tmp_path / name, image)
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), RED)
    cmyk = _saved(tmp_path / "cmyk.jpg", red.convert("CMYK"), quality=100)
    assert np.abs(np.asarray(cmyk).astype(int) - RED).max() < 8
    through = _saved(tmp_path / "through.png", few, transparency=bytes(range(256)))
    np.testing.assert_array_equal(np.asarray(through), RED)
    bits = _saved(tmp_path / "bits.png", Image.fromarray(RED[..., 0] > 100))
    assert bits.mode == "L" and np.asarray(bits).min() == 255
    halves = _saved(tmp_path / "alpha.png", Image.merge("LA", [Image.new("L", (4, 6), 77)] * 2))
    assert np.unique(np.asarray(halves)).tolist() == [77]


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    ramp = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    for suffix in ("png", "tiff"):
        found = _saved(tmp_path / f"deep.{suffix}", Image.fromarray(ramp))
        assert found.mode == "L"
        np.testing.assert_array_equal(np.asarray(found), ramp // 256)


def test_a_camera_on_its_side_gives_an_upright_picture(tmp_path: Path) -> None:
    lying = np.zeros((4, 6, 3), np.uint8)
    lying[:, :3] = 255  # its left half, which is at the top once upright
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    found = np.asarray(_saved(tmp_path / "phone.png", Image.fromarray(lying), exif=exif))
    assert found.shape == (6, 4, 3)
    assert found[:3].min() == 255 and found[3:].max() == 0


def _refusal(root: Path | None) -> str:
    with pytest.raises(ConfigError) as caught:
        _data(root) if root else pictures(None, False, 0)
    assert caught.value.key == "data.root" and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_folder_of_pictures_is_one_line(tmp_path: Path) -> None:
    assert "data.root=null" in _refusal(None)
    assert f"data.root={tmp_path / 'absent'}: expected a folder with at least two pictures" in _refusal(
        tmp_path / "absent"
    )
    assert _refusal(tmp_path).endswith("in it or in its subfolders; it has 0")
    Image.fromarray(RED).save(tmp_path / "a.png")
    assert _refusal(tmp_path).endswith("it has 1")
    (tmp_path / "b.jpg").write_text("<html>not found</html>")
    line = _refusal(tmp_path)
    assert line == (
        f"data.root={tmp_path}: 1 of 2 files can't be read as images: b.jpg (Pillow does not know its format); "
        "set data.bad=skip to leave them out"
    )
    (tmp_path / "b.jpg").write_bytes(b"")
    assert "b.jpg (empty)" in _refusal(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_named_when_it_is_read(workers: int, tmp_path: Path) -> None:
    for name in "ab":
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(
            tmp_path / f"{name}.jpg"
        )
    data = _data(tmp_path)
    data.config.workers = workers
    half = (tmp_path / "b.jpg").read_bytes()
    (tmp_path / "b.jpg").write_bytes(half[: len(half) // 2])
    with pytest.raises(
        ConfigError, match=r"data\.root=.*b\.jpg: the file is not a readable image \(.*truncated"
    ):
        list(data.test_batches())


def test_pixels_without_a_known_white_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(ConfigError, match=r"float\.tiff: .*float pixels of unknown range"):
        read_picture(str(tmp_path / "float.tiff"), "data.root")
    Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(tmp_path / "long.tiff")
    with pytest.raises(ConfigError, match=r"long\.tiff: .*exceed 16 bits"):
        read_picture(str(tmp_path / "long.tiff"), "data.root")


def test_a_source_of_ones_own_has_all_labels_or_none() -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    config = DataConfig(image_size=8, mean=[0.5] * 3, std=[0.5] * 3, workers=0)

    def made(*targets: int) -> DataModule:
        part = TensorImages(images, targets)
        return DataModule(config, lambda *_: Splits(part, part, classes=()), 0)

    assert not made(NO_LABEL, NO_LABEL, NO_LABEL, NO_LABEL).labelled
    with pytest.raises(
        ConfigError, match=r"labels of train must be -1 if there are no classes, but they are -1\.\.3"
    ):
        made(NO_LABEL, 3, 0, 0)
