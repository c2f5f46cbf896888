"""Tests of docs/decisions/ and docs/architecture.md: names, headings, the index, and mentioned files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "decisions"
FILES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
SECTIONS = ["## Context", "## Decision", "## Consequences", "## Evidence"]
# Suffixes of files that may mention a decision's file.
READ = (".md", ".py", ".yaml", ".toml", ".mjs")


def test_the_index_has_one_row_for_each_decision() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \[.+\]\((\d{4}-[a-z0-9-]+\.md)\) \| .+ \|$", index, re.MULTILINE)
    assert sorted(rows, key=lambda row: row[1]) == [(str(int(path.name[:4])), path.name) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_decision_has_the_sections_of_the_template(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", path.stem)
    assert lines[0].startswith(f"# {int(path.name[:4])}. ")
    assert re.match(r"Status: (accepted|superseded by \[\d+\]\(\d{4}-.+\.md\))", lines[2])
    assert [line for line in lines if line in SECTIONS] == SECTIONS


def test_mentioned_files_of_decisions_exist() -> None:
    folders = ("docs", "qatkit", "packages", "tests", "recipes", "conf", "benchmarks", "scripts")
    texts = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    mentioned = {
        (str(path.relative_to(ROOT)), name)
        for path in texts
        if path.suffix in READ
        for name in re.findall(r"\d{4}-[a-z][a-z0-9-]+\.md", path.read_text(encoding="utf-8"))
    }
    missing = {(path, name) for path, name in mentioned if not (FOLDER / name).is_file()}
    assert not missing, missing


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:qatkit|qatkit_verify|packages|tests)/[\w/]+(?:\.py|/))`", text))
    assert len(named) > 50
    missing = {
        path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "packages/verify"))
    }
    assert not missing, missing
    assert len(text.splitlines()) <= 300
