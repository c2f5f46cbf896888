"""Finds quantizers in the graph: before an operator, after it, or all of them by name.

The meta of an activation's quantizer has, under `QUANTIZES`, the site of the tensor that it quantizes. Caches, reports
and users refer to the range by this name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx, nn

from qatkit.graph.nodes import facts, module_of, parameter_reads, site
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.recurrent_layers import QATRecurrent
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

QUANTIZES = "quantizes"


def is_quantizer(node: fx.Node) -> bool:
    """Returns whether `node` is a FakeQuantize."""
    return node.op == "call_module" and isinstance(module_of(node), FakeQuantize)


def quantizer_of(node: Any) -> fx.Node | None:
    """Returns the FakeQuantize node that sets the range of `node`'s value; None if it is not quantized.

    Operators that only move or select values may be between the two.
    """
    while isinstance(node, fx.Node):
        if is_quantizer(node):
            return node
        if not facts(node).keeps_range:
            return None
        node = node.all_input_nodes[0]
    return None


def quantizer_after(node: fx.Node) -> fx.Node | None:
    """Returns the FakeQuantize node that is the only reader of `node`; None if there is none."""
    after = next(iter(node.users)) if len(node.users) == 1 else None
    return after if after is not None and is_quantizer(after) else None


def fake_quantizers(graph_module: fx.GraphModule) -> dict[str, FakeQuantize]:
    """Returns the quantizers of activations by the site of the tensor that they quantize, in graph order."""
    return {
        str(node.meta[QUANTIZES]): cast(FakeQuantize, module_of(node))
        for node in graph_module.graph.nodes
        if is_quantizer(node)
    }


def quantized_operators(
    graph_module: fx.GraphModule,
) -> list[tuple[fx.Node, QATOperator, WeightFakeQuantize]]:
    """Returns the Convs and Linears with quantized weights, each with its quantizer, in graph order."""
    found = []
    for node in graph_module.graph.nodes:
        module = module_of(node) if node.op == "call_module" else None
        if isinstance(module, QATOperator) and module.weight_fake_quant is not None:
            found.append((node, module, module.weight_fake_quant))
    return found


def sorted_out(
    graph_module: fx.GraphModule, why_not: Callable[[QATOperator, Counter[int]], str | None]
) -> tuple[dict[str, QATOperator], list[tuple[str, str]]]:
    """Returns the `quantized_operators` that an algorithm may change, by site, and (site, reason) of the others.

    Args:
        graph_module: a prepared graph.
        why_not: a function of an operator and `parameter_reads` that returns why the operator may not be changed, or
            None if it may.
    """
    reads = parameter_reads(graph_module.graph)
    chosen, skipped = dict[str, QATOperator](), list[tuple[str, str]]()
    for node, operator, _ in quantized_operators(graph_module):
        if reason := why_not(operator, reads):
            skipped.append((site(node), reason))
        else:
            chosen[site(node)] = operator
    return chosen, skipped


def quantized_weights(graph_module: fx.GraphModule) -> list[tuple[str, nn.Module, WeightFakeQuantize]]:
    """Returns (path, operator, quantizer) of every quantized weight, in the modules' order.

    These are the weights of every Conv, Linear and Embedding with a quantizer, and every weight of an LSTM, GRU or
    RNN, whose path ends with the weight's name.
    """
    found: list[tuple[str, nn.Module, WeightFakeQuantize]] = []
    for path, module in graph_module.named_modules():
        fake = getattr(module, "weight_fake_quant", None)
        if isinstance(fake, WeightFakeQuantize):
            found.append((path, module, fake))
        elif isinstance(module, QATRecurrent):
            found += [
                (f"{path}.{name}", module, module.quantizer(name)) for name in module.weight_fake_quants
            ]
    return found


def weight_name(operator: nn.Module, fake: WeightFakeQuantize) -> str:
    """Returns the attribute name of the weight that `fake` quantizes."""
    if not isinstance(operator, QATRecurrent):
        return "weight"
    return next(name for name, one in operator.weight_fake_quants.items() if one is fake)


def inference_weight(operator: nn.Module, fake: WeightFakeQuantize) -> Tensor:
    """Returns the float weight that `fake` quantizes in inference."""
    if isinstance(operator, QATOperator):
        return operator.effective()[0]
    weight: Tensor = getattr(operator, weight_name(operator, fake))
    return weight


def clip_weights(graph_module: fx.GraphModule, levels: int = 256) -> None:
    """Sets the ranges of quantized weights to those with the least squared error for the current weights.

    Weights in a number format stay unchanged.

    Args:
        graph_module: a prepared graph.
        levels: the largest number of integers of a weight; the range of a weight whose type has more stays unchanged.
    """
    for _, operator, fake in quantized_weights(graph_module):
        if fake.spec.form is None and fake.spec.quant_max - fake.spec.quant_min < levels:
            fake.clip_to_least_error(inference_weight(operator, fake).detach())
