"""Where values of the graph get their quantization: the quantizers before an operator, after it, and all by name.

The node of an activation's quantizer holds in its meta, under `QUANTIZES`, the site of the tensor that it quantizes:
the name by which caches, reports and people call the range.
"""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.nodes import facts, module_of
from qatkit.qat_layers import QATOperator

QUANTIZES = "quantizes"


def is_quantizer(node: fx.Node) -> bool:
    """Whether `node` is a FakeQuantize."""
    return node.op == "call_module" and isinstance(module_of(node), FakeQuantize)


def quantizer_of(node: Any) -> fx.Node | None:
    """The FakeQuantize node whose range the value of `node` has, looking back through value-moving operators."""
    while isinstance(node, fx.Node):
        if is_quantizer(node):
            return node
        if not facts(node).keeps_range:
            return None
        node = node.all_input_nodes[0]
    return None


def quantizer_after(node: fx.Node) -> fx.Node | None:
    """The FakeQuantize that alone reads `node`."""
    after = next(iter(node.users)) if len(node.users) == 1 else None
    return after if after is not None and is_quantizer(after) else None


def fake_quantizers(graph_module: fx.GraphModule) -> dict[str, FakeQuantize]:
    """The quantizers of activations by the site of what they quantize, in graph order."""
    return {
        str(node.meta[QUANTIZES]): cast(FakeQuantize, module_of(node))
        for node in graph_module.graph.nodes
        if is_quantizer(node)
    }


def clip_weights(graph_module: fx.GraphModule, most: int = 127) -> None:
    """Ranges of quantized weights with the least squared error, as they are now.

    Args:
        most: of weights whose largest integer is no larger.
    """
    operators = [module for module in graph_module.modules() if isinstance(module, QATOperator)]
    for module, fake in ((one, one.weight_fake_quant) for one in operators):
        if fake is not None and fake.spec.quant_max <= most:
            fake.clip_to_least_error(module.effective()[0])
