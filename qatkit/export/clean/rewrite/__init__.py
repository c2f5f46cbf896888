"""Operators of a given file written in another way: the same function (`rewrite`), or an approximation (`approximate`).

Each is a function of a model, a graph and a node that says whether it replaced the node:

    norms       LayerNorm, InstanceNorm and L2 norm from their parts
    pools       means as pools, and large pools as two
    layers      BatchNorm as Conv, BatchNorm after a Concat, Split as Slices, GELU, ReLU
    pairs       of quantized files: one for each reader, and of weights, too
    dpu         what an AMD DPU computes in place of some operators
    run         their names, and the walk over a file
"""
