"""Number formats: floats of 16, 8, 6 and 4 bits, and blocks of floats or 8-bit integers with a shared scale.

table       the formats as plain data (no torch): element type, block size, scale type
elements    rounds float32 to an element type, bit for bit
blocks      the scales of a tensor's blocks, and the values that it is rounded to
quantizers  fake quantization of activations and weights to a format
"""
