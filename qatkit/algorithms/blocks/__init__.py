"""Algorithms that process a calibrated graph block by block, and the modules that they share.

algorithm    the settings that such algorithms share
partition    the nodes of each block, by the graph's structure
cached       the tensors between blocks, small and exact enough to learn from
journal      finished blocks of a long algorithm, kept in files until the run no longer needs them
walk         the walk through all blocks: float outputs, the algorithm's changes, quantized outputs
soft_rounding, learn    roundings (and biases) that are learned from a block's output error
"""
