"""Tests of data.cache=ram: bit-identical images, each decoded once among all processes, up to cache_mb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import tiny

from qatkit.config.schema import DataConfig, TrainerConfig
from qatkit.data import DataModule, Splits, TensorImages, image_folder
from qatkit.data.pace import Pass, pace_of
from qatkit.data.preprocessing import as_tensor
from qatkit.data.ram_cache import KeptImages
from qatkit.run import memory
from qatkit_verify.errors import ConfigError

SIZES = ((40, 31), (24, 24), (24, 24), (17, 50))  # width, height
NORM: dict[str, Any] = {"image_size": 16, "resize": 20, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with two classes of PNG and JPEG files of several sizes, one in eight grey."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 6)):
        for index in range(count):
            width, height = SIZES[index % len(SIZES)]
            shape = (height, width) if index % 8 == 7 else (height, width, 3)
            place = root / part / f"class{index % 2}"
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(random.integers(0, 256, shape, np.uint8))
            image.save(place / f"{index}.{'png' if index % 3 else 'jpg'}")
    return root


def module(folder: Path, **values: Any) -> DataModule:
    config = DataConfig(root=str(folder), batch_size=4, eval_batch_size=4, augment="resized_crop", **NORM)
    for key, value in values.items():
        setattr(config, key, value)
    return DataModule(config, image_folder, 0)


def passes(data: DataModule) -> list[torch.Tensor]:
    """Returns the batches of two training epochs, of the test images and of some calibration images."""
    loader = data.train_dataloader()
    seen = [x for _ in range(2) for x, _ in loader]
    return [*seen, *(x for x, _ in data.test_batches()), *(x for x, _ in data.calibration_batches(8, 4))]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_from_memory_are_those_of_the_files_bit_for_bit(folder: Path, workers: int) -> None:
    plain = passes(module(folder, workers=0))
    data = module(folder, workers=workers, cache="ram", cache_mb=1)
    for _ in range(2):
        for one, other in zip(plain, passes(data), strict=True):
            assert torch.equal(one, other)
    decoded = sum(height * width * (1 if index % 8 == 7 else 3) for count in (16, 6) for index in range(count)
                  for width, height in [SIZES[index % 4]])  # fmt: skip
    assert data._block is not None
    assert data._block._used.tolist() == [decoded, 22]  # each once, whichever worker decoded it
    assert "22 decoded images kept in 0 MB" in data.pace


def test_a_file_is_read_once(folder: Path, tmp_path: Path) -> None:
    """Checks that images are read from memory after their files are deleted."""
    (tmp_path / "copy").mkdir()
    for one in folder.rglob("*.*"):
        there = tmp_path / "copy" / one.relative_to(folder)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(one.read_bytes())
    data = module(tmp_path / "copy", workers=0, cache="ram")
    before = [x for x, _ in data.test_batches()]
    for one in (tmp_path / "copy" / "val").rglob("*.*"):
        one.unlink()
    assert all(torch.equal(x, y) for x, (y, _) in zip(before, data.test_batches(), strict=True))


def test_beyond_the_bound_images_are_decoded_anew() -> None:
    shape = (3, 400, 500)  # 0.6 MB
    images = [Image.fromarray(np.full((400, 500, 3), shade, np.uint8)) for shade in range(4)]

    class Files:
        targets = (0, 1, 0, 1)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return images[index], index % 2

    splits = Splits(Files(), Files(), ("a", "b"))
    config = DataConfig(workers=0, cache="ram", cache_mb=1, **NORM)
    data = DataModule(config, lambda root, download, seed: splits, 0)
    loaded = data._train_loaded
    assert isinstance(loaded, KeptImages)
    for _ in range(2):
        for index in range(4):
            image, label = loaded[index]
            assert image.shape == shape and label == index % 2 and bool((image == index).all())
    assert data._block is not None and data._block._used.tolist() == [600_000, 1]


def test_images_that_are_in_memory_already_stay_where_they_are() -> None:
    given = TensorImages(torch.zeros(8, 3, 20, 20, dtype=torch.uint8), [0, 1] * 4)
    splits = Splits(given, given, ("a", "b"))
    data = DataModule(DataConfig(cache="ram", **NORM), lambda root, download, seed: splits, 0)
    assert data._train_loaded is data._train_images


def test_a_tensor_of_a_source_is_stored_as_it_lies() -> None:
    wide = torch.arange(3 * 18 * 22, dtype=torch.int64).remainder(251).to(torch.uint8).view(3, 18, 22)
    forms = [wide, wide.permute(1, 2, 0).contiguous().permute(2, 0, 1), wide[:, ::2], wide[:1]]

    class Tensors:
        targets = (0, 1, 0, 1)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return forms[index], index % 2

    splits = Splits(Tensors(), Tensors(), ("a", "b"))
    config = DataConfig(workers=0, cache="ram", cache_mb=1, **NORM)
    loaded = DataModule(config, lambda root, download, seed: splits, 0)._train_loaded
    for _ in range(2):
        assert all(torch.equal(as_tensor(loaded[index][0]), form) for index, form in enumerate(forms))


def test_a_ram_cache_beyond_memory_is_refused_for_all_processes(tmp_path: Path, folder: Path) -> None:
    room = memory.available_memory()
    assert room is not None
    config = tiny(tmp_path, trainer=TrainerConfig(devices=2))
    config.data = DataConfig(root=str(folder), workers=0, cache="ram", cache_mb=room // 1_500_000, **NORM)
    data = DataModule(config.data, image_folder, 0)
    with pytest.raises(
        ConfigError, match=r"^data.cache_mb=\d+: expected at most \d+ here; .* of decoded images exceeds "
    ):
        memory.check_inputs(config, data)
    config.data.cache_mb //= 2
    memory.check_inputs(config, data)


def test_the_pace_tells_the_pass_that_decoded_from_the_others() -> None:
    passes = [Pass(100, 3.0, 4.0), Pass(100, 0.1, 0.5), Pass(100, 0.1, 0.5), Pass()]
    assert pace_of(passes) == "60 samples/s, 64 % of the time waiting for data"
    kept = "100 decoded images kept in 12 MB"
    assert pace_of(passes, kept) == (
        "25 samples/s, 75 % of the time waiting for data, then 200 samples/s, 20 % of the time waiting for data; "
        + kept
    )
    assert pace_of([Pass()], kept) == ""
