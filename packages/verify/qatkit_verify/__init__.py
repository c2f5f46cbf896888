"""What a machine needs that runs a quantized file: onnxruntime and numpy. qatkit stands on it.

errors foreign stopping files untrusted dotted      one line for a user's mistake, other people's code, signals, files
session feeds latency compare records hardware       a file in ONNX Runtime: what goes in, what comes out, how fast
integer_ends                                         uint8 images in, quantized outputs out
runtimes/                                            other runtimes that read the same file
placement/                                           placement.json, and qatkit-measure
"""

import os

# From 1.29 on, ONNX Runtime reports sessions and models to its maker unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
