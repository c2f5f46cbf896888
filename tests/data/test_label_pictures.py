"""Tests of pictures with label maps: folder layouts, refused mistakes, and maps that follow augmentation."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled_pictures import COLOURS, folder
from PIL import Image
from torch import Tensor

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import MAPS
from qatkit.data import DataModule
from qatkit.data.label_pictures import label_pictures
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

PLAIN = {"mean": [0.0] * 3, "std": [1.0] * 3, "pixels": "0..255"}


def loaded(root: Path, **settings: object) -> DataModule:
    given = {
        "image_size": [24, 32],
        "fit": "resize",
        "ignored": [9],
        "workers": 0,
        "batch_size": 4,
    } | settings
    config = DataConfig(source=MAPS, root=str(root), **PLAIN | given)  # type: ignore[arg-type]
    return DataModule(config, label_pictures, seed=3, task=task_of("segmentation"))


def classes_of(images: Tensor) -> Tensor:
    """Returns the class of each pixel by its colour, [N, H, W]."""
    colours = torch.from_numpy(COLOURS).float()
    return (images.movedim(1, -1)[..., None, :] - colours).square().sum(-1).argmin(-1)


def test_both_splits_have_maps(tmp_path: Path) -> None:
    data = loaded(folder(tmp_path / "d"))
    assert data.classes == ("ground", "brick", "leaf") and data.num_classes == 3 and data.labelled
    (images, maps), *others = data.test_batches()
    assert not others and images.shape == (8, 3, 24, 32)
    assert maps.shape == (8, 24, 32) and maps.dtype == torch.int64
    assert (maps[:, 0] == 255).all()  # the frame, which is ignored
    assert torch.equal(maps[:, 1:], classes_of(images)[:, 1:])


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip", "resized_crop", "scale_flip"])
def test_maps_go_where_their_pictures_go(augment: str, tmp_path: Path) -> None:
    data = loaded(folder(tmp_path / "d"), augment=augment, ignored=[255, 9], image_size=[30, 40])
    same, counted = 0, 0
    for images, maps in data.train_dataloader():
        # Only pixels away from edges, where resizing mixes colours.
        found = classes_of(images)
        inner = torch.ones_like(found, dtype=torch.bool)
        for down, across in (
            (0, 1),
            (1, 0),
            (0, -1),
            (-1, 0),
            (1, 1),
            (-1, -1),
            (2, 0),
            (0, 2),
            (-2, 0),
            (0, -2),
        ):
            inner &= found == found.roll((down, across), (1, 2))
        inner[:, [0, 1, -1, -2]] = inner[:, :, [0, 1, -1, -2]] = False
        inner &= maps != 255
        same, counted = same + int((found == maps)[inner].sum()), counted + int(inner.sum())
    assert counted > 5000 and same / counted > 0.995


def test_a_letterbox_fills_maps_with_nothing(tmp_path: Path) -> None:
    data = loaded(folder(tmp_path / "d"), image_size=[40, 32], fit="letterbox", ignored=[9])
    images, maps = next(iter(data.test_batches()))
    assert (maps[:, :8] == 255).all() and (maps[:, -8:] == 255).all()
    assert torch.equal(maps[:, 9:32], classes_of(images)[:, 9:32])


def test_enlarged_maps_take_the_nearest_pixel(tmp_path: Path) -> None:
    data = loaded(folder(tmp_path / "d"), image_size=[48, 64])
    small = next(iter(loaded(tmp_path / "d").test_batches()))[1]
    maps = next(iter(data.test_batches()))[1]
    assert torch.equal(maps, small.repeat_interleave(2, 1).repeat_interleave(2, 2))


def moved(root: Path, *, top: str, labels: str) -> None:
    for part in ("train", "test"):
        for source, target in ((part, f"{top}/{part}"), (f"{part}_labels", labels.format(part))):
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / source, root / target)


@pytest.mark.parametrize(
    ("top", "labels"), [("images", "labels/{}"), ("images", "annotations/{}"), ("img_dir", "ann_dir/{}")]
)
def test_other_layouts(top: str, labels: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    wanted = next(iter(loaded(root).test_batches()))
    moved(root, top=top, labels=labels)
    for found, one in zip(next(iter(loaded(root).test_batches())), wanted, strict=True):
        assert torch.equal(found, one)


def test_label_pictures_may_have_longer_names_and_palettes(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    wanted = next(iter(loaded(root).test_batches()))[1]
    for path in (root / "test_labels").iterdir():
        with Image.open(path) as image:
            numbers = image.copy()
        path.unlink()
        numbers.putpalette([value for number in range(256) for value in (number, 255 - number, 40)])
        numbers.save(path.with_name(f"{path.stem}_gt.png"))
    assert torch.equal(next(iter(loaded(root).test_batches()))[1], wanted)


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (root / "classes.txt").unlink()
    assert loaded(root).classes == ("0", "1", "2")


def save(root: Path, name: str, labels: np.ndarray) -> None:
    Image.fromarray(labels).save(root / "train_labels" / name)


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no labels": (
        lambda root: shutil.rmtree(root / "test_labels"),
        "there is no folder test or val with labels",
    ),
    "a missing one": (
        lambda root: (root / "train_labels" / "003.png").unlink(),
        r"in train_labels for each picture in train; it is missing or ambiguous for 1 picture: 003.png \(none\)",
    ),
    "another size": (
        lambda root: save(root, "005.png", np.zeros((10, 12), np.uint8)),
        "train_labels/005.png has 12 x 10 pixels, but its picture has 32 x 24",
    ),
    "no class": (
        lambda root: save(root, "006.png", np.full((24, 32), 7, np.uint8)),
        r"numbers from 0 to 2, one for each line of classes.txt; the number 7 occurs \(data.ignored lists",
    ),
    "colours": (
        lambda root: save(root, "007.png", np.zeros((24, 32, 3), np.uint8)),
        "007.png: expected label pictures with one number per pixel, grey or with a palette; the file is RGB",
    ),
    "no picture": (
        lambda root: (root / "train_labels" / "008.png").write_bytes(b"none"),
        "008.png: the label picture can't be read",
    ),
    "no folder": (shutil.rmtree, "there is no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = MISTAKES[case]
    root = folder(tmp_path / "d")
    change(root)
    with pytest.raises(ConfigError) as raised:
        loaded(root)
    assert str(raised.value).startswith("data.root=") and "\n" not in str(raised.value)
    assert re.search(message, str(raised.value))


def test_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.policy=aug_mix: expected none for image segmentation"):
        loaded(folder(tmp_path / "d"), policy="aug_mix")


def test_pictures_without_labels_have_no_maps(tmp_path: Path) -> None:
    from qatkit.data import pictures

    root = str(folder(tmp_path / "d") / "train")
    config = DataConfig(source="qatkit.data.pictures", root=root, workers=0,
                        image_size=[24, 32], **PLAIN)  # type: ignore[arg-type]  # fmt: skip
    data = DataModule(config, pictures, seed=0, task=task_of("segmentation"))
    assert not data.labelled
    images, targets = next(iter(data.test_batches()))
    assert len(images) == len(targets)
