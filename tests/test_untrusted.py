"""Tests of untrusted files: harmless ones are read; those that expand or nest too far, or would block, are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from qatkit_verify.untrusted import read_json, read_text, read_yaml

NINE = "\n".join(
    [
        f"a0: &a0 [{','.join('x' * 9)}]",
        *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)),
    ]
)


def _written(folder: Path, content: str | bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n",
        "base: &b {x: [1, 2]}\nmine: *b\nhis: *b\n",
        "",
        "a: &s word\nb: *s\n",
        "deep: " + "[" * 60 + "]" * 60,
    ],
)
def test_yaml_that_is_harmless_is_given_back(tmp_path: Path, text: str) -> None:
    assert yaml.safe_load(read_yaml(_written(tmp_path, text))) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NINE, "with its aliases"),
        ("a: &a [*a]", r"alias \*a refers to itself"),
        ("a: *nothing", r"alias \*nothing"),
        ("[" * 10_000, "levels deep"),
        ("{a: " * 10_000, "levels deep"),
    ],
)
def test_yaml_that_multiplies_or_nests_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_yaml(_written(tmp_path, text))


def test_json_is_read_and_nesting_is_a_value_error(tmp_path: Path) -> None:
    assert read_json(_written(tmp_path, '{"a": [1, 2.5, null]}')) == {"a": [1, 2.5, None]}
    assert read_json(_written(tmp_path, b"\xef\xbb\xbf" + json.dumps({"a": 1}).encode())) == {"a": 1}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(_written(tmp_path, "[" * 100_000))


def test_only_plain_utf8_files_of_a_bounded_size_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="utf-8"):
        read_text(_written(tmp_path, "ä".encode("latin-1")))
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(ValueError, match="more than 64 MiB"):
        read_text(tmp_path / "sparse")
