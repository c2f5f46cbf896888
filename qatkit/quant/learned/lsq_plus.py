"""LSQ+: scales and zero points of activations that are trained with the weights.

Source: Bhalgat et al., "LSQ+: Improving low-bit quantization through learnable offsets and better initialization",
2020. The offset is (n - z)·s, where n is the smallest integer and z is the zero point. z is rounded to an integer;
the gradient passes straight through this rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qatkit.quant.fake_quantize import Bounds
from qatkit.quant.learned.gradients import learned
from qatkit.quant.learned.lsq import LSQFakeQuantize
from qatkit.quant.observers import Observer
from qatkit.quant.spec import QuantSpec


class LSQPlusFakeQuantize(LSQFakeQuantize):
    """A quantizer of activations with a learned scale and zero point.

    The zero point is not learned where the range is symmetric or begins at zero because of an absorbed
    activation.

    Attributes:
        offset: the real value at which the range should begin, rank 0; None if the zero point is not
            learned, and before fine-tuning.
    """

    offset: nn.Parameter | None

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__(spec, observer, bounds)
        self.register_parameter("offset", None)

    @torch.no_grad()
    def begin(self, weight: Tensor | None = None) -> None:
        fresh = self.step is None
        super().begin()
        if fresh and self.step is not None and not self.spec.symmetric and self.bounds[0] != 0.0:
            self.offset = nn.Parameter((self.spec.quant_min - self.zero_point) * self.step)

    @torch.no_grad()
    def begin_anew(self, weight: Tensor | None = None) -> None:
        super().begin_anew()
        if self.step is not None and self.offset is not None and not self.frozen:
            self.offset.copy_((self.spec.quant_min - self.zero_point) * self.step)

    def follow(self) -> None:
        super().follow()
        if self.offset is not None:
            low, high = self.spec.quant_min, self.spec.quant_max
            self.zero_point.copy_((low - torch.round(self.offset.detach() / self.scale)).clamp(low, high))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.enabled and self.learns and self.offset is not None):
            return super().forward(x)
        assert self.step is not None
        return learned(
            x, self.step, self.scale, self.spec.type_range, self.factor, self.offset, self.zero_point
        )
