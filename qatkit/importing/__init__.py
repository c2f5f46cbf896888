"""Imports a float ONNX file as a PyTorch module with the file's nodes as submodules.

    read.py               reads the file: sorts nodes, inlines local functions, makes sparse weights dense
    fused.py              splits operators without 8-bit kernels into parts
    inputs.py             describes the inputs: types, axes, batch axes, fixed inputs
    float_file.py         checks a file for export.py without torch
    unsupported_nodes.py  finds the nodes that have no PyTorch equivalent
    islands.py            groups these nodes into regions (islands) that run in ONNX Runtime
    island.py             runs one region in ONNX Runtime
    build.py              builds the program from the file's graph
    program.py            runs the nodes in order, each as a submodule with the node's name
    operators/            implements the ONNX operators in PyTorch
    patterns.py           joins operators that exporters write in parts (SiLU, HardSwish, GELU)
    proof.py              compares the module with the file in ONNX Runtime
    write_back.py         writes the file again, with the integers of a converted module
    encodings.py          reads scales and zero points from any quantized file

The module accepts the file's inputs by position or by name. It returns a dict of its outputs by name, or the output
itself if there is only one. Sizes are NumPy arrays rather than tensors while it runs, so `qatkit.graph.trace`
records it like any other model.
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
    """Imports a public name on first access, since reading a file needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
