"""docs/accuracy.md has the recorded results of all recipes."""

from __future__ import annotations

import json
import runpy

from command_line import ROOT


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "accuracy_table.py"))["page"]()
    assert (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8") == made, (
        "uv run scripts/accuracy_table.py"
    )
    rows = [line.split(" | ") for line in made.splitlines() if line.startswith("| `")]
    results = sorted((ROOT / "recipes" / "results").glob("*.json"))
    assert [row[0].strip("| `") for row in rows] == [path.stem for path in results]
    for row, path in zip(rows, results, strict=True):
        ratio = json.loads(path.read_text())["bytes"]
        assert float(row[8]) == round(ratio["int8"] / ratio["float"], 3)
