"""Lists which weights of a prepared graph are guarded against saturation on x86 without VNNI, and which are not.

The cost of the guard is computed for each weight (`qatkit.quant.pairs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from qatkit.graph.nodes import is_depthwise, module_of, site
from qatkit.graph.quantizers import inference_weight, quantized_operators, quantizer_of
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


@dataclass(frozen=True)
class Guard:
    """The cost of guarding one operator.

    Attributes:
        raised: fraction of the weight's scales that the guard raises.
        factor: mean factor by which the guard raises the scales, with 1 for those that stay the same.
        lost_db: loss of the weight's SQNR in dB, with rounding to nearest.
    """

    raised: float
    factor: float
    lost_db: float


def guards(graph_module: fx.GraphModule) -> dict[str, Guard]:
    """Returns the cost of the guard for each guarded operator, by site, in graph order."""
    return {
        site(node): _guard(operator, fake)
        for node, operator, fake in quantized_operators(graph_module)
        if fake.spec.guards_pairs
    }


def unguarded(graph_module: fx.GraphModule) -> list[str]:
    """Returns the sites of operators whose sums of two products may saturate in 16 bits.

    Their inputs are uint8, their weights are int8 with the full range and without a guard, and they are not
    depthwise.
    """
    return [
        site(node)
        for node, _, fake in quantized_operators(graph_module)
        if not fake.spec.pairs and fake.spec.may_saturate and adds_in_16_bits(node)
    ]


def adds_in_16_bits(node: fx.Node) -> bool:
    """Returns whether a kernel may add two products in 16 bits: with uint8 activations, unless it is depthwise."""
    source = quantizer_of(node.args[0])
    if source is None or is_depthwise(module_of(node)):
        return False
    return cast(FakeQuantize, module_of(source)).spec.dtype == "uint8"


@torch.no_grad()
def _guard(operator: QATOperator, fake: WeightFakeQuantize) -> Guard:
    weight = inference_weight(operator, fake).detach()
    own = numerics.weight_scale(weight, replace(fake.spec, pairs=False))
    scale = numerics.weight_scale(weight, fake.spec)
    errors = []
    for one in (scale, own):
        column = fake.spec.granularity.spread(one, weight.shape)
        error = torch.round(weight / column) * column - weight
        errors.append(float(error.double().square().sum()))
    lost = 10 * float(torch.log10(torch.tensor(errors[0] / errors[1]))) if min(errors) > 0 else 0.0
    factors = scale / own
    return Guard(float((factors > 1).float().mean()), float(factors.mean()), lost)
