"""Writes docs/configuration.md, the table of every key: `uv run scripts/configuration.py [--check]`.

With `--check` nothing is written; the exit status is 1 if the page differs from the schema.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qatkit.cli.reference import page
from qatkit_verify.files import write_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare, without writing")
    wanted = page(ROOT / "conf")
    if not parser.parse_args().check:
        write_text(PAGE, wanted)
        return 0
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted
    print(f"{PAGE.name} is {'current' if current else 'out of date; run uv run scripts/configuration.py'}")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
