"""LSQ: scales that are trained with the weights.

Source: Esser et al., "Learned step size quantization", 2020. Scales start from calibration rather than from
2·E|v|/√p. The gradient of a scale is multiplied by 1/√(N·p), where p is the largest integer. N is the number
of weights that share the scale. For an activation, it is the number of values for one image, so that the
gradients of parts of a batch add up to the gradient of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qatkit.quant import numerics
from qatkit.quant.fake_quantize import Bounds, FakeQuantize, Quantizer
from qatkit.quant.learned.gradients import learned, learned_weight
from qatkit.quant.observers import Observer
from qatkit.quant.scale_types import nearest
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

_EMPTY = 1e-6  # relative to the largest channel's scale: below it a channel counts as empty


class LearnedFakeQuantize(FakeQuantize):
    """The base class of learned quantizers of activations: a parameter `step` that starts from calibration.

    A range that is fixed (a sigmoid's 0..1) or was given (`fix`) is not learned. Neither is a range of only
    zeros: a branch that begins at zero has a range that follows its values. If an activation with a largest
    value (ReLU6) was absorbed, the learned range does not exceed this value.

    Attributes:
        step: the learned parameter, `unit` times the scale before alignment, rank 0; None before fine-tuning.
        rests: whether the scale stays as calibrated instead of being learned.
        limits: the text for reports about ranges that are not learned; "" if there are none.
    """

    step: nn.Parameter | None
    scale_types = ("float", "float16", "int16")  # a step moves a scale by less than a factor of two
    rests = False
    _stale = False  # whether the zero point may have moved
    limits: ClassVar[str] = ""

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__(spec, observer, bounds)
        self.register_parameter("step", None)
        self._zero = 0  # the zero point as a plain int, where it is not learned

    @property
    def learns(self) -> bool:
        return self.step is not None and not self.frozen

    @property
    def movable(self) -> bool:
        return self.learns or super().movable

    @property
    def factor(self) -> float:
        """The factor 1/√(N·p) of the gradients of the learned parameters."""
        return 1 / math.sqrt(self.features * self.spec.quant_max)

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        super().set_phase(observe=observe, quantize=quantize, calibrating=calibrating)
        self.observing = self.observing and (calibrating or not (self.rests or (self.learns and quantize)))
        if quantize and self._stale:
            self._ready()

    @torch.no_grad()
    def begin(self, weight: Tensor | None = None) -> None:
        super().begin()
        if self.step is None and self.movable and not self.rests and self.learnable and not self._is_empty:
            self.settle()
            self.step = nn.Parameter(self.scale * self.unit)
            self._ready()

    @torch.no_grad()
    def begin_anew(self, weight: Tensor | None = None) -> None:
        if self.step is not None and not self.frozen:
            super().follow()
            self.step.copy_(self.scale * self.unit)
            self._stale = True

    @property
    def learnable(self) -> bool:
        """Returns whether this quantizer can learn its range."""
        return True

    def _ready(self) -> None:
        self._zero, self._stale = int(self.zero_point), False

    @property
    def unit(self) -> float:
        """The ratio of `step` to the scale."""
        return 1.0

    @torch.no_grad()
    def follow(self) -> None:
        if self.step is None:
            return super().follow()
        self.step.clamp_(numerics.MIN_SCALE * self.unit, self._largest * self.unit)
        self.scale.copy_(nearest(self.step / self.unit, self.spec))
        return None

    @property
    def _largest(self) -> float:
        high, steps = self.bounds[1], self.spec.quant_max - self._zero
        return high / steps if high is not None and high > 0 and steps > 0 else math.inf

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _make_room(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ready()


class LSQFakeQuantize(LearnedFakeQuantize):
    """A quantizer of activations with a learned scale; the zero point stays as calibrated."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.enabled and self.learns):
            return super().forward(x)
        low, high = (end - self._zero for end in self.spec.type_range)
        assert self.step is not None
        return learned(x, self.step, self.scale, (low, high), self.factor)


class LSQWeightFakeQuantize(WeightFakeQuantize):
    """A quantizer of weights with learned scales.

    Attributes:
        step: the learned scales, before alignment; None before fine-tuning.
        empty: bool, in the shape of `step`, true where the scale follows the weights instead. These weights
            were zero, or tiny next to the largest, when fine-tuning began (an untrained head, a pruned channel,
            a BatchNorm whose γ is 0), so there was no scale to start from. A tiny scale would clip all later
            weights, another channel's scale would round them to 0, and neither has a gradient. None if there are
            no such weights.
    """

    _optional: ClassVar[tuple[str, ...]] = (*WeightFakeQuantize._optional, "empty")
    takes_zero_points = False
    scale_types = LearnedFakeQuantize.scale_types
    step: nn.Parameter | None
    empty: Tensor | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int]) -> None:
        super().__init__(spec, shape)
        self.register_parameter("step", None)

    @torch.no_grad()
    def begin(self, weight: Tensor | None = None) -> None:
        if self.step is None and not self.frozen and weight is not None:
            scale = self.wanted_scale(weight)
            empty = scale <= (_EMPTY * scale.amax()).clamp(min=numerics.MIN_SCALE)
            self.empty = empty if bool(empty.any()) else None
            self.step = nn.Parameter(scale)

    @torch.no_grad()
    def begin_anew(self, weight: Tensor | None = None) -> None:
        if self.step is not None and not self.frozen and weight is not None:
            self.step.copy_(super().wanted_scale(weight))

    @property
    def learns(self) -> bool:
        return self.step is not None and not self.frozen

    def share(self, other: WeightFakeQuantize) -> None:
        if isinstance(other, LSQWeightFakeQuantize) and self.learns and other.learns:
            self.step, self.empty = other.step, other.empty

    def wanted_scale(self, weight: Tensor) -> Tensor:
        if self.step is None:
            return super().wanted_scale(weight)
        scale = self.step.detach().clamp(min=numerics.MIN_SCALE)
        scale = numerics.guarded_scale(scale, weight, self.spec)
        return scale if self.empty is None else torch.where(self.empty, super().wanted_scale(weight), scale)

    @torch.no_grad()
    def times(self, weight: Tensor, factors: Tensor) -> Tensor:
        if self.learns:
            self.fix(self.scale(weight))
        return super().times(weight, factors)

    def rounded(self, weight: Tensor, scale: Tensor) -> Tensor:
        if self.step is None or self.frozen:
            return super().rounded(weight, scale)
        ends = self.spec.quant_min, self.spec.quant_max
        granularity = self.spec.granularity
        made = learned_weight(weight, self.step, scale, ends, granularity, self._factor(weight))
        if self.empty is None:
            return made
        empty = granularity.spread(self.empty, weight.shape)
        return torch.where(empty, super().rounded(weight, scale), made)

    def trained(self, scale: Tensor, weight: Tensor) -> Tensor:
        if self.step is None or self.frozen:
            return scale
        scaled = self.step * self._factor(weight)
        return scale + (scaled - scaled.detach())

    def _factor(self, weight: Tensor) -> float:
        return math.sqrt(self.clip.numel() / (weight.numel() * self.spec.quant_max))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _make_room(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _make_room(quantizer: Quantizer, state_dict: dict[str, Any], prefix: str) -> None:
    """Creates the parameters of a checkpoint unless they exist in the same shape, and removes others.

    Existing parameters are kept, since quantizers may share them.
    """
    for name, known in quantizer._parameters.items():
        stored = state_dict.get(prefix + name)
        if stored is None:
            quantizer._parameters[name] = None
        elif known is None or known.shape != stored.shape:
            device = next(quantizer.buffers()).device
            quantizer._parameters[name] = nn.Parameter(torch.empty_like(stored, device=device))
