"""Files of labelled texts: .tsv, .csv with quotes, and .jsonl; their columns are found by name."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit_verify.errors import ConfigError, first_line, near_matches

SUFFIXES = (".tsv", ".csv", ".jsonl")
_KEY = "data.columns"
_LABEL, _TEXTS = "label", ("text", "sentence")
_WANTED = "a column 'label' and one or two whose names begin with 'text' or 'sentence'"
_HOW = "for other names set data.columns to [TEXT,LABEL] or [TEXT,SECOND,LABEL]"


@dataclass(frozen=True)
class LabelledText:
    """A text, or two texts that are read together, with a label.

    Attributes:
        text: the text, or both texts.
        label: the label as it is written in the file.
        place: the file and, for a row of a table, its line; for messages.
    """

    text: str | tuple[str, str]
    label: str
    place: str


def read_table(path: str, columns: Sequence[str] | None) -> list[LabelledText]:
    """Returns the texts of a file.

    Args:
        path: path of the file.
        columns: [TEXT, LABEL] or [TEXT, SECOND, LABEL]; None if columns are to be found by their names.

    Raises:
        ConfigError: the file is not UTF-8 or not a table, has no texts, lacks a column, or has an empty text or
            label.
    """
    name, text = os.path.basename(path), text_of(Path(path))
    made = _lines_of_json(text, path) if path.lower().endswith(".jsonl") else _rows(text, path)
    wanted, found = tuple(columns or ()), []
    for number, row in made:
        wanted = wanted or _columns(list(row), path)
        cells = [_cell(row, column, path, number) for column in checked_columns(wanted)]
        *texts, label = cells
        found.append(
            LabelledText(
                texts[0] if len(texts) == 1 else (texts[0], texts[1]), label, f"{name}, line {number}"
            )
        )
    if not found:
        raise _wrong(path, "has no texts")
    return found


def text_of(path: Path) -> str:
    """Returns the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        ConfigError: the file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong(str(path), f"is not UTF-8 (byte {error.start})") from error


def checked_columns(columns: Sequence[str]) -> Sequence[str]:
    """Checks and returns `columns`.

    Raises:
        ConfigError: `columns` are not two or three different names.
    """
    if not 2 <= len(set(columns)) == len(columns) <= 3:
        raise ConfigError(_KEY, list(columns), "[TEXT, LABEL] or [TEXT, SECOND, LABEL] with different names")
    return columns


def _rows(text: str, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the line number of each row of a table, and the row as a mapping by column names."""
    tabs = path.lower().endswith(".tsv")
    reader = (
        csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
        if tabs
        else csv.reader(io.StringIO(text, newline=""), strict=True)
    )
    names: list[str] = []
    try:
        for row in reader:
            if not names:
                names = [one.strip() for one in row]
            elif len(row) == len(names):
                yield reader.line_num, dict(zip(names, row, strict=True))
            elif row:
                told = f"has {len(row)} instead of {len(names)} columns in line {reader.line_num}"
                raise _wrong(path, told)
    except csv.Error as error:
        raise _wrong(path, f"is not a valid table in line {reader.line_num} ({first_line(error)})") from error


def _lines_of_json(text: str, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _wrong(path, f"is not valid JSON in line {number} ({first_line(error)})") from error
        if not isinstance(row, dict):
            raise _wrong(path, f"has no JSON object in line {number}; expected {{...}} in each line")
        yield number, row


def _columns(names: Sequence[str], path: str) -> tuple[str, ...]:
    """Returns the columns of a file, found by their names."""
    texts = [name for name in names if name.lower().startswith(_TEXTS)]
    labels = [name for name in names if name.lower() == _LABEL]
    if len(texts) not in (1, 2) or len(labels) != 1:
        named = ", ".join(filter(None, names))
        has = f"the columns {named}" if named else "no named columns"
        raise _wrong(path, f"has {has}; expected {_WANTED} ({_HOW})")
    return (*texts, *labels)


def _cell(row: Mapping[str, Any], column: str, path: str, number: int) -> str:
    if column not in row:
        near = near_matches(column, row) or ", ".join(row)
        raise ConfigError(_KEY, column, f"a column of {os.path.basename(path)}; line {number} has {near}")
    value = row[column]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _wrong(
            path, f"has {json.dumps(value)} as '{column}' in line {number}; expected a string or an integer"
        )
    if not value.strip():
        raise _wrong(path, f"has an empty '{column}' in line {number}")
    return value.strip()


def _wrong(path: str, told: str) -> ConfigError:
    return ConfigError("data.root", os.path.dirname(path), reason=f"{os.path.basename(path)} {told}")
