"""Explains why a quantized file is larger than the float file from which it was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

_INTEGERS = "_quantized"  # suffix of the name of a weight's integers
_WORTH_TELLING = 1000  # smallest difference in bytes that is explained


def why_larger(given: Path, written: Path) -> str | None:
    """Returns a sentence on why the quantized file is larger than the float file; None if it is less than 1 kB larger.

    Args:
        given: the float file.
        written: the quantized file, in which the integers of weight NAME are called NAME_quantized.
    """
    sizes = [path.stat().st_size for path in (given, written)]
    if sizes[1] - sizes[0] < _WORTH_TELLING:
        return None
    before, after = (onnx.load(str(path)) for path in (given, written))
    left = dict(_constants(after.graph))
    made = {name for node in before.graph.node if node.op_type != "Constant" for name in node.output}
    computed, kept = list[int](), list[int]()
    for name, size in left.items():
        origin = name.removesuffix(_INTEGERS)
        if origin == name:
            continue
        if origin in left:
            kept.append(size)
        elif origin in made:
            computed.append(size)
    reasons = []
    if computed:
        reasons.append(
            f"{_bytes(computed)} are integers of weights that the float file computes from smaller constants"
        )
    if kept:
        reasons.append(
            f"{_bytes(kept)} are integers of weights that float operators read as well, so both copies are needed"
        )
    nodes = sum(_of_nodes(one.graph) * sign for one, sign in ((after, 1), (before, -1)))
    if nodes > 0:
        reasons.append(f"{nodes / 1e3:.0f} kB are QuantizeLinear and DequantizeLinear nodes and their names")
    told = f"the INT8 file is {(sizes[1] - sizes[0]) / 1e3:.0f} kB larger than the float file"
    return f"{told}: {'; '.join(reasons)}" if reasons else told


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """Yields the name and the size in bytes of each constant of the main graph."""
    for tensor in graph.initializer:
        yield tensor.name, tensor.ByteSize()
    for node in graph.node:
        if node.op_type == "Constant":
            yield node.output[0], node.ByteSize()


def _of_nodes(graph: onnx.GraphProto) -> int:
    return sum(node.ByteSize() for node in graph.node if node.op_type != "Constant")


def _bytes(sizes: list[int]) -> str:
    return f"{sum(sizes) / 1e3:.0f} kB"
