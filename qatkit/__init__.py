"""qatkit: quantization-aware training for PyTorch models, and export to a verified INT8 QDQ ONNX file.

    from qatkit import quantize, QATModule, Parts, export_onnx

The main packages in the order in which a model passes through them: `models` and `data` (inputs), `graph`
(trace, fuse, stub, prepare, convert) with the arithmetic of `quant`, `calibration` and `algorithms`, `train`,
`export`, `verify`, `report`. `choose` decides by measurement. `jobs` contains the commands, `config` their
settings and `cli` the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import qatkit_verify  # noqa: F401  before ONNX Runtime, whose telemetry it switches off
from qatkit import former_names

if TYPE_CHECKING:
    from qatkit.export.torch_to_onnx import export_onnx
    from qatkit.one_call import Result, quantize
    from qatkit.train.module import QATModule
    from qatkit.train.parts import Parts

__all__ = ["Parts", "QATModule", "Result", "export_onnx", "quantize"]

former_names.install()

_HOMES = {
    "QATModule": "qatkit.train.module",
    "Parts": "qatkit.train.parts",
    "export_onnx": "qatkit.export.torch_to_onnx",
    "quantize": "qatkit.one_call",
    "Result": "qatkit.one_call",
}


def __getattr__(name: str) -> Any:
    """Returns a public name, imported when it is first used, since importing torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
