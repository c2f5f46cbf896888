"""Quantizes a float ONNX file with a preset of AMD Quark (default: XINT8), in an interpreter that has Quark.

`npu_placement.py` calls it.

    PYTHON benchmarks/quark_xint8.py FILE SAMPLES TARGET [--config XINT8] [--older] [--cle]

SAMPLES is a .npy file with values of the only input, [N, ...]. --older selects the preset of Quark's older interface.
Presets of the same name can differ: A8W8 and A16W8 of the older interface use min-max calibration, those of the newer
one a percentile.
"""

from __future__ import annotations

import argparse
import copy

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import DefaultConfigMapping, custom_config
from quark.onnx.quantization.config.algorithm import CLEConfig
from quark.onnx.quantization.config.config import Config

_BATCH = 16


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """A calibration data reader over batches of the samples."""

    def __init__(self, name: str, samples: np.ndarray) -> None:
        self._name, self._batches = name, np.split(samples, range(_BATCH, len(samples), _BATCH))
        self.rewind()

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left = iter([{self._name: batch} for batch in self._batches])


def main() -> None:
    """Writes the quantized file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("samples")
    parser.add_argument("target")
    parser.add_argument("--config", default="XINT8")
    parser.add_argument("--older", action="store_true", help="use the preset of the older interface")
    parser.add_argument("--cle", action="store_true", help="add cross-layer equalization")
    asked = parser.parse_args()
    name = onnx.load(asked.file, load_external_data=False).graph.input[0].name
    if asked.older:
        older = copy.deepcopy(DefaultConfigMapping[asked.config])
        older.include_cle = asked.cle
        config = Config(global_quant_config=older)
    else:
        config = copy.deepcopy(getattr(custom_config, f"{asked.config}_QCONFIG"))
        if asked.cle:
            config.algo_config = [*(config.algo_config or []), CLEConfig()]
    ModelQuantizer(config).quantize_model(asked.file, asked.target, Reader(name, np.load(asked.samples)))


if __name__ == "__main__":
    main()
