"""Tests of pictures whose targets are numbers in a table: layouts and mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qatkit.data.pictures_with_values import pictures_with_values
from qatkit_verify.errors import ConfigError


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def folder(root: Path, names: tuple[str, ...], table: str | None = None) -> Path:
    for name in names:
        picture(root / name)
    lines = [f"{name},{number / 2}" for number, name in enumerate(names)]
    (root / "targets.csv").write_text("\n".join(["file,value", *lines]) if table is None else table)
    return root


def test_every_fifth_picture_verifies(tmp_path: Path) -> None:
    names = tuple(f"{i:02}.png" for i in range(12))
    splits = pictures_with_values(str(folder(tmp_path, names)), False, 0)
    assert splits.test.targets == [2.0, 4.5] and len(splits.train) == 10
    assert splits.train.targets[:5] == [0.0, 0.5, 1.0, 1.5, 2.5] and splits.classes == ()


def test_a_folder_of_test_pictures_verifies(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "unlisted.png")
    splits = pictures_with_values(
        str(folder(tmp_path, ("test/a.png", "train/b.png", "train/c.png"))), False, 0
    )
    assert (splits.test.targets, splits.train.targets) == ([0.0], [0.5, 1.0])
    assert splits.notes == ("pictures left out because no targets.csv names them: 1",)


def test_each_part_may_have_a_table_of_several_numbers(tmp_path: Path) -> None:
    for part, row in (("train", "1,2\n"), ("val", "3,4\n")):
        folder(tmp_path / part, ("x/a.png",), f"age,file,height\n{row[0]},x/a.png,{row[2:]}")
    splits = pictures_with_values(str(tmp_path), False, 0)
    assert splits.notes == ("values, in the order of the outputs: age, height",)
    assert (splits.train.targets, splits.test.targets) == ([(1.0, 2.0)], [(3.0, 4.0)])


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("name,value\na.png,1", "targets.csv has the columns name, value; expected a column 'file' and at"),
        ("file\na.png", "targets.csv has the columns file; expected a column 'file' and at least one other"),
        ("file,value\na.png,1,2", "targets.csv has 3 instead of 2 values in line 2"),
        ("file,value\na.png,old", "targets.csv has 'old' as value in line 2; expected a finite number"),
        ("file,value\na.png,nan", "targets.csv has 'nan' as value in line 2; expected a finite number"),
        ("file,value\na.png,1\nq.png,1", "targets.csv names q.png in line 3, but there is no such picture in "),
        ("file,value\na.png,1\na.png,1", "targets.csv names a.png in line 3 again; expected each picture once"),
        ("file,value\na.png,1", "at least one picture for training and one for verification"),
    ],
)  # fmt: skip
def test_a_table_with_a_mistake_names_the_line(tmp_path: Path, table: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        pictures_with_values(str(folder(tmp_path, ("a.png",), table)), False, 0)
    assert told in str(error.value) and str(error.value).startswith(f"data.root={tmp_path}: ")


def test_a_folder_without_a_table_says_what_is_wanted(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(
        ConfigError, match=r"a folder of pictures with a targets.csv .*; there is no targets.csv"
    ):
        pictures_with_values(str(tmp_path), False, 0)
