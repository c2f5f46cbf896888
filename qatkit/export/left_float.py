"""Lists the operators that a conversion mode (`ort_modes`) leaves in float, with notes for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from qatkit.export.for_ort_tools import RECURRENT
from qatkit.verify.graph_view import operand, stored

_LISTED = 5


class LeftFloat(NamedTuple):
    """The operators that a mode leaves in float.

    Attributes:
        names: the names of the operators; recurrent ones in branches and loop bodies only appear in the notes.
        notes: one line for the report for each reason other than the mode's design.
    """

    names: list[str]
    notes: list[str]


def left_float(
    mode: str,
    made: ir.Model,
    *,
    on_purpose: Sequence[str] = (),
    unheld: Sequence[str] = (),
    wrong: Sequence[str] = (),
) -> LeftFloat:
    """Returns the operators that a mode left float, with notes.

    Args:
        mode: the name of the mode.
        made: the converted model.
        on_purpose: operators that the mode does not quantize by design.
        unheld: operators whose values float16 cannot hold.
        wrong: operators whose weights differ too much from the float file after conversion (`wrong_weights`).
    """
    kind = "float32" if mode == "float16" else "float"
    branches = recurrent_in_branches(made)
    notes = [
        *_note(mode, unheld, f"{kind} because float16 cannot hold the values", _LISTED),
        *_note(mode, wrong, f"{kind} because the converted weights would be wrong"),
        *_note(mode, branches, f"{kind} because of branches or loops that depend on values"),
    ]
    return LeftFloat([*on_purpose, *unheld, *wrong], notes)


def recurrent_in_branches(model: ir.Model) -> list[str]:
    """Returns the names of LSTM, GRU and RNN in branches and loop bodies whose weights are stored in float32."""
    found = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.graph is model.graph or node.op_type not in RECURRENT or node.domain:
            continue
        if any(_is_float32(operand(node, place)) for place in (1, 2)):
            found.append(node.name or f"{node.outputs[0].name} ({node.op_type})")
    return found


def _is_float32(value: ir.Value | None) -> bool:
    maker = None if value is None else value.producer()
    if maker is not None and maker.op_type == "Constant":
        tensor = maker.attributes["value"].as_tensor() if "value" in maker.attributes else None
    else:
        tensor = stored(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _note(mode: str, names: Sequence[str], stays: str, most: int | None = None) -> list[str]:
    if not names:
        return []
    listed = ", ".join(names[:most]) + (", ..." if len(names[:most]) < len(names) else "")
    verb = "operator stays" if len(names) == 1 else "operators stay"
    return [f"{mode}: {len(names)} {verb} {stays}: {listed}"]
