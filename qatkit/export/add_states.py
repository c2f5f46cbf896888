"""Makes the states of a file's recurrent layers inputs and outputs, so that the file can process a recording in chunks.

    input [N, 1, frames, bands] ── ... ── GRU ── ... ──> output        (unchanged, for the frames of one chunk)
    state_0 [N, size] ── Unsqueeze ──────> │
                                           └ Y_h ── Squeeze ──> state_0_next [N, size]

Weights, scales and all other nodes stay as they are. Chunks of any length therefore give the same outputs as the whole
recording, provided that only the recurrent layers combine values along the axis that is cut.
`qatkit_verify.chunks` checks this by running both.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from qatkit.export.for_ort_tools import RECURRENT, add_constant
from qatkit.export.quiet import quiet
from qatkit.export.write_model import write_model
from qatkit_verify.errors import ConfigError
from qatkit_verify.stream import KEY, METADATA_KEY, Stream

# Positions of a state among the inputs and outputs of an LSTM, GRU or RNN, by the suffix of its name.
_PLACES = {"": (5, 1), "_cell": (6, 2)}


def add_states(source: Path, target: Path) -> Stream:
    """Writes `source` with the states of its LSTM, GRU and RNN as inputs and outputs to `target`, atomically.

    Returns:
        The axis that is cut into chunks and the names of the states, as stored in the file's metadata.

    Raises:
        ConfigError: the file has no such layer, a layer reads backwards, the file has several inputs, or it does not
            have exactly one dynamic axis besides the batch.
    """
    model = ir.load(source)
    graph = model.graph
    layers = [node for node in graph if node.op_type in RECURRENT and not node.domain]
    axis = _cut_axis(graph)
    if not layers:
        reason = (
            "the model has no LSTM, GRU or RNN that carries a state between chunks; set export.stream=false"
        )
        raise ConfigError(KEY, True, reason=reason)
    batch = (graph.inputs[0].shape or ir.Shape([]))[0]
    states: dict[str, str] = {}
    zero = add_constant(graph, "stream.axis", np.array([0], np.int64))
    for number, layer in enumerate(layers):
        if layer.attributes.get_string("direction", "forward") != "forward":
            reason = f"{layer.name} reads a recording from its end, which a chunk does not contain"
            raise ConfigError(KEY, True, reason=f"{reason}; set export.stream=false")
        size = layer.attributes["hidden_size"].as_int()
        for tail, places in _PLACES.items():
            if tail and layer.op_type != "LSTM":
                continue
            name = f"state_{number}{tail}"
            states[name] = f"{name}_next"
            _open(graph, layer, places, ir.Shape([batch, size]), name, zero)
    with quiet():
        common.RemoveUnusedNodesPass()(model)
    found = Stream(axis, states)
    model.metadata_props[METADATA_KEY] = found.to_text()
    write_model(model, target)
    return found


def _cut_axis(graph: ir.Graph) -> int:
    """Returns the only dynamic axis other than the batch."""
    if len(graph.inputs) != 1:
        names = ", ".join(str(one.name) for one in graph.inputs)
        raise ConfigError(KEY, True, f"false, because the file has several inputs ({names})")
    shape = list(graph.inputs[0].shape or ())
    free = [axis for axis, size in enumerate(shape) if axis and not isinstance(size, int)]
    if len(free) != 1:
        sizes = [size if isinstance(size, int) else str(size.value) for size in shape]
        shown = ", ".join(map(str, sizes))
        told = f"chunks of any length need exactly one dynamic axis in addition to the batch; the input is [{shown}]"
        setting = f"export.dynamic_axes={{{graph.inputs[0].name}: {{2: frames}}}}"
        hint = f"for features, {setting} makes the axis of the frames dynamic"
        hint = "set export.stream=false" if free else hint
        raise ConfigError(KEY, True, reason=f"{told}; {hint}")
    return free[0]


def _open(
    graph: ir.Graph, layer: ir.Node, places: tuple[int, int], shape: ir.Shape, name: str, axis: ir.Value
) -> None:
    """Makes a layer's initial state an input [batch, size] of the file, and its last state an output."""
    kind, (given, last) = ir.TensorType(ir.DataType.FLOAT), places
    start = ir.Value(name=name, shape=shape, type=kind)
    graph.inputs.append(start)
    raised = ir.Value(name=f"{name}_raised")
    graph.insert_before(
        layer, ir.node("Unsqueeze", [start, axis], outputs=[raised], name=f"stream/{name}/Unsqueeze")
    )
    if len(layer.inputs) <= given:
        layer.resize_inputs(given + 1)
    layer.replace_input_with(given, raised)
    if len(layer.outputs) <= last:
        layer.resize_outputs(last + 1)
    layer.outputs[last].name = layer.outputs[last].name or f"{name}_last"
    following = ir.Value(name=f"{name}_next", shape=shape, type=kind)
    squeezed = ir.node(
        "Squeeze", [layer.outputs[last], axis], outputs=[following], name=f"stream/{name}/Squeeze"
    )
    graph.insert_after(layer, squeezed)
    graph.outputs.append(following)
