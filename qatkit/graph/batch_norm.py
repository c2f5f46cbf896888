"""Re-estimates the statistics of BatchNorms with the quantized network, before the BatchNorms are folded.

In training with quantization, running statistics follow weights that jump between two integers. A frozen BatchNorm has
the statistics of the float model. Both are replaced by means over the batches of a pass with the final ranges and
weights:

    μ = Σ n_b·mean_b / Σ n_b        σ² = Σ n_b·var_b / Σ n_b        batches b of n_b values per channel, var_b unbiased

Source: Nagel et al., "Overcoming oscillations in quantization-aware training", 2022, section 4.3. With equal batches,
`update_bn` of torch.optim.swa_utils computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import inference_weight, quantized_weights
from qatkit.quant.observers.base import of_first_rank
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

_Norm = nn.modules.batchnorm._BatchNorm


class _Sums:
    """The sums that one BatchNorm collects in a pass."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.variance: Tensor | float = 0.0

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Adds one batch to the sums; called as a forward pre-hook."""
        x = given[0].float()
        count, axes = x.numel() // x.shape[1], [axis for axis in range(x.ndim) if axis != 1]
        variance, mean = torch.var_mean(x, axes)
        self.mean, self.variance = self.mean + count * mean, self.variance + count * variance
        self.count += count


def kept_norms(graph_module: nn.Module) -> list[nn.Module]:
    """Returns the BatchNorms of a prepared graph that have running statistics."""
    return [m for m in graph_module.modules() if isinstance(m, _Norm) and m.track_running_stats]


def reestimate(graph_module: fx.GraphModule, batches: Iterable[tuple[Tensor, ...]], *, quantize: bool) -> int:
    """Gives every BatchNorm the statistics of `batches`; returns the number of changed BatchNorms.

    During the pass each BatchNorm normalizes by the statistics of the batch, as in training, and the
    quantized weights stay the same. Their integers stay the same afterwards, too (nearly, if all channels
    share one scale): a learned or fixed scale of a weight that is quantized together with its BatchNorm is
    multiplied by the change of the BatchNorm's factor, or by the median change of all channels if they share
    the scale.

    Args:
        graph_module: a prepared and calibrated graph.
        batches: inputs of the graph, each batch with at least two values per channel.
        quantize: whether values are quantized (False for a float control).
    """
    norms: list[Any] = kept_norms(graph_module)
    sums = [_Sums() for _ in norms]
    hooks = [norm.register_forward_pre_hook(one) for norm, one in zip(norms, sums, strict=True)]
    settings = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    variances = {norm: norm.running_var.clone() for norm in norms}
    standing = {
        fake: fake.whole(inference_weight(operator, fake))
        for _, operator, fake in quantized_weights(graph_module)
        if fake.rounding is not None
    }
    try:
        with inference(graph_module):
            set_phase(graph_module, observe=False, quantize=quantize)
            for norm in norms:
                norm.training, norm.momentum = (
                    True,
                    0.0,
                )  # the running variance must not change, since weights are quantized with it
            for tensors in batches:
                graph_module(*tensors)
    finally:
        for hook, norm, (momentum, counted) in zip(hooks, norms, settings, strict=True):
            hook.remove()
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(counted)
    for norm, found in zip(norms, sums, strict=True):
        if found.count:
            norm.running_mean.copy_(found.mean / found.count)
            norm.running_var.copy_(found.variance / found.count)
    follow(graph_module, variances)
    _hold(graph_module, standing)
    return sum(found.count > 0 for found in sums)


def moving_variances(graph_module: nn.Module) -> dict[nn.Module, Tensor]:
    """Returns the current running variances of the BatchNorms that use batch statistics."""
    norms: list[Any] = [norm for norm in kept_norms(graph_module) if norm.training]
    return {norm: norm.running_var.clone() for norm in norms}


@torch.no_grad()
def follow(graph_module: fx.GraphModule, variances: Mapping[nn.Module, Tensor]) -> None:
    """Multiplies learned and fixed scales of weights by the change of γ/σ.

    If a scale did not follow, clipped weights would make the batch variance smaller. σ would shrink, γ/σ would grow,
    and more and more weights would be clipped.

    Args:
        graph_module: a prepared graph.
        variances: the previous running variances by BatchNorm; other BatchNorms are ignored.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for _, operator, fake in quantized_weights(graph_module):
        norm: Any = getattr(operator, "bn", None)
        scale = fake.fixed_scale if fake.frozen else getattr(fake, "step", None)
        if scale is not None and norm in variances:
            ratio = torch.sqrt((variances[norm] + norm.eps) / (norm.running_var + norm.eps))
            moved[id(scale)] = (
                scale,
                ratio if scale.shape == ratio.shape else ratio.median().view(scale.shape),
            )
    if moved:
        scales, ratios = zip(*moved.values(), strict=True)
        torch._foreach_mul_(scales, of_first_rank(ratios))


@torch.no_grad()
def _hold(graph_module: fx.GraphModule, standing: Mapping[WeightFakeQuantize, Tensor]) -> None:
    """Restores the integers that weights had before their scales changed, if an algorithm chose their rounding.

    The chosen directions (up or down) are not enough: a weight that was an exact multiple of its scale may now lie
    slightly below this multiple, and would be rounded to the next lower one.
    """
    for _, operator, fake in quantized_weights(graph_module):
        if fake in standing and fake.fixed_scale is not None:
            weight = inference_weight(operator, fake)
            below = fake.below(weight, fake.fixed_scale)
            fake.fix(fake.fixed_scale, weight, below + (standing[fake] > below))
