"""Where a value of the graph gets its quantization: the FakeQuantize before an operator and the one after it."""

from __future__ import annotations

from typing import Any

from torch import fx

from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.operators import SAME_RANGE, module_of, op_class


def is_quantizer(node: fx.Node) -> bool:
    """Whether `node` is a FakeQuantize."""
    return node.op == "call_module" and isinstance(module_of(node), FakeQuantize)


def quantizer_of(node: Any) -> fx.Node | None:
    """The FakeQuantize node whose range the value of `node` has, looking back through value-moving operators."""
    while isinstance(node, fx.Node):
        if is_quantizer(node):
            return node
        if op_class(node) not in SAME_RANGE:
            return None
        node = node.all_input_nodes[0]
    return None


def quantizer_after(node: fx.Node) -> fx.Node | None:
    """The FakeQuantize that alone reads `node`."""
    after = next(iter(node.users)) if len(node.users) == 1 else None
    return after if after is not None and is_quantizer(after) else None
