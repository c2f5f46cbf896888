"""Tests of pictures with boxes: folder layouts, refused mistakes, and boxes that follow augmentation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boxed_pictures import COLOURS, coco_folder, voc_folder
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import COCO_BOXES, VOC_BOXES
from qatkit.data import DataModule
from qatkit.data.boxed_pictures import coco_boxes, voc_boxes
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

SOURCES = {VOC_BOXES: voc_boxes, COCO_BOXES: coco_boxes}
PLAIN: dict[str, Any] = {
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "pixels": "0..255",
    "workers": 0,
    "batch_size": 4,
}


def loaded(root: Path, source: str = VOC_BOXES, **settings: Any) -> DataModule:
    given = PLAIN | {"image_size": [48, 64], "fit": "resize"} | settings
    config = DataConfig(source=source, root=str(root), **given)
    return DataModule(config, SOURCES[source], seed=3, task=task_of("detection"))


def rectangle(image: torch.Tensor, label: int) -> NDArray[Any] | None:
    """Returns [x0, y0, x1, y1] around the pixels near a class's colour, or None if they are fewer than 8."""
    apart = (image - torch.tensor(COLOURS[label]).view(3, 1, 1)).abs().amax(0)
    rows, columns = (apart < 60).nonzero(as_tuple=True)
    if len(rows) < 8:
        return None
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


@pytest.mark.parametrize(("source", "make"), [(VOC_BOXES, voc_folder), (COCO_BOXES, coco_folder)])
def test_both_splits_have_boxes(source: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    data = loaded(make(tmp_path / "d"), source)
    assert data.classes == ("brick", "leaf") and data.num_classes == 2 and data.labelled
    (images, boxes), *others = data.test_batches()
    assert not others and images.shape == (8, 3, 48, 64) and boxes.shape == (8, 2, 6)
    for image, rows in zip(images, boxes, strict=True):
        for label, *corners, ignored in rows.tolist():
            np.testing.assert_array_equal(rectangle(image, int(label)), corners)
            assert ignored == 0


@pytest.mark.parametrize("fit", ["resize", "letterbox", "crop"])
@pytest.mark.parametrize("augment", ["none", "flip", "scale_flip"])
def test_boxes_go_where_their_pictures_go(augment: str, fit: str, tmp_path: Path) -> None:
    data = loaded(voc_folder(tmp_path / "d"), augment=augment, fit=fit, image_size=[80, 64])
    seen, moved = 0, []
    for images, boxes in data.train_dataloader():
        for image, rows in zip(images, boxes, strict=True):
            for label, *corners, _ in rows[rows[:, 0] >= 0].tolist():
                found = rectangle(image, int(label))
                assert found is not None
                np.testing.assert_allclose(found, corners, atol=1.6)  # resizing mixes colours at edges
                seen += 1
                moved.append(corners)
    assert seen > 20 and len({tuple(np.round(one)) for one in moved}) > 10


def test_an_epoch_has_the_same_boxes_again(tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "d")
    first, second = (
        [boxes for _, boxes in loaded(root, augment="scale_flip").train_dataloader()] for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_boxes_mostly_outside_are_dropped(tmp_path: Path) -> None:
    data = loaded(voc_folder(tmp_path / "d"), augment="scale_flip", image_size=[32, 32], fit="crop")
    counts, areas = [], []
    for _, boxes in data.train_dataloader():
        kept = boxes[boxes[..., 0] >= 0]
        counts.append(len(kept))
        areas.append(((kept[:, 3:5] - kept[:, 1:3]).prod(1)).min())
        assert (kept[:, 1:5] >= 0).all() and (kept[:, 1:5] <= 32).all()
    assert 0 < sum(counts) < 48 and min(areas) > 0


def rewritten(root: Path, name: str, old: str, new: str) -> None:
    path = root / "Annotations" / f"{name}.xml"
    text = path.read_text()
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text, count=1))


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no area": (
        lambda root: rewritten(root, "train000", r"<xmax>\d+</xmax>", "<xmax>0</xmax>"),
        r"boxes with an area inside their pictures; 1 wrong: train000.png \(box .* has no area\)",
    ),
    "outside": (
        lambda root: rewritten(root, "test001", r"<xmax>\d+</xmax>", "<xmax>90</xmax>"),
        r"1 wrong: test001.png \(box .*, 90, .* exceeds 64 x 48 pixels\)",
    ),
    "missing picture": (
        lambda root: (root / "JPEGImages" / "train003.png").unlink(),
        r"a picture for each annotation; 1 missing: train003.jpg",
    ),
    "another size": (
        lambda root: rewritten(root, "train002", r"<width>\d+</width>", "<width>63</width>"),
        r"train002.png has 64 x 48 pixels, but its annotation says 63 x 48",
    ),
    "no number": (
        lambda root: rewritten(root, "train002", r"<xmin>\d+</xmin>", "<xmin>left</xmin>"),
        r"train002.xml can't be read \(could not convert string to float: 'left'\)",
    ),
    "damaged": (
        lambda root: (root / "Annotations" / "train002.xml").write_text("<annotation>"),
        r"xml can't be read \(no element found",
    ),
    "an untrained class": (
        lambda root: rewritten(root, "test000", r"<name>leaf</name>", "<name>tree</name>"),
        r"objects of each class in the training pictures; there are none of tree",
    ),
    "no test list": (
        lambda root: (root / "ImageSets" / "Main" / "test.txt").unlink(),
        r"ImageSets/Main has no list for test or val",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_in_one_line(kind: str, tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "d", 6, 4)
    MISTAKES[kind][0](root)
    with pytest.raises(ConfigError, match=MISTAKES[kind][1]):
        loaded(root)


def test_val_does_not_verify_what_trainval_trains(tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "d", 6, 4)
    lists = root / "ImageSets" / "Main"
    (lists / "test.txt").rename(lists / "val.txt")
    (lists / "trainval.txt").write_text((lists / "train.txt").read_text() + (lists / "val.txt").read_text())
    splits = voc_boxes(str(root), False, 0)
    assert len(splits.train) == 6 and len(splits.test) == 4


def test_wrong_boxes_can_be_left_out(tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "d", 6, 4)
    MISTAKES["no area"][0](root)
    data = loaded(root, bad="skip")
    assert any("boxes left out: 1, train000.png" in note for note in data.notes)
    counts = [int((boxes[..., 0] >= 0).sum()) for _, boxes in data.image_batches(range(6), 6)]
    assert counts == [11]


def test_categories_have_to_be_the_same(tmp_path: Path) -> None:
    root = coco_folder(tmp_path / "d", 6, 4)
    path = root / "annotations" / "instances_val.json"
    record = json.loads(path.read_text())
    record["categories"][1]["name"] = "tree"
    path.write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match=r"the same categories in both splits; only one split has leaf, tree"
    ):
        loaded(root, COCO_BOXES)


def test_policies_that_move_pixels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.policy=rand_augment: .*a policy moves pixels"):
        loaded(voc_folder(tmp_path / "d", 6, 4), policy="rand_augment")
    with pytest.raises(ConfigError, match=r"data.augment=resized_crop"):
        loaded(tmp_path / "d", augment="resized_crop")
