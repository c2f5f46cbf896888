"""Learned quantizers: scales (and zero points or clipping values) are parameters, trained with the weights.

gradients    fake quantization whose backward pass also yields the gradient of the scale
by_shares    the optimizers, which update learned scales by Adam on their logarithm
lsq          scales of activations and of weights (Esser et al. 2020)
lsq_plus     scales and zero points of activations (Bhalgat et al. 2020)
pact         clipping values of activations (Choi et al. 2018)
oscillation  weights that jump between two integers: counted, dampened or frozen (Nagel et al. 2022)

Learned quantizers follow calibration until fine-tuning begins (`Quantizer.begin`). Before each step the
learned scales are aligned (`qatkit.graph.scales.align`), and the gradient of an aligned scale passes straight
through to the learned one.
"""
