"""Export a checkpoint again, or quantize a float ONNX file, without training.

    uv run export.py checkpoint=FOLDER/last.ckpt
    uv run export.py onnx=model.onnx mode=dynamic|static|float16|weight_only data=... data.root=...

FOLDER is a run's output folder. The configuration is the `config.yaml` saved beside the checkpoint;
`export.*`, `verify.*`, `data.*`, `trainer.*` and `output_dir` can be set on the command line. The files go to
FOLDER unless `output_dir` says otherwise. An ONNX file's go to outputs/NAME/DATE_TIME, with the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qatkit.config.command_line import main
from qatkit.config.schema import Config


def export(config: Config) -> int:
    """Convert, export and verify; 1 when the file falls short of a bound in `config.verify`."""
    from qatkit.run import (  # import torch: after the configuration has been checked
        export_checkpoint,
        quantize_file,
    )

    return export_checkpoint.export(config) if config.onnx is None else quantize_file.quantize(config)


if __name__ == "__main__":
    sys.exit(main(export, Path(__file__).parent / "conf", from_checkpoint=True))
