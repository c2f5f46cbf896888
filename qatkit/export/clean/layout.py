"""Puts the channels of inputs and outputs first or last, by adding a Transpose or changing an existing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from qatkit.export.clean.graphs import taken_names
from qatkit.export.hidden_names import free_name
from qatkit_verify.errors import ConfigError, counted, did_you_mean

KEY = "clean.layout"
LAYOUTS = ("nchw", "nhwc")


def permutation(layout: str, rank: int) -> tuple[int, ...]:
    """Returns the order of axes that converts a tensor in the other layout to `layout`."""
    return (0, *range(2, rank), 1) if layout == "nhwc" else (0, rank - 1, *range(1, rank - 1))


def change_layout(model: ir.Model, asked: Mapping[str, str]) -> list[str]:
    """Gives inputs and outputs another layout.

    Args:
        model: the model, changed in place.
        asked: the new layouts, by the names of inputs and outputs.

    Returns:
        A line for each changed input or output.

    Raises:
        ConfigError: a name is neither an input nor an output, a layout is unknown, a tensor has fewer than 3 axes or no
            known shape, or an output is a constant.
    """
    if not isinstance(asked, Mapping):
        raise ConfigError(KEY, asked, "layouts by name ({input: nhwc})")
    inputs = {str(value.name): value for value in model.graph.inputs}
    outputs = {str(value.name): value for value in model.graph.outputs}
    lines = []
    for name, layout in asked.items():
        if layout not in LAYOUTS:
            raise ConfigError(f"{KEY}.{name}", layout, f"one of {', '.join(LAYOUTS)}")
        value = inputs.get(name) or outputs.get(name)
        if value is None:
            known = [*inputs, *outputs]
            allowed = f"an input or output of the file ({', '.join(known)}){did_you_mean(name, known)}"
            raise ConfigError(KEY, name, allowed)
        if value.shape is None or len(value.shape) < 3:
            reason = f"the file gives '{name}' no shape of 3 axes or more; leave it out of {KEY}"
            raise ConfigError(f"{KEY}.{name}", layout, reason=reason)
        if name not in inputs and value.is_initializer():
            reason = f"no node of the file computes the output '{name}'; leave it out of {KEY}"
            raise ConfigError(f"{KEY}.{name}", layout, reason=reason)
        change = _change_input if name in inputs else _change_output
        lines.append(f"{name} is {layout}{change(model, value, permutation(layout, len(value.shape)))}")
    return lines


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(axis) for axis in range(len(order))]


def _is_identity(order: Sequence[int]) -> bool:
    return list(order) == list(range(len(order)))


def _ordered(shape: ir.Shape, order: Sequence[int]) -> ir.Shape:
    return ir.Shape([shape[axis] for axis in order])


def _transposes(node: ir.Node, rank: int) -> list[int] | None:
    """Returns the permutation of a Transpose; None for any other node."""
    if node.op_type != "Transpose" or node.domain:
        return None
    found = node.attributes.get("perm")
    return list(range(rank))[::-1] if found is None else list(found.as_ints())


def _change_input(model: ir.Model, value: ir.Value, order: tuple[int, ...]) -> str:
    """Changes the layout of an input; its readers still get the old layout."""
    assert value.shape is not None
    graph, old, back = model.graph, value.shape, _inverse(order)
    value.shape = _ordered(old, order)
    folded = [node for node, _ in value.uses() if node.graph is graph and _transposes(node, len(old))]
    for node in folded:
        _set_order(node, [back[axis] for axis in _transposes(node, len(old)) or ()])
    left = [(node, index) for node, index in value.uses() if node not in folded]
    if left or value.is_graph_output():
        inner = _transposed(model, value, back, old, f"{value.name}_transposed")
        graph.insert_before(graph[0], inner)
        for node, index in left:
            node.replace_input_with(index, inner.outputs[0])
        for place, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[place] = inner.outputs[0]
    for node in folded:
        _drop_identity(graph, node)
    return f" ({counted(len(folded), 'Transpose')} joined)" if folded else " (Transpose added)"


def _change_output(model: ir.Model, value: ir.Value, order: tuple[int, ...]) -> str:
    """Changes the layout of an output; other readers of the tensor still get the old layout."""
    assert value.shape is not None
    graph, old, name = model.graph, value.shape, str(value.name)
    node = value.producer()
    own = None if node is None else _transposes(node, len(old))
    if node is not None and own is not None and not value.uses():
        _set_order(node, [own[axis] for axis in order])
        value.shape = _ordered(old, order)
        _drop_identity(graph, node)
        return " (1 Transpose joined)"
    place = next(i for i, output in enumerate(graph.outputs) if output is value)
    value.name = free_name(f"{name}_before", taken_names(model))
    after = _transposed(model, value, order, _ordered(old, order), name)
    graph.append(after)
    after.outputs[0].name = name
    graph.outputs[place] = after.outputs[0]
    return " (Transpose added)"


def _set_order(node: ir.Node, order: Sequence[int]) -> None:
    node.attributes.add(ir.AttrInt64s("perm", order))


def _transposed(
    model: ir.Model, value: ir.Value, order: Sequence[int], shape: ir.Shape, name: str
) -> ir.Node:
    free = free_name(name, taken_names(model)) if name.endswith("_transposed") else name
    node = ir.node("Transpose", [value], {"perm": list(order)}, name=f"{free}/Transpose")
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = free, shape, value.type
    return node


def _drop_identity(graph: ir.Graph, node: ir.Node) -> None:
    """Removes a Transpose that changes nothing, unless an output would become an input, constant or other output."""
    source, made = node.inputs[0], node.outputs[0]
    if source is None or not _is_identity(node.attributes["perm"].as_ints()):
        return
    if made.is_graph_output():
        if source.is_graph_input() or source.is_initializer() or source.is_graph_output():
            return
        name = made.name
        made.name = f"{name}_before"
        made.replace_all_uses_with(source, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        source.name, source.shape = name, made.shape
        return
    made.replace_all_uses_with(source)
    graph.remove(node, safe=True)
