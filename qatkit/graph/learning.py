"""Training of learned quantizers in a whole graph.

Learned quantizers are initialized before the optimizer is made. A weight that several operators quantize in the same
way has one scale. Oscillations of weights are counted after each step.
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
    """Initializes learned quantizers from calibration; a quantizer that already learns continues.

    Scales of the model's inputs, and of values that are computed from them without parameters, stay as
    calibrated. To train them, the first operator would have to compute the gradient of its input, which takes
    a tenth of a CNN's step (docs/decisions/0031-learned-quantizers.md).
    """
    for node in _untouched(graph_module):
        quantizer = module_of(node)
        if isinstance(quantizer, LearnedFakeQuantize):
            quantizer.rests = True
    for quantizer in fake_quantizers(graph_module).values():
        quantizer.begin()
    shared: dict[object, WeightFakeQuantize] = {}
    for _, operator, fake in quantized_weights(graph_module):
        norm = getattr(
            operator, "bn", None
        )  # the BatchNorm multiplies the quantized weight, so another BatchNorm means another weight
        first = shared.setdefault((identity_of(operator, weight_name(operator, fake)), norm, fake.spec), fake)
        fake.begin(inference_weight(operator, fake).detach())
        fake.share(first)


def begin_anew(graph_module: fx.GraphModule) -> None:
    """Initializes learned quantizers from the current ranges and weights.

    It is called before each step until the quantizers are turned on.
    """
    for quantizer in fake_quantizers(graph_module).values():
        quantizer.begin_anew()
    for _, operator, fake in quantized_weights(graph_module):
        fake.begin_anew(inference_weight(operator, fake).detach())


def idle(graph_module: fx.GraphModule) -> str:
    """Returns a note if the learned quantizers have nothing to learn in this model; "" otherwise."""
    quantizers = [q for q in graph_module.modules() if isinstance(q, Quantizer)]
    kinds = {type(q) for q in quantizers if isinstance(q, LearnedFakeQuantize)}
    if not kinds or any(True for q in quantizers for _ in q.parameters(recurse=False)):
        return ""
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    limits = "".join(sorted(f"; {kind.limits}" for kind in kinds if kind.limits))
    learn = "learns" if len(kinds) == 1 else "learn"
    return f"{names} {learn} no range of this model, which trains as with quantizer=fake_quantize{limits}"


def _untouched(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes of quantizers of activations that depend on no parameter."""
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
    """Returns the quantizers of activations whose scales are trained."""
    return [q for q in fake_quantizers(graph_module).values() if q.learns]


def resting(graph_module: fx.GraphModule) -> list[nn.Parameter]:
    """Returns the quantizers' parameters that are not trained in the graph's current phase."""
    found = [q for q in graph_module.modules() if isinstance(q, Quantizer) and not (q.enabled and q.learns)]
    return [parameter for quantizer in found for parameter in quantizer.parameters(recurse=False)]


def follow_oscillation(graph_module: fx.GraphModule) -> None:
    """Starts to track changes of the integers of every quantized weight."""
    for _, operator, fake in quantized_weights(graph_module):
        weight = inference_weight(operator, fake).detach()
        fake.oscillation = Oscillation(weight, fake.spec.counted)


def update_oscillation(graph_module: fx.GraphModule, threshold: float | None) -> None:
    """Updates the oscillation counts after an optimizer step, and freezes weights that oscillate too often.

    A weight with a learned scale is not frozen while the operator's BatchNorm uses batch statistics. Frozen integers
    with a trained scale would no longer follow the running variance, which would then grow or shrink by a constant
    fraction at every step.

    Args:
        graph_module: a prepared graph.
        threshold: the frequency of oscillation above which a weight is frozen; None freezes no weight.
    """
    for _, operator, fake in quantized_weights(graph_module):
        if fake.oscillation is not None:
            norm = getattr(operator, "bn", None)
            waits = fake.learns and norm is not None and norm.training
            with torch.no_grad():
                integers = fake.whole(inference_weight(operator, fake))
                fake.oscillation.update(integers, None if waits else threshold)


def dampening(graph_module: fx.GraphModule) -> Tensor:
    """Returns the loss term [] that pulls weights towards their quantized values, summed over the graph."""
    terms = [
        fake.dampening(inference_weight(operator, fake))
        for _, operator, fake in quantized_weights(graph_module)
    ]
    return torch.stack(terms).sum()


def oscillating(graph_module: fx.GraphModule) -> list[Oscillating]:
    """Returns the oscillation counts of the operators; empty if none are tracked."""
    found = quantized_weights(graph_module)
    return [fake.oscillation.counted(path) for path, _, fake in found if fake.oscillation is not None]
