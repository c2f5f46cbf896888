"""Tests of the rules of docs/style.md for names of tests."""

from __future__ import annotations

import ast
from pathlib import Path

LONGEST = 60


def test_no_name_of_a_test_is_longer_than_60_characters() -> None:
    long = [
        f"{path}:{node.lineno}: {node.name}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST
    ]
    assert not long, "\n".join(long)
