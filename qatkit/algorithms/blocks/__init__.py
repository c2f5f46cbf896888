"""Modules of the algorithms that process a calibrated graph block by block.

algorithm    the settings that such algorithms share
partition    the nodes of each block, by the graph's structure
cached       the tensors between blocks, small and exact enough to learn from
journal      finished blocks of a long algorithm, kept in files until the run no longer needs them
lesson       the data of a block and the interface of the code that learns from it
walk         the walk through all blocks: float outputs, the algorithm's changes, quantized outputs
fisher       the importance of a block's output values
soft_rounding, learn    roundings (and biases) that are learned from a block's output error
scales       activation scales that are learned from the same error
column_rounding         GPTQ of a block with one operator
range_search            the range of a weight, by the error of its operator's output
"""
