"""What quantization does to a prepared graph, and where: a file a kind, each usable on its own.

    isolation     weights alone, activations alone, both: which side loses
    sensitivity   each weight and each activation, alone and left out: which ones matter
    estimate      the same in one pass forward and backward
    tensors       every tensor, float beside simulated, and what ONNX Runtime makes of it (`runtime_tensors`)

Public functions take a prepared `fx.GraphModule` (`qatkit.graph.prepare`) whose ranges are set, and batches of (inputs,
labels); they give the plain records of `qatkit.records.analysis`. They change nothing: modes and phases are put back.
"""
