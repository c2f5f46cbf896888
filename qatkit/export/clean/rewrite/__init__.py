"""Rewrites operators of a given file: exactly (`rewrite`) or as an approximation (`approximate`).

Each rewrite is a function of a model, a graph and a node. It returns whether it replaced the node.

    norms       writes the parts of LayerNorm, InstanceNorm and L2 norm as one operator each
    pools       writes means as pools, large pools as two pools, and splits as slices
    layers      writes BatchNorm as Conv, folds a BatchNorm after a Concat into the convolutions before the Concat,
                and writes GELU and ReLU as one operator each
    pairs       changes QuantizeLinear and DequantizeLinear pairs of quantized files
    dpu         approximates operators as an AMD DPU computes them
    run         lists the rewrites by name and applies them to a file
"""
