"""Runs and checks quantized files with only onnxruntime and numpy; qatkit builds on this package.

errors foreign stopping files untrusted dotted       one-line errors, calls of users' code, signals, files
command parity checks/ bundle/                       qatkit-verify, and the bundles that it checks
preprocess fitting pictures sound sound_files        images and recordings as inputs
session feeds latency compare records hardware       a file in ONNX Runtime: inputs, outputs, speed
kernels int8_operators pairs saturation onnx_file    what ONNX Runtime runs in 8 bits
chunks stream free_run                               files with states
integer_ends                                         uint8 images as inputs, quantized outputs
runtimes/                                            other runtimes that read the same file
placement/                                           placement.json, and qatkit-measure
javascript/                                          the same checks for pages and Node
"""

import os

# From 1.29 on, ONNX Runtime sends telemetry about sessions and models unless this is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
