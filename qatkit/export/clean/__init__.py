"""Services for a given ONNX file that keep its function, in the order in which they run.

    float32.py     float16 tensors become float32
    opset.py       another opset
    fix_shapes.py  open axes get sizes
    fold.py        constants folded, what does nothing removed, duplicates merged; join.py: joined with convolutions
    layout.py      channels first or last at the file's ends
    unshare.py     an initializer for each reader
    shapes.py      types and shapes of all tensors
    names.py       names of plain characters

`run.py` calls them. `drawn.py` makes inputs, on which `proof.py` compares the file with what it was; `store.py` writes
it, large ones with external data. A service returns lines that say what it changed, none where it changed nothing.
"""
