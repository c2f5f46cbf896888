"""Tests of pairs of sentences from .tsv files: columns, scores, padding and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language import needs_transformers, tokenizer

from qatkit.config.schema import DataConfig
from qatkit.data import Splits
from qatkit.data.request import Request
from qatkit.data.sentence_pairs import sentence_pairs
from qatkit_verify.errors import ConfigError

pytestmark = needs_transformers
TRAIN = (
    "pair_ID\tsentence_A\tsentence_B\trelatedness_score\n1\tthe cat sat\tthe dog ran on\t4.5\n"
    '2\ta bird\ta "tree\t1\n'
)
TEST = "sentence1\tsentence2\tscore\nthe sun\tthe big red sun and the hill\t3\n"


def read(root: Path, tokens: Path, **settings: Any) -> Splits:
    config = DataConfig(
        source="qatkit.data.sentence_pairs.sentence_pairs", root=str(root), tokenizer=str(tokens), **settings
    )
    return sentence_pairs(str(root), False, 0, Request(config))


def test_a_pair_is_two_rows_of_tokens(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "train.tsv").write_text(TRAIN)
    (tmp_path / "test.tsv").write_text(TEST)
    splits = read(tmp_path, tokens)
    assert (len(splits.train), len(splits.test)) == (2, 1)
    assert list(splits.train.targets) == [1.0, 0.0]
    assert splits.test.targets[0] == pytest.approx((3 - 1) / 3.5)

    known = tokenizer()
    sentences = [
        ["the cat sat", "the dog ran on"],
        ["a bird", 'a "tree'],
        ["the sun", "the big red sun and the hill"],
    ]
    longest = max(len(known.encode(text).ids) for pair in sentences for text in pair)
    items = [splits.train[0], splits.train[1], splits.test[0]]
    for (arrays, _), pair in zip(items, sentences, strict=True):
        for row, text in enumerate(pair):
            ids, mask = arrays["input_ids"][row], arrays["attention_mask"][row]  # type: ignore[index]
            assert len(ids) == longest
            assert ids[mask == 1].tolist() == known.encode(text).ids
            assert not np.any(ids[mask == 0])


def test_long_sentences_are_cut(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "train.tsv").write_text(TRAIN)
    (tmp_path / "test.tsv").write_text(TEST)
    arrays, _ = read(tmp_path, tokens, context=3).test[0]
    assert arrays["input_ids"].shape == (2, 3)  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\tb\tc\n1\t2\t3\n", "a.tsv has the columns a, b, c; expected two columns whose names begin with"),
        ("", "a.tsv has no named columns"),
        ("sentence1\tsentence2\tscore\n", "a.tsv has no pairs below its first line"),
        ("sentence1\tsentence2\tscore\nx\ty\n", "a.tsv has 2 instead of 3 columns in line 2"),
        ("sentence1\tsentence2\tscore\nx\ty\tgood\n", "a.tsv has 'good' in line 2; expected a finite number as"),
        ("sentence1\tsentence2\tscore\nx\ty\tnan\n", "a.tsv has 'nan' in line 2; expected a finite number as"),
    ],
)  # fmt: skip
def test_files_without_pairs_are_refused(text: str, told: str, tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "a.tsv").write_text(text)
    (tmp_path / "test.tsv").write_text(TEST)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, tokens)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_both_kinds_of_files_are_needed(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "test.tsv").write_text(TEST)
    with pytest.raises(ConfigError, match="it has 0 for calibration and 1 for verification"):
        read(tmp_path, tokens)
    (tmp_path / "test.tsv").write_bytes(b"sentence1\tsentence2\tscore\ncaf\xe9\tb\t1\n")
    (tmp_path / "train.tsv").write_text(TRAIN)
    with pytest.raises(ConfigError, match=r"test\.tsv is not UTF-8 \(byte 29\)"):
        read(tmp_path, tokens)
