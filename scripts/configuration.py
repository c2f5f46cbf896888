"""Writes docs/configuration.md and a page for each group of keys: `uv run scripts/configuration.py [--check]`.

With `--check` nothing is written; the exit status is 1 if a page differs from the schema.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qatkit.cli.reference import pages
from qatkit_verify.files import write_text

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def main() -> int:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare, without writing")
    wanted = {DOCS / name: text for name, text in pages(ROOT / "conf").items()}
    former = {*(DOCS / "configuration").glob("*.md")} - wanted.keys()
    if not parser.parse_args().check:
        for page, text in wanted.items():
            page.parent.mkdir(exist_ok=True)
            write_text(page, text)
        for page in former:
            page.unlink()
        return 0
    current = not former and all(
        page.is_file() and page.read_text(encoding="utf-8") == text for page, text in wanted.items()
    )
    print(
        f"configuration.md is {'current' if current else 'out of date; run uv run scripts/configuration.py'}"
    )
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
