"""Runs and checks quantized files with only onnxruntime and numpy; qatkit builds on this package.

errors foreign stopping files untrusted dotted      errors in one line, other people's code, signals, files
session feeds latency compare records hardware       a file in ONNX Runtime: inputs, outputs, speed
integer_ends                                         uint8 images as inputs, quantized outputs
runtimes/                                            other runtimes that read the same file
placement/                                           placement.json, and qatkit-measure
"""

import os

# From 1.29 on, ONNX Runtime sends telemetry about sessions and models unless this is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
