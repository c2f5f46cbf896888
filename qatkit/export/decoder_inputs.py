"""Gives a decoder's file the inputs that runtimes for decoders expect: one attention mask, and Hugging Face's names.

    mask [N, T], past_mask [N, P]            ─┐
    past_0_key [N, H, P, D], ...              ├──> attention_mask [N, P + T], past_key_values.0.key, present.0.key
                                             ─┘

Sources: the inputs of files that optimum exports, and the names in onnxruntime-genai's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qatkit.export.write_model import write_model

ATTENTION_MASK, LOGITS = "attention_mask", "logits"
_END = np.iinfo(np.int64).max


def past_name(layer: int, kind: str) -> str:
    """Returns the name of the input with a layer's keys or values of earlier tokens; `kind` is "key" or "value"."""
    return f"past_key_values.{layer}.{kind}"


def present_name(layer: int, kind: str) -> str:
    """Returns the name of the output with a layer's keys or values of all tokens; `kind` is "key" or "value"."""
    return f"present.{layer}.{kind}"


def for_runtimes(path: Path, mask: str, past_mask: str, past: Sequence[str]) -> None:
    """Changes the inputs and outputs of a decoder's file, in place.

    Args:
        path: the file; its outputs are the logits, then the keys and values layer by layer.
        mask, past_mask: the names of the inputs that become one attention mask.
        past: the names of the inputs with keys and values, layer by layer.
    """
    model = ir.load(path)
    graph = model.graph
    named = {str(value.name): value for value in graph.inputs}
    new, old = named[mask], named[past_mask]
    whole = ir.Value(
        name=ATTENTION_MASK,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([old.shape[0] if old.shape is not None else "batch", "past + sequence"]),
    )
    _cut(graph, whole, old, new, named[past[0]])
    for place, value in enumerate(graph.inputs):
        if value is new:
            graph.inputs[place] = whole
    graph.inputs.remove(old)
    graph.outputs[0].name = LOGITS
    for place, name in enumerate(past):
        layer, kind = place // 2, ("key", "value")[place % 2]
        named[name].name = past_name(layer, kind)
        graph.outputs[1 + place].name = present_name(layer, kind)
    write_model(model, path)


def _cut(graph: ir.Graph, whole: ir.Value, old: ir.Value, new: ir.Value, keys: ir.Value) -> None:
    """Splits the mask of all tokens into the mask of the earlier tokens and the mask of the new ones."""

    def constant(name: str, value: int) -> ir.Value:
        made = ir.Value(name=f"attention_mask_{name}", const_value=ir.tensor(np.array([value], np.int64)))
        graph.register_initializer(made)
        return made

    zero, one, two, end = (
        constant(name, value) for name, value in (("start", 0), ("axis", 1), ("length", 2), ("end", _END))
    )
    shape = ir.Node("", "Shape", [keys], name="attention_mask/Shape")
    length = ir.Node("", "Gather", [shape.outputs[0], two], {"axis": ir.AttrInt64("axis", 0)}.values(),
                     name="attention_mask/Gather")  # fmt: skip
    count = length.outputs[0]
    earlier = ir.Node("", "Slice", [whole, zero, count, one], name="attention_mask/Slice_past")
    later = ir.Node("", "Slice", [whole, count, end, one], name="attention_mask/Slice_new")
    for node in (shape, length, earlier, later):
        node.outputs[0].name = str(node.name)
    first = graph[0]
    graph.insert_before(first, [shape, length, earlier, later])
    ir.convenience.replace_all_uses_with([old, new], [earlier.outputs[0], later.outputs[0]])
