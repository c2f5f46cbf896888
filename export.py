"""Export a checkpoint again, without training: `uv run export.py checkpoint=FOLDER/last.ckpt`.

FOLDER is a run's output folder. The configuration is the `config.yaml` saved beside the checkpoint;
`export.*`, `verify.*`, `data.*`, `trainer.*` and `output_dir` can be set on the command line. The files go to
FOLDER unless `output_dir` says otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qatkit.config import Config
from qatkit.launch import main


def export(config: Config) -> int:
    """Convert, export and verify; 1 when the file falls short of a bound in `config.verify`."""
    from qatkit import pipeline  # imports torch: after the configuration has been checked

    return pipeline.export(config)


if __name__ == "__main__":
    sys.exit(main(export, Path(__file__).parent / "conf", from_checkpoint=True))
