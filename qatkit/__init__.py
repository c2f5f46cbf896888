"""qatkit: quantization-aware training for PyTorch models, and export to a verified INT8 QDQ ONNX file.

    from qatkit import QATModule, Parts, export_onnx

The rooms, in the order in which a model passes through them: `models` and `data` (what comes in), `graph`
(trace, fuse, stub, prepare, convert), `calibration` and `algorithms`, `module` (trains), `export`, `verify`,
`report`; `run.pipeline` is the way through, and `config` what it is told. Numbers live in `spec`, `numerics`,
`observers` and `fake_quantize`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qatkit.export.torch_to_onnx import export_onnx
    from qatkit.module import QATModule
    from qatkit.parts import Parts

__all__ = ["Parts", "QATModule", "export_onnx"]

_HOMES = {"QATModule": "qatkit.module", "Parts": "qatkit.parts", "export_onnx": "qatkit.export.torch_to_onnx"}


def __getattr__(name: str) -> Any:
    """The public names, each imported when it is first asked for: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
