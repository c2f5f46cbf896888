"""Tests of samples with one array for each named input of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qatkit.config.schema import DataConfig
from qatkit.data.arrays import ArrayBatches, Port, arrays
from qatkit.data.checked import CheckedImages
from qatkit.data.inputs import inputs_of
from qatkit.data.module import DataModule
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

PORTS = (Port("ids", "int32", (None, 4), 0), Port("state", "float32", (2, None, 3), 1))


def _config(root: Path) -> DataConfig:
    return DataConfig(
        source="qatkit.data.arrays.arrays", root=str(root), workers=0, batch_size=2, eval_batch_size=2
    )


def _data(root: Path, ports: tuple[Port, ...] = PORTS) -> DataModule:
    return DataModule(_config(root), arrays, 0, task=task_of("outputs"), ports=ports)


def _sample(index: int) -> dict[str, Any]:
    ids = np.arange(4, dtype=np.int32)[None] + index
    return {"ids": ids, "state": np.full((2, 1, 3), index, np.float32)}


def _folder(root: Path, count: int = 6) -> Path:
    root.mkdir(exist_ok=True)
    for index in range(count):
        np.savez(root / f"{index}.npz", **_sample(index))
    return root


def test_samples_are_joined_along_the_batch_axis_of_each_input(tmp_path: Path) -> None:
    data = _data(_folder(tmp_path / "data"))
    (first, targets), _ = data.test_batches()
    assert torch.equal(first["ids"], torch.tensor([[1, 2, 3, 4], [3, 4, 5, 6]], dtype=torch.int32))
    assert first["state"].shape == (2, 2, 3) and first["state"][0, :, 0].tolist() == [1, 3]
    assert len(targets) == 2 and not data.labelled
    assert data.inputs.text == "arrays ids [N, 4], state [2, N, 3]"


def test_arrays_are_not_called_images(tmp_path: Path) -> None:
    data = _data(_folder(tmp_path / "data"))
    assert data.task.names.samples == "samples" and task_of("outputs").names.samples == "images"
    outputs = np.array([[0.2, 0.8], [0.6, 0.4]])
    data.task = data.task.suited([outputs], ["y"], 2)  # as after the first outputs of the model
    assert data.task.names.samples == "samples" and data.task.names.decision == "top-1 class"
    with pytest.raises(ConfigError, match="expected at most 3, the number of calibration samples"):
        data.check_calibration(3, 4)


def test_an_example_repeats_the_samples_of_the_data(tmp_path: Path) -> None:
    inputs = _data(_folder(tmp_path / "data")).inputs
    example: Any = inputs.example(5)
    assert example["ids"].shape == (5, 4) and example["state"].shape == (2, 5, 3)
    assert torch.equal(example["ids"][0], example["ids"][2])
    noise: Any = inputs.noise(2, torch.Generator().manual_seed(0))
    assert torch.equal(noise["ids"], example["ids"][:2]) and not torch.equal(
        noise["state"], example["state"][:, :2]
    )
    again: Any = inputs_of(inputs.stored()).example(5)
    assert torch.equal(again["state"], example["state"])


def test_a_file_may_hold_many_samples_and_their_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=x, label=np.arange(10) % 3)
    data = DataModule(_config(tmp_path), arrays, 0, ports=(Port("x", "float32", (None, 3), 0),))
    batches = list(data.test_batches())
    assert data.classes == ("class_0", "class_1", "class_2")
    np.testing.assert_array_equal(torch.cat([images for images, _ in batches]).numpy(), x[1::2])
    assert torch.cat([labels for _, labels in batches]).tolist() == [1, 0, 2, 1, 0]


def test_the_folders_train_and_test_are_the_splits(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        (tmp_path / part).mkdir()
        for index in range(count):
            np.save(tmp_path / part / f"{index}.npy", np.full((1, 2), index, np.float64))
    data = _data(tmp_path, (Port("any name", "float32", (1, 2), 0),))
    assert (len(data.splits.train), data.test_count) == (3, 2)
    assert data.first_batch(3).dtype == torch.float32


def test_a_model_without_a_batch_axis_takes_one_sample_at_a_time(tmp_path: Path) -> None:
    ports = (Port("ids", "int32", (1, 4), None), Port("state", "float32", (2, 1, 3), None))
    data = _data(_folder(tmp_path / "data"), ports)
    batches = list(data.test_batches())
    assert len(batches) == 3 and all(batch["ids"].shape == (1, 4) for batch, _ in batches)
    assert data.rows(8) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"state": None},
            r"state is missing in train\[0\], which has only ids; the model's inputs are ids, state",
        ),
        (
            {"ids": np.ones((1, 4), np.float32)},
            r"\['ids'\] has floating-point numbers, but the type of this input is int32",
        ),
        (
            {"ids": np.ones((1, 5), np.int32)},
            r"\['ids'\] has the shape \[1, 5\], but one sample of this input has \[1, 4\]",
        ),
        (
            {"state": np.ones((2, 3), np.float32)},
            r"\['state'\] has the shape \[2, 3\], but one sample of this input has \[2, 1, 3\]",
        ),
        ({"ids": np.full((1, 4), 2**40)}, r"\['ids'\] has numbers that int32 cannot represent"),
    ],
)
def test_what_an_input_can_not_take_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    sample = {name: one for name, one in {**_sample(0), **changes}.items() if one is not None}
    for index in range(2):
        np.savez(tmp_path / f"{index}.npz", **sample)
    with pytest.raises(ConfigError, match=message):
        _data(tmp_path)


def test_an_input_without_a_batch_axis_has_one_value(tmp_path: Path) -> None:
    ports = (Port("x", "float32", (None, 2), 0), Port("rate", "int64", (), None))
    for index in range(4):
        np.savez(tmp_path / f"{index}.npz", x=np.ones((1, 2), np.float32), rate=np.array(index))
    with pytest.raises(
        ConfigError, match="'rate' has no batch axis; expected the same values in all samples"
    ):
        _data(tmp_path, ports)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", b"PK\x03\x04 cut off", "a.npz can't be read"),
        ("a.npy", b"", "a.npy can't be read"),
        ("a.txt", b"text", "has none"),
    ],
)
def test_files_that_hold_no_arrays_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        arrays(str(tmp_path), False, 0)


def test_texts_and_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array(["a", "b"]))
    with pytest.raises(
        ConfigError, match=r"a\.npz has the array 'x' of type <U1; expected real numbers or booleans"
    ):
        arrays(str(tmp_path), False, 0)


def test_labels_of_some_files_alone_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((1, 2)), label=np.array([1]))
    np.savez(tmp_path / "b.npz", x=np.ones((1, 2)))
    with pytest.raises(ConfigError, match="only some samples have a label"):
        arrays(str(tmp_path), False, 0)


def test_settings_of_images_are_refused(tmp_path: Path) -> None:
    config = _config(_folder(tmp_path / "data"))
    config.mean = [0.5]
    with pytest.raises(
        ConfigError, match=r"data.mean=\[0.5\]: expected null with data.source=.*which gives arrays"
    ):
        DataModule(config, arrays, 0, task=task_of("outputs"), ports=PORTS)


def test_complex_values_of_a_source_are_refused() -> None:
    batches, port = ArrayBatches("my.source"), Port("ids", "int32", (None, 4), 0)
    with pytest.raises(
        ConfigError, match=r"a\['ids'\] has values of type complex64, but the type of this input"
    ):
        batches.fitted(np.ones((1, 4), np.complex64), port, "a")


def test_mistakes_in_a_source_of_arrays_speak_of_samples() -> None:
    class Source(list[Any]):
        targets = (0,)

    batches = ArrayBatches("my.source")
    with pytest.raises(ConfigError, match="has 1 label for 2 samples; it must have one label per sample"):
        CheckedImages(Source([(_sample(0), 0)] * 2), "train", "my.source", arrays=batches)
    found = CheckedImages(Source([_sample(0)]), "train", "my.source", arrays=batches)
    with pytest.raises(ConfigError, match=r"must be a pair \(sample, label\), not"):
        found[0]
