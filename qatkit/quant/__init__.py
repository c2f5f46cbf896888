"""Number types, the arithmetic of quantization, observers, fake quantization, and the backends that choose among them.

granularity           which elements of a tensor share a scale
formats/              number formats: floats of few bits, blocks with a shared scale
spec                  what a quantized tensor is: number type, symmetry, granularity (plain data, no torch)
backends              how each target quantizes each operator class (data only)
numerics, pairs       rounding, scales and zero points; weights with which sums of two products fit 16 bits
scale_types, held_scales, bias_types    restricted scales; the types of weight scales and biases in the file
observers/            ranges of activations from the values seen
fake_quantize, weight_fake_quantize, learned/   quantizers of activations and weights; scales that are trained
qat_layers, recurrent_layers, computed_weights  layers with quantized weights for training
"""
