"""Changes the biases of quantized operators, and restores them.

The change applies only while quantization is on; with quantization off, the prepared graph computes the float
function. Each correction starts from the float bias, so a later one replaces an earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qatkit.quant.qat_layers import QATOperator


@torch.no_grad()
def change(operator: QATOperator, bias: Tensor) -> None:
    """Sets the bias [out] of a quantized operator, and records the difference from the float bias."""
    fake = operator.weight_fake_quant
    assert operator.bias is not None and fake is not None
    before = operator.bias if fake.bias_shift is None else operator.bias - fake.bias_shift
    fake.bias_shift = (bias - before).detach().to(before.dtype)
    operator.bias.copy_(bias)


@torch.no_grad()
def restore(graph_module: fx.GraphModule) -> None:
    """Restores the float model's biases."""
    for operator in graph_module.modules():
        if not isinstance(operator, QATOperator) or operator.bias is None:
            continue
        fake = operator.weight_fake_quant
        if fake is not None and fake.bias_shift is not None:
            operator.bias -= fake.bias_shift
            fake.bias_shift = None
