"""Copies ranges and corrections to another prepared graph of the same model, in which other operators stay float."""

from __future__ import annotations

import torch
from torch import fx

from qatkit.quant.fake_quantize import Quantizer
from qatkit.quant.qat_layers import QATOperator


@torch.no_grad()
def transplant(source: fx.GraphModule, target: fx.GraphModule) -> list[str]:
    """Copies state by name from one graph into another; returns the names of quantizers that only `target` has.

    An operator that is float in `target` gets its float bias, without the correction for quantization.
    """
    state = dict(source.state_dict())
    operators = dict(target.named_modules())
    for name, operator in source.named_modules():
        fake = operator.weight_fake_quant if isinstance(operator, QATOperator) else None
        shift = None if fake is None else fake.bias_shift
        if shift is not None and getattr(operators[name], "weight_fake_quant", None) is None:
            state[f"{name}.bias"] = state[f"{name}.bias"] - shift
    of = {name.rpartition(".")[0] for name in target.state_dict()} | set(_quantizers(target))
    kept = {name: value for name, value in state.items() if name.rpartition(".")[0] in of}
    missing = target.load_state_dict(kept, strict=False).missing_keys
    new = sorted(set(_quantizers(target)) - set(_quantizers(source)))
    assert all(name.startswith(tuple(new)) for name in missing), missing
    return new


def _quantizers(graph: fx.GraphModule) -> list[str]:
    return [name for name, one in graph.named_modules() if isinstance(one, Quantizer)]
