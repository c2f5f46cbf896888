"""Pictures with numbers from a table, for regression.

    ROOT/targets.csv                              file,value (or several columns of numbers)
    ROOT/train/targets.csv  ROOT/test/targets.csv  (or val)

A table's first line names its columns: `file` is the path of a picture below the table's folder, and each of
the others holds a number to predict. With one table, pictures below `test/` or `val/` verify; if there are
none, every fifth of the sorted files verifies.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.data.image_files import ImageFiles
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import files_below, is_image_name

_SOURCE = "qatkit.data.pictures_with_values.pictures_with_values"
TABLE, _FILE = "targets.csv", "file"
_TESTS = ("test", "val")
_EVERY = 5
Samples = list[tuple[str, Any]]


def pictures_with_values(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the pictures listed in the tables, and their numbers.

    Raises:
        ConfigError: the folder or a table does not exist; a table cannot be read or lacks a column; a line lacks a
            picture or a number, or repeats a picture; the columns of the two tables differ; or a split has no
            pictures.
    """
    top = data_folder(_SOURCE, root)
    if (top / TABLE).is_file():
        names, samples = _read(top, top / TABLE)
        train, test = _parted(top, samples)
    else:
        names, train, test = _of_two(top, root)
    if not train or not test:
        has = f"it has {len(train)} for training and {len(test)} for verification"
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; {has}")
    listed = {path for path, _ in (*train, *test)}
    found, _ = files_below(top, is_image_name, "data.root")
    left = len(set(map(str, found)) - listed)
    notes = [f"pictures left out because no {TABLE} names them: {left}"] if left else []
    if len(names) > 1:
        notes.append(f"values, in the order of the outputs: {', '.join(names)}")
    return Splits(ImageFiles(train), ImageFiles(test), (), notes=tuple(notes))


def _of_two(top: Path, root: str | None) -> tuple[tuple[str, ...], Samples, Samples]:
    """Returns the names of the numbers, and the samples of train/ and of test/ or val/."""
    part = next((one for one in _TESTS if (top / one / TABLE).is_file()), None)
    if part is None or not (top / "train" / TABLE).is_file():
        missing = " or ".join(f"{one}/" for one in _TESTS) if part is None else "train/"
        if part is None and not (top / "train" / TABLE).is_file():
            missing = f"the folder, train/, {missing}"
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; there is no {TABLE} in {missing}")
    (names, train), (others, test) = (_read(top / one, top / one / TABLE) for one in ("train", part))
    if names != others:
        allowed = f"the same columns in {part}/{TABLE} as in train/{TABLE} ({', '.join(names)})"
        raise ConfigError("data.root", root, f"{allowed}; {part}/{TABLE} has {', '.join(others)}")
    return names, train, test


def _parted(top: Path, samples: Samples) -> tuple[Samples, Samples]:
    tests = [one for one in samples if Path(one[0]).relative_to(top).parts[0] in _TESTS]
    if not tests:
        tests = samples[_EVERY - 1 :: _EVERY]
    chosen = {path for path, _ in tests}
    return [one for one in samples if one[0] not in chosen], tests


def _read(folder: Path, table: Path) -> tuple[tuple[str, ...], Samples]:
    """Returns the names of the numbers, and (path, number or numbers) for each line of a table, sorted by path."""

    def wrong(told: str) -> ConfigError:
        return ConfigError("data.root", str(folder), reason=f"{TABLE} {told}")

    try:
        lines = list(csv.reader(table.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise wrong(f"can't be read ({error})") from error
    head = [name.strip() for name in lines[0]] if lines else []
    if _FILE not in head or len(head) < 2 or len(set(head)) < len(head):
        named = ", ".join(filter(None, head))
        has = f"the columns {named}" if named else "no named columns"
        raise wrong(f"has {has}; expected a column '{_FILE}' and at least one other, each with its own name")
    found: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        if len(line) != len(head):
            raise wrong(f"has {len(line)} instead of {len(head)} values in line {number}")
        row = dict(zip(head, line, strict=True))
        path = folder / row.pop(_FILE).strip()
        if not path.is_file():
            raise wrong(f"names {path.name} in line {number}, but there is no such picture in {path.parent}")
        if str(path) in found:
            raise wrong(f"names {path.name} in line {number} again; expected each picture once")
        found[str(path)] = _numbers(row, number, wrong)
    return tuple(name for name in head if name != _FILE), sorted(found.items())


def _numbers(row: dict[str, str], number: int, wrong: Any) -> float | tuple[float, ...]:
    """Returns the number of a line, or its numbers if there are several."""
    values: list[float] = []
    for name, text in row.items():
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise wrong(f"has '{text}' as {name} in line {number}; expected a finite number")
        values.append(value)
    return values[0] if len(values) == 1 else tuple(values)
