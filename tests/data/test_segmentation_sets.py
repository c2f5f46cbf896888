"""Tests of reading Pascal VOC and Cityscapes: class numbers as in the files, or train ids, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CONF
from numpy.typing import NDArray
from PIL import Image

from qatkit.config.compose import compose_config
from qatkit.data.segmentation_sets import cityscapes, voc_segmentation
from qatkit.data.sources import Source
from qatkit.run.build import data_of
from qatkit_verify.errors import ConfigError

SIZE = (12, 18)
# The 19 evaluated classes of Cityscapes, by the ids in its label pictures.
EVALUATED = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


def _save(path: Path, numbers: NDArray[np.uint8], palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(numbers)
    if palette:
        image = Image.fromarray(numbers, "P")
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
    image.save(path)


def voc(root: Path, largest: int = 20) -> dict[str, NDArray[np.uint8]]:
    """Writes a VOC folder with palette PNGs and 255 at borders; returns the class numbers of each picture."""
    base, draw, numbers = root / "VOCdevkit" / "VOC2012", np.random.default_rng(1), {}
    for part, count in (("train", 5), ("val", 3)):
        names = [f"2012_{part}{i}" for i in range(count)]
        (base / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
        (base / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            labels = draw.integers(0, largest + 1, SIZE).astype(np.uint8)
            labels[:, 0], labels[0, 1] = 255, largest
            numbers[name] = labels
            _save(base / "SegmentationClass" / f"{name}.png", labels, palette=True)
            _save(base / "JPEGImages" / f"{name}.jpg", draw.integers(0, 256, (*SIZE, 3)).astype(np.uint8))
    return numbers


def city(root: Path, largest: int = 33) -> dict[str, NDArray[np.uint8]]:
    """Writes a Cityscapes folder; returns the class ids of each picture's pixels."""
    draw, numbers = np.random.default_rng(2), {}
    for part, count in (("train", 4), ("val", 3)):
        for i in range(count):
            place, name = Path(part, f"town{i % 2}"), f"town{i % 2}_00000{i}_000019"
            labels = draw.integers(0, largest + 1, SIZE).astype(np.uint8)
            labels[0, 0] = largest
            numbers[name] = labels
            _save(root / "gtFine" / place / f"{name}_gtFine_labelIds.png", labels)
            _save(
                root / "leftImg8bit" / place / f"{name}_leftImg8bit.png", np.repeat(labels[..., None], 3, 2)
            )
    return numbers


def maps_of(name: str, root: Path) -> torch.Tensor:
    """Returns the maps of the test split, as a run reads them."""
    settings = (
        f"data={name}",
        f"data.root={root}",
        "data.image_size=[12,18]",
        "data.workers=0",
        "data.batch_size=2",
        "calibration.batch_size=2",
    )
    config = compose_config(CONF, [*settings, "task=segmentation", "model=lraspp", "model.num_classes=null"])
    return torch.cat([maps for _, maps in data_of(config).test_batches()])


def test_voc_borders_count_as_nothing(tmp_path: Path) -> None:
    numbers = voc(tmp_path)
    splits = voc_segmentation(str(tmp_path), False, 0)
    assert len(splits.train) == 5 and len(splits.classes) == 21 and splits.classes[15] == "person"
    wanted = np.stack([numbers[f"2012_val{i}"] for i in range(3)])
    assert (maps_of("voc_segmentation", tmp_path).numpy() == wanted).all()


def test_cityscapes_ids_become_those_of_training(tmp_path: Path) -> None:
    numbers = city(tmp_path)
    splits = cityscapes(str(tmp_path), False, 0)
    assert len(splits.train) == 4 and len(splits.classes) == 19
    assert splits.classes[0] == "road" and splits.classes[18] == "bicycle"
    ids = np.stack([numbers[name] for name in sorted(numbers) if name in str(splits.test.targets)])
    wanted = np.full_like(ids, 255)
    for train_id, number in enumerate(EVALUATED):
        wanted[ids == number] = train_id
    assert (maps_of("cityscapes", tmp_path).numpy() == wanted).all()


@pytest.mark.parametrize(
    ("source", "made", "told"),
    [
        (voc_segmentation, None, r"VOC2012 \(.*\); fetch https://.*VOCtrainval_11-May-2012.tar and unpack it into "),
        (cityscapes, None, r"; download leftImg8bit_\w+.zip and gtFine_\w+.zip from .* unpack both into the folder"),
        (voc_segmentation, lambda root: voc(root, 21), r"expected label .* numbers up to 20; the number 21 occurs"),
        (cityscapes, lambda root: city(root, 34), r"expected label .* numbers up to 33; the number 34 occurs"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_said(
    source: Source, made: Callable[[Path], object] | None, told: str, tmp_path: Path
) -> None:
    if made is not None:
        made(tmp_path)
    with pytest.raises(ConfigError, match=told) as error:
        source(str(tmp_path), False, 0)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"data.root={tmp_path}: ")


def test_a_label_picture_that_is_missing_is_named(tmp_path: Path) -> None:
    voc(tmp_path)
    (tmp_path / "VOCdevkit" / "VOC2012" / "SegmentationClass" / "2012_train2.png").unlink()
    with pytest.raises(ConfigError, match=r"2012_train2.png: the label picture can't be read"):
        voc_segmentation(str(tmp_path), False, 0)
