"""Imports a float ONNX file as a PyTorch module with the file's nodes as submodules.

    read.py        the file as onnx_ir holds it: sorted, local functions inlined, sparse weights dense
    fused.py       operators without 8-bit kernels, taken apart
    inputs.py      its inputs: types, axes, the batch axis of each, those that are fixed
    float_file.py  the file as export.py takes it, checked without torch
    islands.py     the nodes that PyTorch has no form for, and the regions that they make
    island.py      such a region, computed by ONNX Runtime
    program.py     its nodes in order, each a submodule with the node's name
    operators/     the PyTorch form of each ONNX operator, by classes of operators
    patterns.py    operators that exporters write in parts (SiLU, GELU, LayerNorm)
    proof.py       the module against the file in ONNX Runtime
    write_back.py  the file again, with the integers of a converted module

The module takes the file's inputs by position or by name, and gives its outputs by name. Sizes are plain numbers
while it runs, so `qatkit.graph.trace` records it like any other model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qatkit.importing.program import ImportedModel, import_onnx
    from qatkit.importing.proof import prove_import

__all__ = ["ImportedModel", "import_onnx", "prove_import"]

_HOMES = {
    "ImportedModel": "program",
    "import_onnx": "program",
    "prove_import": "proof",
}


def __getattr__(name: str) -> Any:
    """Returns the public names, each imported on first access: reading a file needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
