"""Training through quantizers, in a whole graph: those that learn begin before there is an optimizer, one weight
quantized in one way has one scale; oscillating weights are followed step by step.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from qatkit.graph.nodes import module_of
from qatkit.graph.quantizers import (
    fake_quantizers,
    inference_weight,
    is_quantizer,
    quantized_weights,
    weight_name,
)
from qatkit.quant.computed_weights import identity_of
from qatkit.quant.fake_quantize import FakeQuantize, Quantizer
from qatkit.quant.learned.lsq import LearnedFakeQuantize
from qatkit.quant.learned.oscillation import Oscillating, Oscillation
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


def begin(graph_module: fx.GraphModule) -> None:
    """What is learned starts from calibration, once: a quantizer that learns already goes on.

    Scales of what comes in from outside stay as calibrated: for their gradient alone the first operator would have to
    make that of its input, which is a tenth of a CNN's step (docs/decisions/0031-learned-quantizers.md).
    """
    for node in _untouched(graph_module):
        quantizer = module_of(node)
        if isinstance(quantizer, LearnedFakeQuantize):
            quantizer.rests = True
    for quantizer in fake_quantizers(graph_module).values():
        quantizer.begin()
    shared: dict[object, WeightFakeQuantize] = {}
    for _, operator, fake in quantized_weights(graph_module):
        norm = getattr(operator, "bn", None)  # multiplies what is quantized: another one, another weight
        first = shared.setdefault((identity_of(operator, weight_name(operator, fake)), norm, fake.spec), fake)
        fake.begin(inference_weight(operator, fake).detach())
        fake.share(first)


def begin_anew(graph_module: fx.GraphModule) -> None:
    """While nothing is quantized yet, before each step: what is learned starts from the ranges and weights of now."""
    for quantizer in fake_quantizers(graph_module).values():
        quantizer.begin_anew()
    for _, operator, fake in quantized_weights(graph_module):
        fake.begin_anew(inference_weight(operator, fake).detach())


def idle(graph_module: fx.GraphModule) -> str:
    """What there is to say of learned quantizers, where not one of them has anything to learn; else ""."""
    quantizers = [q for q in graph_module.modules() if isinstance(q, Quantizer)]
    kinds = {type(q) for q in quantizers if isinstance(q, LearnedFakeQuantize)}
    if not kinds or any(True for q in quantizers for _ in q.parameters(recurse=False)):
        return ""
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    limits = "".join(sorted(f"; {kind.limits}" for kind in kinds if kind.limits))
    return f"{names} learns no range of this model, which trains as with quantizer=fake_quantize{limits}"


def _untouched(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The quantizers of activations whose values no parameter has had a part in."""
    touched: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        own = node.op == "get_attr" or (
            node.op == "call_module"
            and not is_quantizer(node)
            and any(True for _ in module_of(node).parameters())
        )
        if own or not touched.isdisjoint(node.all_input_nodes):
            touched.add(node)
    return [node for node in graph_module.graph.nodes if is_quantizer(node) and node not in touched]


def learners(graph_module: fx.GraphModule) -> list[FakeQuantize]:
    """The quantizers of activations whose scales move with every step of the training."""
    return [q for q in fake_quantizers(graph_module).values() if q.learns]


def resting(graph_module: fx.GraphModule) -> list[nn.Parameter]:
    """What quantizers learn, but not in the phase that the graph is in."""
    found = [q for q in graph_module.modules() if isinstance(q, Quantizer) and not (q.enabled and q.learns)]
    return [parameter for quantizer in found for parameter in quantizer.parameters(recurse=False)]


def follow_oscillation(graph_module: fx.GraphModule) -> None:
    """From now on the integers of every quantized weight are followed."""
    for _, operator, fake in quantized_weights(graph_module):
        weight = inference_weight(operator, fake).detach()
        fake.oscillation = Oscillation(weight, fake.spec.counted)


def update_oscillation(graph_module: fx.GraphModule, threshold: float | None) -> None:
    """After an optimizer step, and before the next one: counts, and freezes above `threshold` (None: nothing).

    Beside a learned scale nothing is frozen while the operator's BatchNorm still takes its batches' statistics:
    integers that stand, times a scale of their own, no longer follow the running variance, which would then grow or
    shrink by a share of itself at every step.
    """
    for _, operator, fake in quantized_weights(graph_module):
        if fake.oscillation is not None:
            norm = getattr(operator, "bn", None)
            waits = fake.learns and norm is not None and norm.training
            with torch.no_grad():
                integers = fake.whole(inference_weight(operator, fake))
                fake.oscillation.update(integers, None if waits else threshold)


def dampening(graph_module: fx.GraphModule) -> Tensor:
    """What pulls every weight towards the middle of its step, summed over the graph; rank 0."""
    terms = [
        fake.dampening(inference_weight(operator, fake))
        for _, operator, fake in quantized_weights(graph_module)
    ]
    return torch.stack(terms).sum()


def oscillating(graph_module: fx.GraphModule) -> list[Oscillating]:
    """What was counted, operator by operator; empty where nothing was followed."""
    found = quantized_weights(graph_module)
    return [fake.oscillation.counted(path) for path, _, fake in found if fake.oscillation is not None]
