"""An exponential moving average of the weights during training, exported instead of the last weights.

    after step t:  average ← d·average + (1 - d)·weights,   d = min(decay, (1 + t) / (10 + t))

Without the rising d, the average of a short run would be close to the initial weights. The average covers the
trained parameters (including learned scales), the statistics of BatchNorms, and the fixed scales of weights, which
follow their BatchNorms in training. Ranges stay as observed. d is a function of the step, so a resumed run needs only
the average.

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the rising d is that of
TensorFlow's `tf.train.ExponentialMovingAverage(num_updates=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

_RISE = 10


def decay_at(step: int, decay: float) -> float:
    """Returns the decay d after the optimizer step number `step`, counted from 1."""
    return min(decay, (1 + step) / (_RISE + step))


class WeightAverage:
    """The average of a module's weights.

    Args:
        module: the module, on its training device. Its tensors are looked up at every call, because a move to
            another device or memory format between calls replaces them.
        decay: the decay, at least 0 and below 1.
        stored: `state` of an earlier average to continue; for None, and for tensors that it lacks, the average
            starts from the current weights.

    Attributes:
        decay: the decay.
        state: the averages by the name of the tensor.
    """

    def __init__(self, module: nn.Module, decay: float, stored: Mapping[str, Tensor] | None = None) -> None:
        self.decay = decay
        self._module = module
        live = averaged(module)
        values = {**live, **(stored or {})}
        self.state = {name: values[name].detach().to(one, copy=True) for name, one in live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after the optimizer step number `step`, counted from 1, to the average."""
        share = 1 - decay_at(step, self.decay)
        live = averaged(self._module)
        torch._foreach_lerp_(list(self.state.values()), [live[name] for name in self.state], share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the weights and the average, so that the module computes with the average."""
        found, state = averaged(self._module), list(self.state.values())
        live = [found[name] for name in self.state]
        kept = [one.clone() for one in live]
        torch._foreach_copy_(live, state)
        torch._foreach_copy_(state, kept)


def averaged(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module that are averaged, by name; they share its memory."""
    found = {name: one.detach() for name, one in module.named_parameters() if one.requires_grad}
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            found |= {name: one for name, one in part.named_buffers(path) if one.is_floating_point()}
        elif isinstance(part, WeightFakeQuantize) and part.fixed_scale is not None:
            found[f"{path}.fixed_scale"] = part.fixed_scale
    return found
