"""Analysis of the effects of quantization on a prepared graph: one file per kind, each usable on its own.

    isolation     measures the loss from the weights, from the activations, and from both
    sensitivity   measures the loss with one weight or activation quantized, and with all but this one quantized
    estimate      estimates the sensitivity from a forward pass, and a backward pass for some of the images
    tensors       compares every tensor in float, in simulation and in ONNX Runtime (`runtime_tensors`)

In each file, the function of the same name accepts a prepared `fx.GraphModule` (`qatkit.graph.prepare`) whose ranges
are set, and batches of (inputs, labels), or of inputs for `tensors`. It returns the plain records of
`qatkit.records.analysis`. It does not change the graph: the graph's modes and phases are restored.
"""
