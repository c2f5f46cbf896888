"""Quantizers that learn: scales (and zero points, or clipping values) that are parameters, trained with the weights.

    gradients    the passes over tensors: fake quantization whose backward also yields the gradient of the scale
    by_shares    the optimizer: weights by their own, what quantizers learn by Adam on its logarithm
    lsq          scales of activations and of weights (Esser et al. 2020)
    lsq_plus     scales and zero points of activations (Bhalgat et al. 2020)
    pact         clipping values of activations (Choi et al. 2018)
    oscillation  weights that jump between two integers: counted, dampened or frozen (Nagel et al. 2022)

They follow calibration until fine-tuning begins (`Quantizer.begin`). Before each step the scales that are wanted are
moved into place (`qatkit.graph.scales.align`); the gradient goes straight through to what is wanted.
"""
