"""Tests of labelled texts from tables and folders: columns, classes, padding and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language import needs_transformers, tokenizer

from qatkit.config.schema import DataConfig
from qatkit.data import Splits
from qatkit.data.arrays import Port
from qatkit.data.labelled_text import labelled_text
from qatkit.data.request import Request
from qatkit_verify.errors import ConfigError

pytestmark = needs_transformers
TRAIN = "text\tlabel\nthe cat sat\tgood\na bird on a hill\tbad\n"
TEST = "label\tsentence\nbad\tthe sun\n"


def read(root: Path, tokens: Path, about: dict[str, str] | None = None, **settings: Any) -> Splits:
    source = "qatkit.data.labelled_text.labelled_text"
    config = DataConfig(source=source, root=str(root), tokenizer=str(tokens), **settings)
    names = ("input_ids", "attention_mask", "token_type_ids")
    ports = [Port(name, "int64", (None, None), 0) for name in names]
    return labelled_text(str(root), False, 0, Request(config, ports, about=about or {}))


def write(root: Path, **files: str) -> Path:
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_text_is_a_padded_row_of_tokens(tmp_path: Path, tokens: Path) -> None:
    splits = read(write(tmp_path, train_dot_tsv=TRAIN, test_dot_tsv=TEST), tokens, {"padding": "7"})
    assert splits.classes == ("bad", "good")
    assert (list(splits.train.targets), list(splits.test.targets)) == ([1, 0], [0])
    known, texts = tokenizer(), ["the cat sat", "a bird on a hill", "the sun"]
    longest = max(len(known.encode(text).ids) for text in texts)
    items = [splits.train[0], splits.train[1], splits.test[0]]
    for (arrays, _), text in zip(items, texts, strict=True):
        ids, mask, types = (arrays[name][0] for name in ("input_ids", "attention_mask", "token_type_ids"))  # type: ignore[index]
        assert ids.shape == mask.shape == types.shape == (longest,)
        assert ids[mask == 1].tolist() == known.encode(text).ids
        assert np.all(ids[mask == 0] == 7) and not types.any()


def test_pairs_are_one_row_with_two_types(tmp_path: Path, tokens: Path) -> None:
    train = 'premise,hypothesis,gold\n"the cat, it sat",a bird,yes\nthe sun,"the ""hill""",no\n'
    test = "".join(
        json.dumps(one) + "\n"
        for one in [{"gold": "no", "premise": "the mat", "hypothesis": "a tree", "id": 4}]
    )
    root = write(tmp_path, train_dot_csv=train, test_dot_jsonl=test)
    splits = read(root, tokens, columns=["premise", "hypothesis", "gold"])
    arrays, label = splits.train[0]
    assert splits.classes == ("no", "yes") and label == 1
    known = tokenizer().encode("the cat, it sat", "a bird")
    assert arrays["input_ids"][0, : len(known.ids)].tolist() == known.ids  # type: ignore[index]
    assert arrays["token_type_ids"][0, : len(known.ids)].tolist() == known.type_ids  # type: ignore[index]
    assert set(known.type_ids) == {0, 1}


@pytest.mark.parametrize("labels", [("positive", "NEGATIVE"), ("1", "0")])
def test_labels_are_names_or_numbers_of_the_model(
    labels: tuple[str, str], tmp_path: Path, tokens: Path
) -> None:
    train = f"text\tlabel\nthe cat\t{labels[0]}\na bird\t{labels[1]}\n"
    root = write(tmp_path, train_dot_tsv=train, test_dot_tsv=f"text\tlabel\na hill\t{labels[0]}\n")
    splits = read(root, tokens, {"labels": json.dumps(["NEGATIVE", "POSITIVE", "NEUTRAL"])})
    assert splits.classes == ("NEGATIVE", "POSITIVE", "NEUTRAL")
    assert (list(splits.train.targets), list(splits.test.targets)) == ([1, 0], [1])


def test_numbers_without_names_are_in_their_order(tmp_path: Path, tokens: Path) -> None:
    train = "text\tlabel\n" + "".join(f"the cat\t{label}\n" for label in (10, 2, 1))
    splits = read(write(tmp_path, train_dot_tsv=train, test_dot_tsv="text\tlabel\na hill\t10\n"), tokens)
    assert splits.classes == ("1", "2", "10") and list(splits.test.targets) == [2]


def test_folders_are_classes(tmp_path: Path, tokens: Path) -> None:
    files = {f"{part}__{kind}__{i}_dot_txt": f"the {kind} cat" for part in ("train", "test") for kind in ("bad", "good")
             for i in range(2)}  # fmt: skip
    splits = read(write(tmp_path, **files), tokens)
    assert splits.classes == ("bad", "good")
    assert list(splits.train.targets) == list(splits.test.targets) == [0, 0, 1, 1]


OWN = {"labels": json.dumps(["NEGATIVE", "POSITIVE"])}
UNKNOWN = "expected a class of the model (NEGATIVE, POSITIVE) or a number from 0 to 1"


@pytest.mark.parametrize(
    ("train", "settings", "about", "told"),
    [
        ("a\tb\n1\t2\n", {}, {}, "train.tsv has the columns a, b; expected a column 'label' and one or two whose"),
        ("", {}, {}, "train.tsv has no texts"),
        ("text\tlabel\n", {}, {}, "train.tsv has no texts"),
        ("text\tlabel\nx\ty\tz\n", {}, {}, "train.tsv has 3 instead of 2 columns in line 2"),
        ("text\tlabel\n \tgood\n", {}, {}, "train.tsv has an empty 'text' in line 2"),
        ("text\tlabel\nx\t\n", {}, {}, "train.tsv has an empty 'label' in line 2"),
        (TRAIN, {"columns": ["text", "mood"]}, {}, "data.columns=mood: expected a column of train.tsv; line 2 has"),
        (TRAIN, {"columns": ["text"]}, {}, "expected [TEXT, LABEL] or [TEXT, SECOND, LABEL] with different names"),
        (TRAIN, {}, OWN, "train.tsv, line 2 has the label 'good'; " + UNKNOWN),
        ("text\tlabel\nthe cat\tgood\na cat\tgood\n", {}, {}, "all training texts have the label 'good'"),
        ("text\tlabel\nthe cat\tgood\na cat\tugly\n", {}, {}, "has the label 'bad'; the training texts have only"),
        ("text\ttext2\tlabel\nthe cat\ta\tgood\na cat\tb\tbad\n", {}, {}, "files have one text per line and others"),
        (TRAIN, {"context": 600}, {"positions": "512"}, "context=600: expected at most 512, the number of positions"),
        (TRAIN, {}, {"vocabulary": "30522"}, "which has 30,522 tokens; the given one has 320"),
    ],
)  # fmt: skip
def test_what_are_no_labelled_texts_is_refused(
    train: str, settings: dict[str, Any], about: dict[str, str], told: str, tmp_path: Path, tokens: Path
) -> None:
    root = write(tmp_path, train_dot_tsv=train, test_dot_tsv=TEST)
    with pytest.raises(ConfigError) as caught:
        read(root, tokens, about, **settings)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "train.jsonl is not valid JSON in line 1"),
        ("[1]", "train.jsonl has no JSON object in line 1"),
        (
            '{"text": "a", "label": null}',
            "train.jsonl has null as 'label' in line 1; expected a string or an integer",
        ),
        ('{"text": "a", "label": true}', "train.jsonl has true as 'label' in line 1"),
    ],
)
def test_lines_that_are_no_texts_are_refused(line: str, told: str, tmp_path: Path, tokens: Path) -> None:
    root = write(tmp_path, train_dot_jsonl=f"{line}\n", test_dot_tsv=TEST)
    with pytest.raises(ConfigError) as caught:
        read(root, tokens)
    assert told in str(caught.value) and "\n" not in str(caught.value)
