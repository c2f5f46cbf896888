"""Take a float model to a verified INT8 ONNX file: `uv run train.py [recipe=NAME] [key=value ...]`.

`--help` shows the options, README.md the recipes. Without a recipe, `quickstart` runs.
"""

from __future__ import annotations

import sys

from qatkit.cli.scripts import train

if __name__ == "__main__":
    sys.exit(train())
