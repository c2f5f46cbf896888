"""Activation ranges as TensorRT's calibration table, for an engine built from the float file.

    trtexec --onnx=model.float.onnx --int8 --calib=tensorrt.table

The file's first line names the release and the calibrator; then comes, for each tensor of the network, the step
of its symmetric int8 range, max(|low|, |high|) / 127, as the hexadecimal digits of a big-endian float32. A
release reads its own tables only, so its number is asked for ("8601" is 8.6.1).
Source: "Calibration file" in the README of TensorRT's sample sampleINT8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import onnx

# What comes out has the range of what goes in, or the part of it that the quantized tensor's range was chosen for.
_SAME_RANGE = frozenset({"Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze",
                         "Slice", "Split", "Identity", "Gather", "Pad"})  # fmt: skip


def tensorrt_table(
    float_file: Path, ranges: Mapping[str, Mapping[str, float | int | str]], release: str
) -> str:
    """The table's text.

    Args:
        float_file: whose tensors are named.
        ranges: "low" and "high" by site, as in ranges.json.
        release: digits of TensorRT's version, as its tables begin with.
    """
    graph = onnx.load(float_file, load_external_data=False).graph
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in initializers]
    steps = {name: _step(ranges[name]) for name in inputs if name in ranges}
    # A module may be several nodes (LayerNorm): the last one gives what the module gives.
    results = {output.rpartition("/")[0]: output for node in graph.node for output in node.output}
    quantized = {results[site]: ends for site, ends in ranges.items() if site in results}
    for node in graph.node:
        for output in node.output:
            if output in quantized:
                steps[output] = _step(quantized[output])
            elif node.op_type in _SAME_RANGE and node.input[0] in steps:
                steps[output] = steps[node.input[0]]
    lines = [f"{name}: {struct.pack('>f', step).hex()}" for name, step in steps.items()]
    return "\n".join([f"TRT-{release}-EntropyCalibration2", *lines]) + "\n"


def _step(ends: Mapping[str, float | int | str]) -> float:
    return max(abs(float(ends["low"])), abs(float(ends["high"]))) / 127
