"""Algorithms that go through a calibrated graph block by block: its partition, the tensors between blocks, the walk.

algorithm    the settings that such algorithms share
partition    which nodes make a block, by the graph's structure
cached       the tensors between blocks, small and exact enough to learn from
journal      what is finished of a long algorithm, kept in a file until the run no longer needs it
walk         every block once: its float outputs, what an algorithm makes of it, its quantized outputs
soft_rounding, learn    roundings (and biases) that are learned from a block's output error
"""
