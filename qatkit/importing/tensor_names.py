"""Maps the tensor names of a given ONNX file to the quantizers of its prepared graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from torch import fx

from qatkit.graph.quantizers import QUANTIZES, is_quantizer, quantized_weights, quantizer_of
from qatkit.graph.tensor_names import TensorNames, best_first
from qatkit.importing.makers import Makers
from qatkit.importing.program import ImportedModel, Step
from qatkit.importing.read import read
from qatkit.importing.regions import INPUT, Regions

_RECURRENT = {"weight_ih_l0": 1, "weight_hh_l0": 2}  # inputs of LSTM, GRU and RNN


def names_of_file(model: ImportedModel, graph_module: fx.GraphModule) -> TensorNames:
    """Returns the names of a file's tensors, by the quantizers of the graph.

    Args:
        model: the file, imported by `import_onnx`.
        graph_module: the graph that was prepared from `model`.

    Raises:
        ConfigError: the file can no longer be read, or a node of the graph belongs to no node of the file.
    """
    regions = Regions(model, graph_module)
    found: dict[str, list[tuple[bool, int, str]]] = defaultdict(list)
    for quantizer, one in _with_ranges(model, regions):
        found[str(quantizer.meta[QUANTIZES])].append(one)
    graph = read(model.file).graph
    made = (value.name for node in graph for value in node.outputs)
    known = (*(value.name for value in graph.inputs), *graph.initializers, *made)
    activations = {place: best_first(names) for place, names in found.items()}
    weights = dict(_weights(regions, graph_module, graph))
    return TensorNames(activations, weights, frozenset(str(name) for name in known if name), {})


def pairs_in_file(model: ImportedModel, graph_module: fx.GraphModule, path: Path) -> dict[str, str]:
    """Returns the outputs of QuantizeLinear nodes in the file that was written back, by the path of their quantizer.

    Quantizers of which the file has no pair, or several, are omitted.

    Args:
        model, graph_module: see `names_of_file`.
        path: the file that `qatkit.importing.write_back` has written.
    """
    found: dict[str, list[str]] = defaultdict(list)
    made: dict[str, list[str]] = defaultdict(list)
    for node in ir.load(path).graph:
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
            made[str(node.inputs[0].name)].append(str(node.outputs[0].name))
    for quantizer, (moved, _, name) in _with_ranges(model, Regions(model, graph_module)):
        found[str(quantizer.target)] += [] if moved else made[name]
    return {target: names[0] for target, names in found.items() if len(set(names)) == 1}


def _with_ranges(model: ImportedModel, regions: Regions) -> Iterator[tuple[fx.Node, tuple[bool, int, str]]]:
    """Yields the quantizer of each tensor that has a range, and the tensor as in `best_first`."""
    makers = Makers(model, regions)
    for name, source in _tensors(model):
        way = makers.way(source)
        quantizer, moved = _quantizer(regions, way.region)
        if quantizer is not None:
            yield quantizer, (moved or way.moved, way.absorbed, name)


def _tensors(model: ImportedModel) -> Iterator[tuple[str, str]]:
    """Yields the names of a file's tensors, each with its name in the program."""
    for name in (*model.inputs, *(name for step in model.program.steps for name in step.outputs if name)):
        yield name, name
    yield from zip(model.outputs, model.program.outputs, strict=True)


def _quantizer(regions: Regions, region: str) -> tuple[fx.Node | None, bool]:
    """Returns the quantizer of a region's output, and whether its range belongs to another region.

    The range belongs to another region if this one only moves values. The quantizer is None if there is none, or if
    there are several and it is ambiguous which one belongs to the output.
    """
    if region.startswith(INPUT):
        nodes = [node for node, one in regions.region.items() if one == region]
    else:
        nodes = regions.nodes.get(region, [])
    own = [user for node in nodes for user in node.users if is_quantizer(user)]
    if own:
        last = [one for one in own if one.all_input_nodes[0] is nodes[-1]]
        return (own[0] if len(own) == 1 else last[0] if len(last) == 1 else None), False
    return (quantizer_of(nodes[-1]) if nodes else None), True


def _weights(
    regions: Regions, graph_module: fx.GraphModule, graph: ir.Graph
) -> Iterator[tuple[str, list[str]]]:
    """Yields the path of each quantized weight, and in a list the name of the constant that its node reads.

    The list is empty if the node reads no constant.
    """
    nodes = {str(value.name): node for node in graph for value in node.outputs}
    for path, _, _ in quantized_weights(graph_module):
        step = _step(regions, path)
        node = None if step is None else nodes.get(next(name for name in step.outputs if name))
        if node is None:
            continue
        place = _RECURRENT.get(path.rpartition(".")[2])
        places = (0,) if node.op_type == "Gather" else (1, 0) if place is None else (place,)
        given = (node.inputs[one] for one in places if one < len(node.inputs))
        constants = (one for one in given if one is not None and _is_constant(one))
        yield path, [str(one.name) for one in constants][:1]


def _step(regions: Regions, path: str) -> Step | None:
    parts = path.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((regions.steps[one] for one in above if one in regions.steps), None)


def _is_constant(value: ir.Value) -> bool:
    """Returns whether a value depends on no input of the graph."""
    if value.is_graph_input():
        return False
    node = value.producer()
    return node is None or all(one is None or _is_constant(one) for one in node.inputs)
