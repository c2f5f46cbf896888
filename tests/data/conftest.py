"""A tokenizer for the tests of texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import tokenizer


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tokenizer of 320 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return path
