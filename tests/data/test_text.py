"""Tests of text as windows of tokens: which files calibrate and which verify, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language import needs_transformers, text, texts, tokenizer

from qatkit.config.schema import DataConfig
from qatkit.data import Splits
from qatkit.data import text as windows_of_text
from qatkit.data.request import Request
from qatkit.data.text import text as source
from qatkit_verify.errors import ConfigError

pytestmark = needs_transformers


def read(root: Path, tokens: Path, about: dict[str, str] | None = None, **settings: Any) -> Splits:
    config = DataConfig(source="qatkit.data.text.text", root=str(root), tokenizer=str(tokens), **settings)
    return source(str(root), False, 0, Request(config, about=about or {}))


def refused(*args: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_windows_are_the_tokens_of_the_text(tmp_path: Path, tokens: Path) -> None:
    root = texts(tmp_path / "texts")
    (root / "more").mkdir()
    (root / "more" / "valid.TXT").write_text(text(50, 3))
    splits = read(root, tokens, context=32)

    known = tokenizer()
    for part, written in (
        (splits.test, (root / "test.txt").read_text()),
        (splits.train, (root / "more" / "valid.TXT").read_text() + "\n" + (root / "train.txt").read_text()),
    ):
        ids = known.encode(written).ids
        assert len(part) == len(ids) // 32
        found = [part[index] for index in range(len(part))]
        joined = np.concatenate([arrays["input_ids"][0] for arrays, _ in found])  # type: ignore[index]
        assert joined.tolist() == ids[: len(joined)]
        assert b"".join(target for _, target in found) == joined.astype(np.int32).tobytes()
    assert splits.arrays and not splits.classes


def test_one_text_is_cut_in_half(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "book.txt").write_text(text(100, 0))
    splits = read(tmp_path, tokens, context=16)
    assert len(splits.train) - len(splits.test) in (0, 1)
    assert "the first half calibrates" in splits.notes[0]


def test_pieces_join_to_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_of_text, "_LONGEST", 100)
    for whole in (text(40, 0), "x" * 250, "a\n" * 120, ""):
        pieces = windows_of_text._pieces(whole)
        assert "".join(pieces) == whole and all(0 < len(one) <= 100 for one in pieces)


def test_what_is_no_text_is_refused(tmp_path: Path, tokens: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "none", tokens)
    (tmp_path / "empty").mkdir()
    assert "it has no .txt file" in refused(tmp_path / "empty", tokens)
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "a.txt").write_bytes(b"caf\xe9")
    assert "a.txt is not UTF-8 (byte 3)" in refused(tmp_path / "bytes", tokens)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("the cat sat")
    assert "data.context=64: expected at most" in refused(tmp_path / "short", tokens, context=64)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path, tokens: Path) -> None:
    told = refused(texts(tmp_path / "texts"), tokens, {"positions": "128"}, context=129)
    assert told == "data.context=129: expected at most 128, the number of positions of the model"


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokens: Path) -> None:
    root = texts(tmp_path / "texts")
    for words in (319, 1000):
        told = refused(root, tokens, {"vocabulary": str(words)})
        assert f"the tokenizer of this model, which has {words:,} tokens; the given one has 320" in told
    read(root, tokens, {"vocabulary": "330"}, context=32)  # a padded vocabulary
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    assert "the tokenizer can't be read (" in refused(root, broken)
    with pytest.raises(ConfigError, match="since the model comes without one"):
        source(str(root), False, 0, Request(DataConfig(root=str(root))))
