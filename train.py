"""Take a float model to a verified INT8 ONNX file: `uv run train.py [recipe=NAME] [key=value ...]`.

`--help` shows the options, README.md the recipes. Without a recipe, `quickstart` runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qatkit.config.command_line import main
from qatkit.config.schema import Config


def train(config: Config) -> int:
    """The whole chain; 1 when the file falls short of a bound in `config.verify`."""
    from qatkit.run import pipeline, rescue  # they import torch: after the configuration has been checked

    return rescue.climb(config) if config.rescue.climb else pipeline.train(config)


if __name__ == "__main__":
    sys.exit(main(train, Path(__file__).parent / "conf"))
