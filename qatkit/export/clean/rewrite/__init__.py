"""Rewrites operators of a given file: exactly (`rewrite`) or as an approximation (`approximate`).

Each rewrite is a function of a model, a graph and a node. It returns whether it replaced the node.

    norms       joins LayerNorm, InstanceNorm and L2 norm from their parts
    pools       writes means as pools, large pools as two pools, and splits as slices
    layers      writes BatchNorm as Conv, folds BatchNorm after a Concat, joins GELU and ReLU
    pairs       changes QuantizeLinear and DequantizeLinear pairs of quantized files
    dpu         approximates operators as an AMD DPU computes them
    run         lists the rewrites by name and applies them to a file
"""
