"""Tests of the data module: limits on images, calibration images, order, fingerprints and refused values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from qatkit.config.schema import DataConfig
from qatkit.data import (
    DataModule,
    Preprocessing,
    Splits,
    TensorImages,
    image_folder,
)
from qatkit.data.loading import EpochSampler, balanced_subset
from qatkit_verify.errors import ConfigError

NONE = TensorImages(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), [])
TWO = TensorImages(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), [0, 3])


def in_memory(count: int = 40, classes: int = 4, test: int = 8) -> Callable[[str | None, bool, int], Splits]:
    def source(root: str | None, download: bool, seed: int) -> Splits:
        def part(n: int) -> TensorImages:
            values = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 8, 8)
            return TensorImages(values, [i % classes for i in range(n)])

        names = tuple(f"c{i}" for i in range(classes))
        return Splits(part(count), part(test), names, Preprocessing(8, 8, (0.0,), (1.0,)))

    return source


def which(images: Tensor) -> list[int]:
    """Returns the index that each image of `in_memory` has in its split, read from its first pixel."""
    return [int(v) for v in images[:, 0, 0, 0].mul(255).round()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"policy": "mixup"},
            r"data\.policy=mixup: expected one of none, trivial_augment, rand_augment, auto_augment, aug_mix",
        ),
        ({"augment": "mixup"}, r"data\.augment=mixup: expected one of none, flip, crop_flip, resized_crop"),
        ({"batch_size": 0}, r"data\.batch_size=0: expected an integer of at least 1"),
        ({"eval_batch_size": -1}, r"data\.eval_batch_size=-1: expected an integer of at least 1"),
        ({"train_images": 0}, r"data\.train_images=0: expected an integer of at least 1"),
        ({"test_images": -5}, r"data\.test_images=-5: expected an integer of at least 1"),
        ({"workers": -1}, r"data\.workers=-1: expected an integer of at least 0"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataModule(DataConfig(**values), in_memory(), 0)


def test_more_than_the_training_images_in_a_batch_is_refused() -> None:
    data = DataModule(DataConfig(batch_size=41, workers=0), in_memory(), 0)
    with pytest.raises(
        ConfigError, match=r"data\.batch_size=41: expected at most 40, the number of training images"
    ):
        data.train_dataloader()


def test_a_batch_is_adapted_to_few_images_and_noted() -> None:
    data = DataModule(DataConfig(batch_size=41, workers=0, train_images=17), in_memory(), 0)
    data.adapt_batch(3)
    data.check_calibration(512, 64, adapt=True)
    assert (data.config.batch_size, data.steps_per_epoch(3)) == (5, 1)
    assert list(data.notes) == [
        "data.batch_size=41: 5 is used instead, since there are 17 training images for 3 batches per step",
        "calibration.batch_size=64: 17 is used instead, the number of training images",
    ]
    data.adapt_batch(3)
    data.check_calibration(512, 17, adapt=True)
    assert data.config.batch_size == 5 and len(data.notes) == 2


def test_preprocessing_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    for folder in ("train/cat", "val/cat"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "0.png")
    config = DataConfig(root=str(tmp_path), image_size=16)
    with pytest.raises(
        ConfigError, match=r"data\.mean=null: expected a value, since neither model\.weights nor"
    ):
        DataModule(config, image_folder, 0)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([1, 2], r"expected a function that returns qatkit\.data\.Splits, not list"),
        (Splits(NONE, NONE, ("a",)), r"train\.targets has 0 labels for .*; it must have one label per image"),
        (Splits(TWO, TWO, ("a", "b")), r"labels of train must be 0\.\.1, but they are 0\.\.3"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(splits: Any, message: str) -> None:
    config = DataConfig(source="my.source")
    with pytest.raises(ConfigError, match=r"data\.source=my\.source: " + message):
        DataModule(config, lambda root, download, seed: splits, 0)


def test_caps_take_a_seeded_balanced_part() -> None:
    def labels_and_ids(seed: int) -> tuple[Counter[int], list[int]]:
        config = DataConfig(batch_size=1, train_images=12, test_images=6, workers=0)
        data = DataModule(config, in_memory(), seed)
        batches = list(data.train_dataloader())
        assert sum(len(labels) for _, labels in data.test_batches()) == 6
        ids = sorted(i for images, _ in batches for i in which(images))
        return Counter(int(label) for _, labels in batches for label in labels), ids

    counts, ids = labels_and_ids(0)
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3}
    assert labels_and_ids(0)[1] == ids
    assert labels_and_ids(1)[1] != ids


def test_balanced_subset_of_unequal_classes() -> None:
    labels = [0] * 50 + [1] * 3 + [2] * 10
    chosen = balanced_subset(labels, 21, "x")
    assert Counter(labels[i] for i in chosen) == {0: 9, 1: 3, 2: 9}
    assert Counter(labels[i] for i in chosen[:6]) == {0: 2, 1: 2, 2: 2}
    assert sorted(balanced_subset(labels, 63, "x")) == list(range(63))


def test_calibration_uses_training_images_without_augmentation() -> None:
    config = DataConfig(batch_size=4, train_images=20, augment="crop_flip", workers=0)
    data = DataModule(config, in_memory(), 0)
    used = {i for images, _ in data.train_dataloader() for i in which(images)}
    batches = list(data.calibration_batches(8, batch_size=4))
    seen = [i for images, _ in batches for i in which(images)]
    assert seen == data.calibration_indices(8)
    assert set(seen) <= used
    assert [Counter(labels.tolist()) for _, labels in batches] == [{0: 1, 1: 1, 2: 1, 3: 1}] * 2
    assert data.calibration_indices(8) != DataModule(config, in_memory(), 1).calibration_indices(8)
    for images in (0, -1):
        with pytest.raises(
            ConfigError, match=rf"calibration\.images={images}: expected an integer of at least 1"
        ):
            data.calibration_batches(images, 4)
    with pytest.raises(ConfigError, match=r"calibration\.batch_size=0"):
        data.calibration_batches(4, 0)
    with pytest.warns(UserWarning, match=r"calibration\.images=21: the train split has only 20, and all"):
        assert sorted(data.calibration_indices(21)) == sorted(used)


def test_digests_tell_images_by_what_they_hold(tmp_path: Path) -> None:
    for part, name, grey in (("train", "a", 10), ("train", "b", 20), ("test", "a", 0), ("test", "b", 0)):
        (tmp_path / part / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (grey, grey, grey)).save(tmp_path / part / name / "0.png")
    config = DataConfig(root=str(tmp_path), image_size=8, mean=[0.0], std=[1.0])
    data = DataModule(config, image_folder, 0)
    first = data.digests([0, 1])
    assert first[0] != first[1] and data.digests([1]) == first[1:]
    Image.new("RGB", (8, 8), (21, 21, 21)).save(tmp_path / "train" / "b" / "0.png")
    assert data.digests([0]) == first[:1] and data.digests([1]) != first[1:]

    kept = DataModule(DataConfig(), in_memory(), 0)
    assert len(set(kept.digests(range(40)))) == 40
    assert kept.digests([3, 3]) == [kept.digests([3])[0]] * 2


def test_validation_and_test_batches_are_ordered_and_complete() -> None:
    data = DataModule(DataConfig(eval_batch_size=3, workers=2), in_memory(), 0)
    for batches in (data.val_dataloader(), data.test_batches()):
        assert [which(images) for images, _ in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_large_test_images_come_a_few_at_a_time() -> None:
    for size, together in ((8, 6), (2048, 4), (4096, 1)):
        data = DataModule(DataConfig(eval_batch_size=6, image_size=size), in_memory(), 0)
        assert len(next(iter(data.test_batches()))[0]) == together


def test_ranks_share_an_epoch_equally_and_without_overlap() -> None:
    shares = [[i for _, i in EpochSampler(range(103), 5, rank, 4)] for rank in range(4)]
    assert [len(share) for share in shares] == [25] * 4
    assert len({i for share in shares for i in share}) == 100
    one = EpochSampler(range(103), 5, 0, 4)
    one.epoch = 1
    assert [i for _, i in one] != shares[0]


def _write(root: Path, levels: Sequence[int], names: Sequence[str] = ("a", "b")) -> Path:
    for split in ("train", "test"):
        for number, level in enumerate(levels):
            place = root / split / names[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), level).save(place)
    return root


def test_a_folder_fingerprint_follows_its_images_not_its_path(tmp_path: Path) -> None:
    def images(root: Path, **values: Any) -> str:
        return DataModule(
            DataConfig(root=str(root), image_size=8, mean=[0.5], std=[0.5], **values), image_folder, 0
        ).fingerprint

    levels = [10, 20, 30, 40, 50, 60]
    one = _write(tmp_path / "one", levels)
    elsewhere = _write(tmp_path / "elsewhere", levels)
    test_only = _write(tmp_path / "test_only", levels)
    (test_only / "test/a/0.png").write_bytes((one / "train/b/5.png").read_bytes())
    same = [images(root) for root in (one, elsewhere, test_only)]
    assert len(set(same)) == 1
    others = [
        images(_write(tmp_path / "changed", [10, 20, 30, 40, 50, 61])),
        images(_write(tmp_path / "moved", [30, 20, 10, 40, 50, 60])),
        images(_write(tmp_path / "more", [*levels, 70])),
        images(_write(tmp_path / "renamed", levels, ("a", "c"))),
        images(_write(tmp_path / "relabelled", levels, ("b", "a"))),
        images(one, train_images=4),
    ]
    assert len({*same, *others}) == 1 + len(others)


def test_in_memory_images_have_a_fingerprint_of_their_values() -> None:
    config = DataConfig(workers=0)

    def drawn(root: str | None, download: bool, seed: int) -> Splits:
        class Noise(TensorImages):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                return torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8), self.targets[index]

        splits = in_memory()(root, download, seed)
        noise = Noise(torch.zeros(40, 1, 8, 8, dtype=torch.uint8), list(splits.train.targets))
        return Splits(noise, splits.test, splits.classes, splits.default_preprocessing)

    def brighter(root: str | None, download: bool, seed: int) -> Splits:
        splits = in_memory()(root, download, seed)
        values = torch.stack([torch.full((1, 8, 8), index + 1, dtype=torch.uint8) for index in range(40)])
        train = TensorImages(values, list(splits.train.targets))
        return Splits(train, splits.test, splits.classes, splits.default_preprocessing)

    found = [DataModule(config, in_memory(), 0).fingerprint for _ in range(2)]
    assert found[0] == found[1] != DataModule(config, brighter, 0).fingerprint
    noise = [DataModule(config, drawn, 0).fingerprint for _ in range(2)]
    assert noise[0] == noise[1] != found[0]


def test_a_rare_class_is_not_held_out_as_a_whole() -> None:
    labels = [0] * 1500 + [1] * 1500 + [2] * 80 + [3]

    def source(root: str | None, download: bool, seed: int) -> Splits:
        values = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
        train = TensorImages(values.expand(len(labels), 1, 8, 8), labels)
        return Splits(train, TWO, tuple("abcd"), Preprocessing(8, 8, (0.0,), (1.0,)))

    def held(count: int | None) -> dict[int, int]:
        return dict(
            Counter(labels[index] for index in DataModule(DataConfig(), source, 0, held_out=count).held_out)
        )

    assert held(None) == {0: 300, 1: 300, 2: 16}
    assert held(12) == {0: 4, 1: 4, 2: 4}  # few enough to be balanced
    half = held(1540)
    assert sum(half.values()) == 1540 and half[2] in range(38, 43) and abs(half[0] - half[1]) <= 1


def test_classes_of_names_that_no_report_can_hold_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in (b"caf\xe9", b"plain"):
            folder = os.fsencode(tmp_path) + b"/" + split.encode() + b"/" + name
            os.makedirs(folder)
            Image.new("L", (8, 8)).save(os.fsdecode(folder + b"/0.png"))
    with pytest.raises(ConfigError, match=r"classes must have names that UTF-8 can encode, not caf.udce9"):
        DataModule(DataConfig(root=str(tmp_path), image_size=8, mean=[0.5], std=[0.5]), image_folder, 0)
