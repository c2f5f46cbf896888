"""Analysis of the effects of quantization on a prepared graph: one file per kind, each usable on its own.

    isolation     weights only, activations only, both: which side loses
    sensitivity   each weight and each activation, as the only quantized one and as the only float one
    estimate      the same in one pass forward and backward
    tensors       every tensor, float next to simulated, and its values in ONNX Runtime (`runtime_tensors`)

Public functions take a prepared `fx.GraphModule` (`qatkit.graph.prepare`) whose ranges are set, and batches
of (inputs, labels). They return the plain records of `qatkit.records.analysis`. They change nothing: modes
and phases are restored.
"""
