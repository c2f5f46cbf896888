"""Number formats beyond integers: floats of 16, 8, 6 and 4 bits, some in blocks with a shared scale.

table       the formats as plain data (no torch): element type, block size, scale type
elements    rounds float32 to an element, bit for bit
blocks      the scales of a tensor's blocks, and the values that it is rounded to
"""
