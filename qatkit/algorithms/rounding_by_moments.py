"""Rounds each weight by the moments of its operator's inputs (`qatkit.algorithms.moment_rounding`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from qatkit.algorithms import biases
from qatkit.algorithms.batches import first_images
from qatkit.algorithms.bias_errors import targets
from qatkit.algorithms.input_moments import Moments, input_moments
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import sorted_out
from qatkit.graph.signature import Example
from qatkit.quant.granularity import PerBlock
from qatkit.quant.numerics import Ends, clamped
from qatkit.quant.qat_layers import QATOperator

if TYPE_CHECKING:
    from qatkit.algorithms.moment_rounding import MomentRounding

# Number of weights whose moves are applied to the rest of a row together; the rounds end if no more than this
# share of the weights moved.
_BLOCK, _FEW = 64, 1e-4


def round_weights(
    settings: MomentRounding, graph_module: fx.GraphModule, inputs: Iterable[Example]
) -> PassResult:
    """Rounds the weights of every operator up or down: implements `MomentRounding.__call__`."""
    chosen, skipped = roundable(graph_module)
    free = set(targets(graph_module)[0].values())
    with inference(graph_module):
        biases.restore(graph_module)
        set_phase(graph_module, observe=False, quantize=False)
        images = list(first_images(graph_module, inputs, settings.images))
        for operator, moments in input_moments(graph_module, list(chosen.values()), images):
            _round(settings, operator, moments, shift=operator in free)
    set_phase(graph_module, observe=False, quantize=True)
    return PassResult(graph_module, len(chosen), skipped)


def _round(settings: MomentRounding, operator: QATOperator, blocks: list[Moments], *, shift: bool) -> None:
    fake, weight = operator.weight_fake_quant, operator.effective()[0].detach()
    assert fake is not None
    scale = fake.scale(weight)
    groups = len(blocks[0].total)
    spread = fake.spec.granularity.spread(scale, weight.shape)
    steps = (weight / spread).reshape(groups, len(weight) // groups, -1)
    sizes, up = [b.total.shape[1] for b in blocks], list[Tensor]()
    ends = zip(*(_parts(end, weight, steps, sizes) for end in fake.ends(weight)), strict=True)
    for part, own, block in zip(steps.split(sizes, 2), ends, blocks, strict=True):
        form = block.covariance if shift else block.second / block.count
        spread = form.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
        form = form + torch.diag_embed((settings.damping * spread).expand(-1, form.shape[1]))
        up.append(best_rounding(part, form, own, settings.rounds))
    fake.fix(scale, weight, fake.below(weight, scale) + torch.cat(up, 2).reshape(weight.shape))
    if shift and operator.bias is not None:
        errors = (fake.whole(weight).reshape(steps.shape) - steps).split(sizes, 2)
        means = [(one @ block.mean[:, :, None])[..., 0] for one, block in zip(errors, blocks, strict=True)]
        biases.change(operator, operator.bias - torch.stack(means).sum(0).flatten() * scale)


def _parts(end: int | Tensor, weight: Tensor, steps: Tensor, sizes: list[int]) -> Sequence[int | Tensor]:
    """Returns an end of the weight's range (the lowest or highest integer) for each part of the split steps."""
    if not isinstance(end, Tensor):
        return [end] * len(sizes)
    parts: tuple[Tensor, ...] = end.expand_as(weight).reshape_as(steps).split(sizes, 2)
    return parts


def best_rounding(steps: Tensor, form: Tensor, ends: Ends, rounds: int) -> Tensor:
    """Returns which weights to round up so that e·form·e is small, e being the rounding error.

    The search ends when hardly any single change makes it smaller, or after `rounds`.

    Args:
        steps: the weights in steps of their scale, [groups, rows, inputs].
        form: the quadratic form, [groups, inputs, inputs], symmetric and positive.
        ends: the smallest and the largest integer, broadcastable to `steps`.
        rounds: the largest number of visits to each weight.

    Returns:
        bool, in the shape of `steps`.
    """
    down = clamped(steps.floor(), ends)
    free = (down < ends[1]) & (steps > ends[0])
    up = (steps - down > 0.5) & free
    slope = (down + up - steps) @ form
    own = form.diagonal(dim1=1, dim2=2)[:, None] / 2
    step = torch.where(free, 1.0 - 2.0 * up, 0.0)  # the move available to each weight
    for _ in range(rounds):
        moves = 0
        for start in range(0, steps.shape[2], _BLOCK):
            here = slice(start, start + _BLOCK)
            moved = _descend(step[..., here], slope[..., here], form[:, here, here], own[..., here])
            moves += (count := int(moved.count_nonzero()))
            if count:
                slope += moved @ form[:, here]
                step[..., here] -= 2 * moved
                up[..., here] ^= moved != 0
        if moves <= _FEW * steps.numel():
            break
    return up


def _descend(step: Tensor, slope: Tensor, form: Tensor, own: Tensor) -> Tensor:
    """Returns the moves [groups, rows, inputs of a block] of one visit to each weight in turn; 0: it does not move."""
    near, moved = slope.clone(), torch.zeros_like(step)
    for i in range(step.shape[2]):
        one = step[..., i]
        moved[..., i] = move = torch.where(one * near[..., i] + own[..., i] < 0, one, 0.0)
        near[..., i + 1 :].addcmul_(move[..., None], form[:, None, i, i + 1 :])
    return moved


def roundable(graph_module: fx.GraphModule) -> tuple[dict[str, QATOperator], list[tuple[str, str]]]:
    """Returns the operators whose rounding can be chosen, by site, and (site, reason) of all other quantized ones."""
    return sorted_out(graph_module, _why_not)


def _why_not(operator: QATOperator, reads: Counter[int]) -> str | None:
    if any(reads[id(p)] > 1 for p in operator.parameters() if p.ndim > 1):
        return "rounded to nearest: several calls share its weight"
    fake = operator.weight_fake_quant
    if fake is not None and isinstance(fake.spec.granularity, PerBlock):
        return "rounded to nearest: it has scales in blocks (algorithm=gptq supports them)"
    return "rounding not changed: it was chosen before" if fake is not None and fake.frozen else None
