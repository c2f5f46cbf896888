"""Export a checkpoint again, or quantize a float ONNX file, without training.

    uv run export.py checkpoint=FOLDER/last.ckpt
    uv run export.py onnx=model.onnx mode=dynamic|static|float16|weight_only data=... data.root=...
    uv run export.py onnx=model.onnx mode=clean|summary|encodings
    uv run export.py recipe=NAME placement=variants output_dir=DIR

FOLDER is a run's output folder. The configuration is the `config.yaml` saved next to the checkpoint; `--help` says what
can be set on top. The files go to FOLDER, or with `onnx=model.onnx` to outputs/NAME/DATE_TIME with
the report, unless `output_dir` names another folder. The last command writes files for `qatkit-measure DIR` on another
machine.
"""

from __future__ import annotations

import sys

from qatkit.cli.scripts import export

if __name__ == "__main__":
    sys.exit(export())
