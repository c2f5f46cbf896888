"""Tests of data sources: they return the published images and labels, or name what is missing."""

from __future__ import annotations

import pickle
import urllib.request
from collections import Counter
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets

from qatkit.config.schema import DataConfig
from qatkit.data import (
    DataModule,
    Splits,
    cifar10,
    digits,
    fashion_mnist,
    image_folder,
    one_picture_each,
    synthetic,
)
from qatkit_verify.errors import ConfigError

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def colour(height: int, width: int, seed: int = 0) -> Image.Image:
    """Returns a smooth colour image with some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(-10, 11, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse, dtype=np.int64) + noise, 0, 255).astype(np.uint8))


def write_folder(root: Path, classes: dict[str, list[str]], images: int = 3, test: str = "val") -> None:
    for split, names in (("train", classes["train"]), (test, classes["test"])):
        for number, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(images):
                size = (24 + 5 * index, 40 - 4 * index)
                colour(*size, seed=100 * number + index).save(folder / f"{index}.png")


def test_digits_are_scikit_learns_in_a_seeded_stratified_split() -> None:
    from sklearn.datasets import load_digits

    splits = digits(None, False, seed=1)
    assert (len(splits.train), len(splits.test), len(splits.classes)) == (1437, 360, 10)
    counts = Counter(splits.test.targets)
    assert min(counts.values()) >= 34
    assert max(counts.values()) <= 37
    published = zip(*load_digits(return_X_y=True), strict=True)
    expected = [(np.round(x * 255 / 16).astype(np.uint8).tobytes(), int(label)) for x, label in published]
    parts = (splits.train, splits.test)
    seen = [(np.asarray(part[i][0]).tobytes(), part[i][1]) for part in parts for i in range(len(part))]
    assert sorted(seen) == sorted(expected)
    assert digits(None, False, seed=1).test.targets == splits.test.targets
    assert digits(None, False, seed=2).test.targets != splits.test.targets


def test_synthetic_classes_can_be_learned() -> None:
    splits = synthetic(None, False, seed=0)

    def flat(images: Any) -> Tensor:
        return torch.stack([images[i][0].float().flatten() for i in range(len(images))])

    train, labels = flat(splits.train), torch.tensor(splits.train.targets)
    centres = torch.stack([train[labels == c].mean(0) for c in range(len(splits.classes))])
    nearest = torch.cdist(flat(splits.test), centres).argmin(1)
    assert (nearest == torch.tensor(splits.test.targets)).float().mean() > 0.95
    assert torch.equal(train, flat(synthetic(None, False, seed=0).train))
    assert not torch.equal(train, flat(synthetic(None, False, seed=1).train))


@pytest.mark.parametrize("test", ["val", "test"])
def test_image_folder_reads_images_of_any_size(tmp_path: Path, test: str) -> None:
    write_folder(tmp_path, {"train": ["cat", "dog"], "test": ["cat", "dog"]}, test=test)
    config = DataConfig(root=str(tmp_path), image_size=16, mean=list(CIFAR_MEAN), std=list(CIFAR_STD))
    config.workers, config.eval_batch_size = 0, 4
    data = DataModule(config, image_folder, 0)
    assert (data.classes, data.num_classes) == (("cat", "dog"), 2)
    batches = list(data.test_batches())
    assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 16, 16), (2, 3, 16, 16)]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    files = [tmp_path / test / name / f"{i}.png" for name in ("cat", "dog") for i in range(3)]
    expected = data.preprocessing.eval_batch([Image.open(file).convert("RGB") for file in files])
    assert torch.equal(torch.cat([images for images, _ in batches]), expected)


def test_image_folder_names_what_is_wrong(tmp_path: Path) -> None:
    def message(root: Path | None) -> str:
        with pytest.raises(ConfigError) as caught:
            image_folder(None if root is None else str(root), False, 0)
        assert caught.value.key == "data.root"
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "data.root=null" in message(None)
    assert "no such folder" in message(tmp_path / "absent")
    assert "it has none of them" in message(tmp_path)
    (tmp_path / "train").mkdir()
    assert "it has only train" in message(tmp_path)
    (tmp_path / "val").mkdir()
    assert "train has no class folder" in message(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    assert "only train has cat" in message(tmp_path)
    (tmp_path / "val" / "cat").mkdir()
    assert "images in every class folder; train has none in cat" in message(tmp_path)
    names = [f"class{i}" for i in range(7)]
    write_folder(tmp_path / "other", {"train": ["cat", *names], "test": ["cat", "dog"]})
    text = message(tmp_path / "other")
    assert "only train has class0, class1, class2, class3, class4 and 2 more, and only val has dog" in text


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_becomes_unreadable_is_named(tmp_path: Path, workers: int) -> None:
    write_folder(tmp_path, {"train": ["cat"], "test": ["cat"]})
    config = DataConfig(root=str(tmp_path), image_size=16, mean=list(CIFAR_MEAN), std=list(CIFAR_STD))
    config.workers = workers
    data = DataModule(config, image_folder, 0)
    (tmp_path / "val" / "cat" / "1.png").write_bytes(b"this is no image")
    with pytest.raises(
        ConfigError,
        match=r"data\.root=.*val.cat.1\.png: the file is not a readable image \(Pillow does not know its format",
    ):
        list(data.test_batches())


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Writes CIFAR-10's files with two images each, and gives torchvision the checksums to compare."""
    folder = root / datasets.CIFAR10.base_folder
    folder.mkdir(parents=True)
    pictures = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, md5((folder / name).read_bytes()).hexdigest()]

    files = [
        write(f"part_{i}", {"data": pictures[2 * i : 2 * i + 2].reshape(2, -1), "labels": [i, i + 1]})
        for i in range(6)
    ]
    meta = write("meta", {"label_names": [f"name{i}" for i in range(10)]})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", files[:5])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", files[5:])
    wanted = {"filename": meta[0], "md5": meta[1], "key": "label_names"}
    monkeypatch.setattr(datasets.CIFAR10, "meta", wanted)
    return pictures


def test_cifar10_reads_the_published_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = write_cifar(tmp_path, monkeypatch)
    splits = cifar10(str(tmp_path), False, 0)
    assert (len(splits.train), len(splits.test), splits.classes[3]) == (10, 2, "name3")
    image, label = splits.train[5]
    assert isinstance(image, Tensor)
    assert np.array_equal(image.numpy(), pictures[5])
    assert (label, splits.test.targets) == (3, [5, 6])


def test_fashion_mnist_reads_the_published_files(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    pictures = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    for name, count in (("train", 5), ("t10k", 2)):
        header = b"".join(n.to_bytes(4, "big") for n in (0x803, count, 28, 28))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pictures[:count].tobytes())
        header = b"".join(n.to_bytes(4, "big") for n in (0x801, count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + bytes(range(count)))
    splits = fashion_mnist(str(tmp_path), False, 0)
    image, label = splits.train[4]
    assert isinstance(image, Tensor)
    assert np.array_equal(image[0].numpy(), pictures[4])
    assert (label, len(splits.test), splits.classes[0]) == (4, 2, "T-shirt/top")


@pytest.mark.parametrize(
    ("source", "file"),
    [(cifar10, "cifar-10-python.tar.gz"), (fashion_mnist, "train-images-idx3-ubyte.gz")],
)
@pytest.mark.parametrize("download", [False, True])
def test_missing_files_are_named_with_their_place(
    source: Callable[[str | None, bool, int], Splits],
    file: str,
    download: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # an opener made earlier would not know the proxy
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there: a real connection failure
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as caught:
        source(str(tmp_path), download, 0)
    text = str(caught.value)
    told = "cannot be fetched" if download else "are missing or damaged"
    assert text.startswith(f"data.root={tmp_path}: the files {told} (")
    assert ("set data.download=true" in text) is not download
    assert file in text.split("put ")[1]
    assert str(tmp_path) in text.split("put ")[1]
    assert "\n" not in text
    monkeypatch.setattr(urllib.request, "_opener", None)
    with pytest.raises(ConfigError, match=r"data\.root=null"):
        source(None, download, 0)


def test_one_picture_each_takes_the_sorted_names_for_labels(tmp_path: Path) -> None:
    colours = {"n2_hen.jpg": 20, "n1_cock.png": 10, "n4_owl.JPEG": 40, "n3_jay.jpg": 30, "n5_kite.png": 50}
    for name, grey in colours.items():
        kind = "png" if name.endswith("png") else "jpeg"
        Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / name, format=kind)
    (tmp_path / "README.md").write_text("no picture")

    splits = one_picture_each(str(tmp_path), False, 0)

    assert splits.classes == ("n1_cock", "n2_hen", "n3_jay", "n4_owl", "n5_kite")
    for part, labels in ((splits.train, [0, 2, 4]), (splits.test, [1, 3])):
        assert list(part.targets) == labels
        for index, label in enumerate(labels):
            picture, given = part[index]
            assert isinstance(picture, Image.Image) and given == label
            assert np.abs(np.asarray(picture).astype(int) - 10 * (label + 1)).max() <= 1


def test_one_picture_each_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=null: expected a folder with at least two pictures"):
        one_picture_each(None, False, 0)
    with pytest.raises(ConfigError, match=r"at least two pictures .*; it has 0"):
        one_picture_each(str(tmp_path), False, 0)
