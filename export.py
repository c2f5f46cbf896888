"""Export a checkpoint again, or quantize a float ONNX file, without training.

    uv run export.py checkpoint=FOLDER/last.ckpt
    uv run export.py onnx=model.onnx mode=dynamic|static|float16|weight_only data=... data.root=...

FOLDER is a run's output folder. The configuration is the `config.yaml` saved beside the checkpoint; `--help` says what
can be set on top. The files go to FOLDER unless `output_dir` says otherwise. An ONNX file's go to
outputs/NAME/DATE_TIME, with the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qatkit.config.command_line import main
from qatkit.config.schema import Config


def export(config: Config) -> int:
    """The exit status: 1 when the audit of a checkpoint's file finds a problem, or an ONNX file's falls short."""
    from qatkit.run import (  # import torch: after the configuration has been checked
        export_checkpoint,
        quantize_file,
    )

    return export_checkpoint.export(config) if config.onnx is None else quantize_file.quantize(config)


if __name__ == "__main__":
    sys.exit(main(export, Path(__file__).parent / "conf", from_checkpoint=True))
