"""Maps the tensor names of a given ONNX file to the quantizers of its prepared graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

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
    makers = Makers(model, regions)
    found: dict[str, list[tuple[bool, int, str]]] = defaultdict(list)
    for name, source in _tensors(model):
        way = makers.way(source)
        quantizer, moved = _quantizer(regions, way.region)
        if quantizer is not None:
            found[str(quantizer.meta[QUANTIZES])].append((moved or way.moved, way.absorbed, name))
    graph = read(model.file).graph
    made = (value.name for node in graph for value in node.outputs)
    known = (*(value.name for value in graph.inputs), *graph.initializers, *made)
    activations = {place: best_first(names) for place, names in found.items()}
    weights = dict(_weights(regions, graph_module, graph))
    return TensorNames(activations, weights, frozenset(str(name) for name in known if name), {})


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
