"""Compare finished runs: `uv run compare.py [FOLDER]` (outputs), as a table and as FOLDER/compare.html."""

from __future__ import annotations

import sys

from qatkit.compare.command import main

if __name__ == "__main__":
    sys.exit(main())
