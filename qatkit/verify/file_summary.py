"""Tabulates a file's operators: how many of each type, how they are quantized, and which run in int8 here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qatkit.records.results import Audit
from qatkit.verify.graph_view import made_by, operand, quantized_type, stored

_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16,
          ir.DataType.UINT16, ir.DataType.INT2, ir.DataType.UINT2)  # fmt: skip
# Positions of activation, weight and weight scale for operators that take integers.
_INTEGERS = {
    "QLinearConv": (0, 3, 4),
    "QLinearMatMul": (0, 3, 4),
    "QGemm": (0, 3, 4),
    "ConvInteger": (0, 1, None),
    "MatMulInteger": (0, 1, None),
    "DynamicQuantizeMatMul": (0, 1, 2),
    "MatMulIntegerToFloat": (0, 1, 3),
    "DynamicQuantizeLSTM": (0, 1, 8),
}


@dataclass
class OperatorRow:
    """The figures of one type of operator.

    Attributes:
        operator: its type, preceded by the domain if that is not ONNX's.
        count: the number of nodes, including those of branches and bodies.
        quantized: the number of nodes with quantized inputs.
        types: the number of nodes by the types of activations and weights ("uint8 x int8 per channel").
        weight_bytes: the bytes of initializers that the nodes read; each initializer counts where it is read
            first.
        ran: the number of nodes of the main graph by the precision in which they ran here (int8, float,
            weight-only, other). Nodes that are missing were folded or became part of another node. None: the
            file was not run.
        inner: the number of nodes in branches and bodies.
    """

    operator: str
    count: int = 0
    quantized: int = 0
    types: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    ran: dict[str, int] | None = None
    inner: int = 0


@dataclass
class FileSummary:
    """A file's operators, most frequent first, and its totals.

    Attributes:
        rows: the figures of each type of operator.
        nodes: the number of nodes, including those of branches and bodies.
        weight_bytes: the bytes of all initializers of the main graph.
        unread_bytes: the bytes of initializers that no node reads.
        file_bytes: the size of the file, without external data.
        note: the reason why the file was not run; "" if it was.
    """

    rows: list[OperatorRow]
    nodes: int
    weight_bytes: int
    unread_bytes: int
    file_bytes: int
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the summary for JSON."""
        return asdict(self)


def name_nodes(model: ir.Model) -> None:
    """Gives each node of the main graph a unique name, so that an audit can find it."""
    taken: set[str] = set()
    for number, node in enumerate(model.graph):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}/{number}"
        taken.add(str(node.name))


def summarize(model: ir.Model, path: Path, audit: Audit | None, note: str = "") -> FileSummary:
    """Counts the operators of a file and returns the summary.

    Args:
        model: the file with its constants as initializers; each node of the main graph has a unique name.
        path: the path of the file.
        audit: the audit of the file, with the same names of nodes; None if the file was not run.
        note: the reason why there is no audit; "" if there is one.
    """
    rows: dict[str, OperatorRow] = {}
    counted: set[ir.Value] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        row = rows.setdefault(kind, OperatorRow(kind, ran=None if audit is None else {}))
        row.count += 1
        row.inner += node.graph is not model.graph
        types = _types(node)
        row.quantized += bool(types)
        if types:
            row.types[types] = row.types.get(types, 0) + 1
        row.weight_bytes += _new_bytes(_constants(node), counted)
    if audit is not None:
        _add_precisions(rows, model, audit)
    held = [value for value in model.graph.initializers.values() if value.const_value is not None]
    total = sum(value.const_value.nbytes for value in held if value.const_value is not None)
    unread = _new_bytes((value for value in held if not value.uses()), set())
    ordered = sorted(rows.values(), key=lambda row: (-row.count, row.operator))
    count = sum(row.count for row in ordered)
    return FileSummary(ordered, count, total, unread, path.stat().st_size, note)


def table(summary: FileSummary) -> list[tuple[str, ...]]:
    """Returns the rows of the table for the terminal; the first row has the headings."""
    found = [("operator", "nodes", "quantized", "ran here", "weights", "types")]
    for row in summary.rows:
        quantized = str(row.quantized) if row.quantized else "-"
        types = ", ".join(f"{count} {kind}" for kind, count in sorted(row.types.items()))
        found.append((row.operator, str(row.count), quantized, _ran(row), _size(row.weight_bytes), types))
    integers = sum(row.quantized for row in summary.rows if row.operator not in _PAIRS)
    total = ("all", str(summary.nodes), str(integers), "", _size(summary.weight_bytes), "")
    return [*found, total]


def _ran(row: OperatorRow) -> str:
    if row.ran is None:
        return "?"
    left = row.count - row.inner - sum(row.ran.values())
    parts = [*sorted(row.ran.items()), ("folded or fused", left), ("in branches", row.inner)]
    return ", ".join(f"{count} {kind}" for kind, count in parts if count > 0)


def _size(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _types(node: ir.Node) -> str:
    """Returns the types of a node's integer operands; "" for a node in float, and for Q and DQ nodes."""
    if node.op_type in _PAIRS or node.op_type == "DynamicQuantizeLinear":
        return ""
    if node.op_type == "MatMulNBits":
        bits, block = (node.attributes.get_int(name, 0) for name in ("bits", "block_size"))
        return f"float x uint{bits} in blocks of {block}"
    if node.op_type in _INTEGERS:
        activation, weight, scale = _INTEGERS[node.op_type]
        first = _type(operand(node, activation)) or "dynamic uint8"
        if node.op_type.startswith("DynamicQuantize"):
            first = "dynamic uint8"
        held = operand(node, weight)
        return (
            f"{first} x {_type(held) or 'computed'}{_scales(operand(node, scale) if scale else None, held)}"
        )
    kinds = [found for value in node.inputs[:2] if (found := _dequantized(value))]
    return " x ".join(kinds)


def _dequantized(value: ir.Value | None) -> str:
    """Returns the type from which `value` is dequantized, with the granularity for a constant.

    It is "" if no DequantizeLinear produces `value`.
    """
    pair = made_by(value, "DequantizeLinear")
    if pair is None:
        return ""
    held = operand(pair, 0)
    kind = quantized_type(pair) if operand(pair, 2) is not None else None
    name = str(kind).lower() if kind is not None else _type(held) or "uint8"
    if stored(held) is None:
        return name
    block = pair.attributes.get_int("block_size", 0)
    return f"{name} in blocks of {block}" if block else f"{name}{_scales(operand(pair, 1), held)}"


def _scales(scale: ir.Value | None, held: ir.Value | None) -> str:
    tensor = stored(scale)
    if tensor is None or stored(held) is None:
        return ""
    return " per channel" if tensor.size > 1 else " per tensor"


def _type(value: ir.Value | None) -> str:
    """Returns the integer type of a tensor, from itself or from its QuantizeLinear; "" for another type."""
    if value is None:
        return ""
    tensor = stored(value)
    kind = value.dtype if tensor is None else tensor.dtype
    pair = made_by(value, "QuantizeLinear")
    if pair is not None:
        kind = quantized_type(pair)
    elif made_by(value, "DynamicQuantizeLinear") is not None:
        return "dynamic uint8"
    return str(kind).lower() if kind in _BYTES else ""


def _constants(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the initializers that a node reads, including those of its DequantizeLinear inputs."""
    if node.op_type in _PAIRS and stored(operand(node, 0)) is not None:
        return
    for value in node.inputs:
        pair = made_by(value, "DequantizeLinear")
        for one in (value, *(pair.inputs if pair is not None else ())):
            if one is not None and stored(one) is not None:
                yield one


def _new_bytes(found: Iterable[ir.Value], counted: set[ir.Value]) -> int:
    size = 0
    for value in found:
        tensor = stored(value)
        if tensor is not None and value not in counted:
            counted.add(value)
            size += tensor.nbytes
    return size


def _add_precisions(rows: Mapping[str, OperatorRow], model: ir.Model, audit: Audit) -> None:
    """Counts the precision in which the nodes of the main graph computed, each node once."""
    kinds = {str(node.name): node for node in model.graph}
    best: dict[str, str] = {}
    for entry in audit.nodes:
        if entry.source in kinds and best.get(str(entry.source)) != "int8":
            best[str(entry.source)] = entry.precision
    for name, precision in best.items():
        node = kinds[name]
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        ran = rows[kind].ran
        if ran is not None:
            ran[precision] = ran.get(precision, 0) + 1
