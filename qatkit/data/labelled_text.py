"""Texts or pairs of texts with labels, from .tsv, .csv and .jsonl files or from a folder for each class.

    DIR/**/*.tsv, *.csv, *.jsonl   names with "test" ──> verify
                                   the others ─────────> calibrate and train
    DIR/{train,test}/CLASS/*.txt   one text per file

The first line of a table names its columns; in a .jsonl file, the keys of each line name them. A label is the
name or the number of one of the model's classes. If the model names none, the classes are the sorted labels
of the training texts. A sample is a row of tokens, padded to the longest text of the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema import DataConfig
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit.data.text_tables import SUFFIXES, LabelledText, read_table, text_of
from qatkit.data.token_rows import Rows, token_rows
from qatkit.data.tokenizer import LABELS
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import class_folders, files_below

_SOURCE = "qatkit.data.labelled_text.labelled_text"
_PARTS = ("train", "test")
_SHOWN = 8  # maximum number of classes in a message


class TextRows:
    """Labelled texts as rows of tokens; an item is ({"input_ids", "attention_mask", ...: int64 [1, T]}, label).

    Args:
        rows: the rows of tokens, one for each text or pair of texts.
        labels: labels of the texts.
    """

    def __init__(self, rows: Rows, labels: Sequence[int]) -> None:
        self._rows, self.targets = rows, list(labels)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], int]:
        return self._rows.at(slice(index, index + 1)), self.targets[index]


def labelled_text(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the labelled texts of a folder.

    Raises:
        ConfigError: the folder does not exist; a split has no texts; a file cannot be read, lacks a column, or has
            an empty text; some files have pairs of texts and others do not; a label is not one of the model's
            classes; without such classes, a test label is in no training text or all training texts have one
            label; or as for `qatkit.data.token_rows.token_rows`.
    """
    asked = request if request is not None else Request(DataConfig())
    top = data_folder(_SOURCE, root)
    parts = _of_folders(top) or _of_tables(top, str(root), asked.settings.columns)
    kinds = {isinstance(one.text, tuple) for part in parts for one in part}
    if len(kinds) > 1:
        reason = "some files have one text per line and others two; choose the columns with data.columns"
        raise ConfigError("data.root", root, reason=reason)
    own = json.loads(asked.about.get(LABELS, "[]"))
    classes = own or _classes(parts[0], str(root))
    known = _numbers(classes, numbered=bool(own))
    labels = [[_number(one, known, classes, str(root), own=bool(own)) for one in part] for part in parts]
    rows = token_rows([[one.text for one in part] for part in parts], asked)
    train, test = (TextRows(*both) for both in zip(rows, labels, strict=True))
    return Splits(train, test, tuple(classes), arrays=True)


def _of_tables(top: Path, root: str, columns: Sequence[str] | None) -> list[list[LabelledText]]:
    files, _ = files_below(top, lambda name: name.lower().endswith(SUFFIXES), "data.root")
    tests = [one for one in sorted(files) if "test" in os.path.basename(one).lower()]
    others = [one for one in sorted(files) if one not in tests]
    if not tests or not others:
        has = f"it has {len(others)} for calibration and {len(tests)} for verification"
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; {has}")
    return [[one for path in paths for one in read_table(path, columns)] for paths in (others, tests)]


def _of_folders(top: Path) -> list[list[LabelledText]]:
    """Returns the texts of train/CLASS/*.txt and of test/CLASS/*.txt; [] if either folder has no texts."""
    found = []
    for part in (top / name for name in _PARTS):
        texts = []
        for name in class_folders(part) if part.is_dir() else ():
            files, _ = files_below(part / name, lambda file: file.lower().endswith(".txt"), "data.root")
            texts += [LabelledText(_whole(Path(file)), name, os.path.relpath(file, top)) for file in files]
        found.append(texts)
    return found if all(found) else []


def _whole(path: Path) -> str:
    """Returns the text of a file that is one sample.

    Raises:
        ConfigError: the file has no text or is not UTF-8.
    """
    text = text_of(path).strip()
    if not text:
        raise ConfigError("data.root", path.parent, reason=f"{path.name} has no text")
    return text


def _classes(train: Sequence[LabelledText], root: str) -> list[str]:
    """Returns the labels of the training texts, sorted by number if they are numbers, else by name."""
    found = {one.label for one in train}
    if len(found) < 2:
        reason = (
            f"all training texts have the label '{train[0].label}'; a classifier needs at least two labels"
        )
        raise ConfigError("data.root", root, reason=reason)
    whole = all(label.isdecimal() for label in found)
    return sorted(found, key=int) if whole else sorted(found)


def _numbers(classes: Sequence[str], *, numbered: bool) -> dict[str, int]:
    """Returns the class number of each accepted label: a name or, if `numbered`, a number as text.

    The names in lower case are included too, unless two names differ only in case.
    """
    folded = {name.casefold(): number for number, name in enumerate(classes)}
    names = folded if len(folded) == len(classes) else {}
    exact = {name: number for number, name in enumerate(classes)}
    numbers = {str(number): number for number in range(len(classes))} if numbered else {}
    return numbers | names | exact


def _number(one: LabelledText, known: dict[str, int], classes: Sequence[str], root: str, *, own: bool) -> int:
    found = known.get(one.label, known.get(one.label.casefold()))
    if found is not None:
        return found
    more = f" and {len(classes) - _SHOWN} more" if len(classes) > _SHOWN else ""
    named, told = ", ".join(classes[:_SHOWN]) + more, f"{one.place} has the label '{one.label}'"
    if not own:
        raise ConfigError("data.root", root, reason=f"{told}; the training texts have only {named}")
    numbers = f"0 to {len(classes) - 1}"
    expected = f"a class of the model ({named}) or a number from {numbers}"
    reason = f"{told}; expected {expected} (model.kwargs.id2label sets the names)"
    raise ConfigError("data.root", root, reason=reason)
