"""Number formats beyond evenly spaced integers: floats of 16, 8, 6 and 4 bits, alone or in blocks with a shared scale.

table       the formats as rows (plain data, no torch): what an element is, how many share a scale, of which type
elements    float32 rounded to an element, bit for bit
blocks      a tensor in blocks: their scales, and what it becomes
"""
