"""Writes activation ranges as TensorRT's calibration table, for an engine built from the float file.

    trtexec --onnx=model.float.onnx --int8 --calib=tensorrt.table

The first line names the release and the calibrator. Each further line gives, for a tensor of the network, the scale of
its symmetric int8 range, max(|low|, |high|) / 127, as the hexadecimal digits of a big-endian float32. A release of
TensorRT reads only its own tables, so its number is required ("8601" is 8.6.1).
Source: "Calibration file" in the README of TensorRT's sample sampleINT8.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from torch import fx

from qatkit.graph.nodes import site
from qatkit.verify.graph_view import clip_ops, same_scale_ops

Ends = Mapping[str, float | int | str]


def split_parts(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Maps the site of each element of a tuple (from a split or a chunk) to the tuple's site and the index in it."""
    found = [
        node for node in graph.nodes if node.target is operator.getitem and isinstance(node.args[1], int)
    ]
    return {site(node): (site(node.args[0]), node.args[1]) for node in found}


def tensorrt_table(
    float_file: Path, ranges: Mapping[str, Ends], release: str, parts: Mapping[str, tuple[str, int]]
) -> tuple[str, list[str]]:
    """Returns the table's text, and the sites for which no tensor of the file was found.

    The output of an operator that keeps the range, such as a Reshape, gets the scale of its input if it has no range.

    Args:
        float_file: the float ONNX file, whose tensor names the table uses.
        ranges: the range of each site, as in ranges.json.
        release: the digits of TensorRT's version at the beginning of its tables.
        parts: the result of `split_parts`.
    """
    graph = ir.load(float_file).graph
    inputs = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    # A module may become several nodes (LayerNorm); the last one computes the output of the module.
    results = {str(node.name).rpartition("/")[0]: [str(v.name) for v in node.outputs] for node in graph}
    results |= {name: [name] for name in inputs}
    quantized, missing = dict[str, Ends](), []
    for place, ends in ranges.items():
        source, index = (place, 0) if place in results else parts.get(place, (place, 0))
        outputs = results.get(source, [])
        if index < len(outputs):
            quantized[outputs[index]] = ends
        else:
            missing.append(place)
    steps = {name: _step(quantized[name]) for name in inputs if name in quantized}
    same_range = _same_range()
    for node in graph:
        read = node.inputs[0].name if node.inputs and node.inputs[0] is not None else None
        for output in (str(value.name) for value in node.outputs):
            if output in quantized:
                steps[output] = _step(quantized[output])
            elif node.op_type in same_range and read in steps:
                steps[output] = steps[read]
    lines = [f"{name}: {struct.pack('>f', step).hex()}" for name, step in steps.items()]
    return "\n".join([f"TRT-{release}-EntropyCalibration2", *lines]) + "\n", missing


def _same_range() -> frozenset[str]:
    """Returns the types of operators whose output has the range of the first input, or a part of that range."""
    return same_scale_ops() | clip_ops() | {"Identity", "Pad"}


def _step(ends: Ends) -> float:
    if ends["dtype"] == "int8" and ends["zero_point"] == 0:
        return float(ends["scale"])  # the lowest integer, -128, is not used
    return max(abs(float(ends["low"])), abs(float(ends["high"]))) / 127
