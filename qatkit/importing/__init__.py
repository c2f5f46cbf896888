"""From a float ONNX file to a PyTorch module with the file's nodes as submodules.

    read.py        the file as onnx_ir holds it: sorted, local functions inlined
    islands.py     the nodes that PyTorch has no form for, and the regions that they make
    island.py      such a region, computed by ONNX Runtime
    program.py     its nodes in order, each a submodule with the node's name
    operators/     what each ONNX operator is in PyTorch, by classes of operators
    patterns.py    operators that exporters write in parts (SiLU, GELU, LayerNorm)
    proof.py       the module against the file in ONNX Runtime
    write_back.py  the file again, with the integers of a converted module

The module takes the file's inputs by position or by name, and gives its outputs by name. Sizes are plain numbers
while it runs, so `qatkit.graph.trace` records it like any other model.
"""

from qatkit.importing.program import ImportedModel, import_onnx
from qatkit.importing.proof import prove_import
from qatkit.importing.write_back import write_back, write_given

__all__ = ["ImportedModel", "import_onnx", "prove_import", "write_back", "write_given"]
