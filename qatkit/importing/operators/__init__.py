"""Implements the ONNX operators in PyTorch.

There is one file per class of operators. Each file registers its operators by `function` (computed from the inputs) or
by `module` (an ordinary torch module, if the weights are constants).
"""

import importlib

from qatkit.importing.operators.table import Node, UnsupportedError, function_of, module_of

# Importing these modules fills the table.
for _file in (
    "elementwise",
    "indexing",
    "layers",
    "normalization",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "shape",
):
    importlib.import_module(f"{__name__}.{_file}")

__all__ = ["Node", "UnsupportedError", "function_of", "module_of"]
