"""Avoids clashes with the names that ONNX Runtime's tools give to their own tensors.

For a tensor "x", a tool adds tensors such as "x_scale", "x_QuantizeLinear_Output" and "x_cast_to_fp32", without
checking whether the file already has them. Therefore inner tensors with such names get other names. Inputs and outputs
are renamed only while a tool runs.
"""

from __future__ import annotations

import re

import onnx_ir as ir

_TOOLS_OWN = re.compile(
    r"_(quantized|scale|zero_point|QuantizeLinear|DequantizeLinear|ReduceMin|ReduceMax|Abs|Abs_Max|convert|scales_mul"
    r"|output_quantized|cast|cast_output|bias_reshape|bias_add|cast_to_fp16|cast_to_fp32|MatMul|Transpose)(?![a-z])"
    r"|quant_scaled_output|^graph_(input|output)_cast"
)


def free_name(name: str, taken: set[str | None]) -> str:
    """Returns `name`, with underscores appended until it is free, and marks it as taken."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def tensor_names(model: ir.Model) -> set[str | None]:
    """Returns the names of all tensors of the main graph."""
    made = {value.name for node in model.graph for value in node.outputs}
    return made | {value.name for value in model.graph.inputs} | set(model.graph.initializers)


def rename_inner(model: ir.Model) -> None:
    """Gives other names to inner tensors whose names a tool could use for its own tensors."""
    graph = model.graph
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = tensor_names(model)
    for value in values:
        if value.name and _TOOLS_OWN.search(value.name) and value.name not in ends:
            value.name = free_name(f"{value.name}_", taken)


def hide_ends(model: ir.Model) -> dict[str, str]:
    """Renames inputs and outputs whose names a tool could use, until `restore_ends`; returns old names by new ones."""
    taken, hidden = tensor_names(model), dict[str, str]()
    for number, value in enumerate(dict.fromkeys((*model.graph.inputs, *model.graph.outputs))):
        if value.name and _TOOLS_OWN.search(value.name):
            name = free_name(f"end_{number}", taken)
            hidden[name], value.name = value.name, name
    return hidden


def restore_ends(model: ir.Model, hidden: dict[str, str]) -> None:
    """Gives inputs and outputs their original names again; a tensor of the tool with such a name is renamed."""
    graph = model.graph
    ends = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    inner = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = tensor_names(model) | set(hidden.values())
    for value in inner:
        if value.name in hidden.values() and value.name not in ends:
            value.name = free_name(f"{value.name}_", taken)
    for name, own in hidden.items():
        ends[name].name = own
