"""A prepared graph as it runs over many images: what does not depend on them is computed once.

    prepared   x ── quantize ── Conv(fold(w, BatchNorm) ── round)     the weight anew for each few images
    settled    x ── quantize ── Conv(w as it ships)                   the same values, at once

On the CPU the kernels have their channels innermost, which convolutions make of their results too: oneDNN's own order
of channels has to be turned around before and behind each quantizer. Figures: docs/design.md, D41.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.graph.integer_modules import Settings
from qatkit.graph.nodes import module_of
from qatkit.qat_layers import QATOperator


class _Operator(nn.Module):
    """A Conv or Linear with the weight and bias of now."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, operator: QATOperator) -> None:
        super().__init__()
        with torch.no_grad():
            weight, bias = operator.quantized(*operator.effective())
        self.settings = Settings(operator)
        if weight.ndim == 4 and weight.device.type == "cpu":
            weight = weight.contiguous(memory_format=torch.channels_last)
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.settings(x, self.weight, self.bias)


def settled_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy for inference: each Conv and Linear has what its quantizer, and its BatchNorm, make of its weight now.

    Everything else is shared. It is right as long as nobody trains, loads or moves the original.
    """
    graph = fx.Graph()
    graph.output(cast(Any, graph.graph_copy(graph_module.graph, {})))
    copy = fx.GraphModule(graph_module, graph)
    copy.meta = graph_module.meta
    operators = [n for n in copy.graph.nodes if n.op == "call_module" and isinstance(module_of(n), QATOperator)]
    for number, node in enumerate(operators):
        made = _Operator(cast(QATOperator, module_of(node)))
        node.target = f"settled_{number}"  # of its own: the parents of the old ones may be the original's
        copy.add_module(node.target, made)
    copy.recompile()
    return copy
