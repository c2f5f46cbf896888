"""What a machine needs that runs a quantized file: onnxruntime and numpy. qatkit stands on it.

errors foreign stopping files untrusted dotted      one line for a user's mistake, other people's code, signals, files
session feeds latency compare records hardware       a file in ONNX Runtime: what goes in, what comes out, how fast
integer_ends                                         uint8 images in, quantized outputs out
runtimes/                                            other runtimes that read the same file
placement/                                           placement.json, and qatkit-measure
"""
