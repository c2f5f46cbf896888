"""Export a checkpoint again, or quantize a float ONNX file, without training.

    uv run export.py checkpoint=FOLDER/last.ckpt
    uv run export.py onnx=model.onnx mode=dynamic|static|float16|weight_only data=... data.root=...
    uv run export.py onnx=model.onnx mode=clean|summary|encodings
    uv run export.py recipe=NAME placement=variants output_dir=DIR

FOLDER is a run's output folder. The configuration is the `config.yaml` saved next to the checkpoint; `--help` says what
can be set on top. The files go to FOLDER unless `output_dir` says otherwise. An ONNX file's go to
outputs/NAME/DATE_TIME, with the report. The last form writes files for `qatkit-measure DIR` on another machine.
"""

from __future__ import annotations

import sys

from qatkit.cli.scripts import export

if __name__ == "__main__":
    sys.exit(export())
