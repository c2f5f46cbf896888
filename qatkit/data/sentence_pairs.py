"""Pairs of sentences with a score, for text encoders: the .tsv files of a folder.

    DIR/**/*.tsv   names with "test" ──> verify
                   the others ─────────> calibrate and train

The first line of a file names its columns: two names begin with "sentence", and one ends with "score" (SICK's
sentence_A, sentence_B, relatedness_score; STS's sentence1, sentence2, score). Scores are scaled to 0..1 by
the smallest and the largest score of all files. A pair is a sample of two rows, padded to the longest
sentence of the data.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema import DataConfig
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit.data.token_rows import Rows, token_rows
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import files_below

_SOURCE = "qatkit.data.sentence_pairs.sentence_pairs"
_WANTED = "two columns whose names begin with 'sentence' and one that ends with 'score'"


@dataclass(frozen=True)
class Pair:
    """Two sentences and their score."""

    first: str
    second: str
    score: float


class PairRows:
    """Pairs as rows of tokens; an item is ({"input_ids", "attention_mask", ...: int64 [2, T]}, score).

    Args:
        rows: the rows of tokens, two for each pair.
        scores: scores of the pairs, 0..1.
    """

    def __init__(self, rows: Rows, scores: Sequence[float]) -> None:
        self._rows, self.targets = rows, list(scores)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], float]:
        return self._rows.at(slice(2 * index, 2 * index + 2)), self.targets[index]


def sentence_pairs(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the pairs of a folder's files.

    Raises:
        ConfigError: the folder does not exist or has no files for a split; a file is not UTF-8, lacks a column or
            has no pairs; a score is not a number; or as for `qatkit.data.token_rows.token_rows`.
    """
    asked = request if request is not None else Request(DataConfig())
    top = data_folder(_SOURCE, root)
    files, _ = files_below(top, lambda name: name.lower().endswith(".tsv"), "data.root")
    tests = [one for one in files if "test" in os.path.basename(one).lower()]
    others = [one for one in sorted(files) if one not in tests]
    if not tests or not others:
        has = f"it has {len(others)} for calibration and {len(tests)} for verification"
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; {has}")
    parts = [[pair for path in paths for pair in _read(path)] for paths in (others, sorted(tests))]
    scores = [pair.score for part in parts for pair in part]
    low, high = min(scores), max(scores)
    texts = [[text for pair in part for text in (pair.first, pair.second)] for part in parts]
    train, test = (
        PairRows(rows, [(pair.score - low) / ((high - low) or 1.0) for pair in part])
        for rows, part in zip(token_rows(texts, asked), parts, strict=True)
    )
    return Splits(train, test, (), arrays=True)


def _read(path: str) -> list[Pair]:
    def wrong(told: str) -> ConfigError:
        return ConfigError("data.root", os.path.dirname(path), reason=f"{os.path.basename(path)} {told}")

    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise wrong(f"is not UTF-8 (byte {error.start})") from error
    rows = list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    names = [name.strip().lower() for name in rows[0]] if rows else []
    sentences = [place for place, name in enumerate(names) if name.startswith("sentence")]
    scores = [place for place, name in enumerate(names) if name.endswith("score")]
    if len(sentences) != 2 or len(scores) != 1:
        named = ", ".join(filter(None, names))
        raise wrong(f"has {f'the columns {named}' if named else 'no named columns'}; expected {_WANTED}")
    found = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise wrong(f"has {len(row)} instead of {len(names)} columns in line {number}")
        try:
            score = float(row[scores[0]])
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise wrong(f"has '{row[scores[0]]}' in line {number}; expected a finite number as the score")
        found.append(Pair(row[sentences[0]], row[sentences[1]], score))
    if not found:
        raise wrong("has no pairs below its first line")
    return found
