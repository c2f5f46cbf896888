"""Biases that corrections change, and the float model's own: each correction starts from these, so that one that comes
after another takes its place and is not added to it.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qatkit.qat_layers import QATOperator

_FLOAT = "float_biases"


@torch.no_grad()
def change(graph_module: fx.GraphModule, operator: QATOperator, bias: Tensor) -> None:
    """Gives an operator of the graph another bias [out]; the float one is kept."""
    assert operator.bias is not None
    name = next(name for name, value in graph_module.named_parameters() if value is operator.bias)
    graph_module.meta.setdefault(_FLOAT, {}).setdefault(name, operator.bias.detach().clone())
    operator.bias.copy_(bias)


@torch.no_grad()
def restore(graph_module: fx.GraphModule) -> None:
    """The float model's biases again."""
    for name, bias in graph_module.meta.pop(_FLOAT, {}).items():
        graph_module.get_parameter(name).copy_(bias)
