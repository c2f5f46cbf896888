"""Notes of a capture for the report."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from torch import fx

from qatkit.graph.capture.run import Recording
from qatkit.graph.nodes import is_opaque, module_of


def notes_of(
    one: Recording, random: Sequence[tuple[str, int]], sizes: tuple[int, ...]
) -> list[tuple[str, str]]:
    """Returns notes (place, text) on what a recording left out, and on the batches that it is valid for.

    Args:
        one: the recording.
        random: lines (file, number) that draw random numbers.
        sizes: batch sizes of the two runs; empty for a model that accepts only the example's batch size.
    """
    notes = [
        (
            code_at(place),
            "draws random numbers in training, which the graph leaves out; fine-tuning does not draw them",
        )
        for place in random
    ]
    if one.dropped:
        notes.append(
            ("output", f"the graph leaves out outputs that are not tensors: {', '.join(one.dropped)}")
        )
    if "autocast" in one.contexts:
        notes.append(
            ("model", "uses torch.autocast, which the graph ignores: it is float32 before quantization")
        )
    multiple = sizes[1] - sizes[0] if sizes else 1
    if multiple > 1:
        text = f"the model accepts only batch sizes that are multiples of {multiple}, and so does the file"
        notes.append(("input", text))
    if not sizes:
        notes.append(("input", "the model accepts only the example's batch size, and so does the file"))
    return notes


def notes_of_state(graph_module: fx.GraphModule, one: Recording, kept: set[str]) -> list[tuple[str, str]]:
    """Returns notes on buffers that a call changes and whose previous values influence the outputs.

    Args:
        graph_module: the captured graph.
        one: the recording that it was made from.
        kept: names of the buffers that a call in training mode changes.
    """
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    reason = "changes with every call of the model; the graph always starts from its current value"
    found = [(name, reason) for name in sorted(read & one.changed)]
    reason = "changes in training, which the graph leaves out; fine-tuning keeps its current value"
    return found + [(name, reason) for name in sorted(read & kept - one.changed)]


def notes_of_opaque(graph_module: fx.GraphModule) -> list[tuple[str, str]]:
    """Returns notes on opaque modules, which something other than PyTorch computes."""
    modules = {
        str(node.target): module_of(node) for node in graph_module.graph.nodes if node.op == "call_module"
    }
    return [(path, str(module.reason)) for path, module in modules.items() if is_opaque(module)]


def code_at(place: tuple[str, int]) -> str:
    """Returns the line of code at a place (file, line number); "a line" if it can't be read."""
    return linecache.getline(*place).strip() or "a line"
