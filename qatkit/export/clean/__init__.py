"""Services that change a given ONNX file, in the order in which they run.

All of them keep the function of the file, apart from rounding, except for `approximate` and `drop_pairs` in rewrite/.

    float32.py     converts float16 tensors to float32
    opset.py       converts to another opset
    fix_shapes.py  fixes the sizes of dynamic axes
    fold.py        folds constants, removes no-ops, merges duplicates
    join.py        folds operators into convolutions, as a part of fold.py
    rewrite/       replaces operators by others
    layout.py      puts channels first or last in inputs and outputs
    unshare.py     copies an initializer for each reader
    shapes.py      infers types and shapes of all tensors
    names.py       gives nodes and tensors names of plain characters

`run.py` calls these services. `drawn.py` provides inputs, and `proof.py` compares the file with the original on them.
`store.py` writes the file, with external data if it is large. Each service returns lines that say what it changed; an
empty list means that it changed nothing.
"""
