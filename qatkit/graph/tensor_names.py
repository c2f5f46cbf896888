"""Names of tensors for the quantizers of a prepared graph, by which external encodings are matched.

In a PyTorch model the name of an activation is its site, and the name of a weight is its path in the model
("layer1.0.conv1.weight"). For an imported ONNX file, the names in the file are used (`qatkit.importing.tensor_names`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from qatkit.graph.quantizers import QUANTIZES, is_quantizer, quantized_weights, weight_name
from qatkit.quant.recurrent_layers import QATRecurrent


@dataclass(frozen=True)
class TensorNames:
    """Names of a model's tensors.

    Attributes:
        activations: for each site of a quantizer, the names of the tensors that have its range, best name first.
        weights: for each path in `quantized_weights`, the names of the weight.
        tensors: the names of all tensors of the model, with or without a quantizer.
        nodes: for each site, the name of the quantize node in a file that qatkit exports.
    """

    activations: dict[str, list[str]]
    weights: dict[str, list[str]]
    tensors: frozenset[str]
    nodes: dict[str, str]


def names_of_graph(graph_module: fx.GraphModule) -> TensorNames:
    """Returns the tensor names of a model that was not imported from a file."""
    quantizers = [node for node in graph_module.graph.nodes if is_quantizer(node)]
    activations = {str(node.meta[QUANTIZES]): [str(node.meta[QUANTIZES])] for node in quantizers}
    nodes = {str(node.meta[QUANTIZES]): str(node.target) for node in quantizers}
    weights = {
        path: [path if isinstance(operator, QATRecurrent) else f"{path}.{weight_name(operator, fake)}"]
        for path, operator, fake in quantized_weights(graph_module)
    }
    known = {name for names in (*activations.values(), *weights.values()) for name in names}
    parameters = (name for name, _ in graph_module.named_parameters())
    return TensorNames(activations, weights, frozenset((*known, *parameters)), nodes)


def best_first(found: Iterable[tuple[bool, int, str]]) -> list[str]:
    """Returns names of tensors with one range, best first and without duplicates.

    Tensors that share the range only because values were moved between them (by a reshape, say) come last. Otherwise,
    a tensor behind more absorbed nodes is better: activations that became part of the range, BatchNorms that were
    folded into the weights.

    Args:
        found: for each tensor, whether its values were moved, how many nodes are absorbed, and its name.
    """
    ordered = sorted(found, key=lambda one: (one[0], -one[1]))
    return list(dict.fromkeys(name for _, _, name in ordered))
