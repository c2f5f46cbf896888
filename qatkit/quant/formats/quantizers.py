"""Quantizers of number formats that are not integers: values are rounded to the format in float32.

Block scales are computed from the current values, in training as in inference. A scale of the tensor is computed
from the activation's observed range, or from the current weight. The gradient is straight-through, but 0 for
values at least half a step beyond the largest number, which saturate. Biases are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.formats.blocks import largest_finite, rounded_by, scales, tensor_scale
from qatkit.quant.formats.table import Format
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Integers, WeightFakeQuantize


class _Round(torch.autograd.Function):
    """`rounded_by` with a straight-through gradient; it keeps one byte per value for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, spec: QuantSpec) -> Tensor:
        found, inside = rounded_by(x, _form(spec), spec.granularity, scale)
        ctx.save_for_backward(inside)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None


def round_to_format(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns `x` rounded to the format of `spec`, with a gradient; `scale` [] is the scale of the tensor."""
    return _by(x, scales(x.float(), _form(spec), spec.granularity, scale), spec)


def _by(x: Tensor, scale: Tensor | None, spec: QuantSpec) -> Tensor:
    found: Tensor = _Round.apply(x.float(), scale, spec)  # type: ignore[no-untyped-call]
    return found.to(x.dtype)


def _form(spec: QuantSpec) -> Format:
    if spec.form is None:
        raise ValueError(f"dtype={spec.dtype}: expected a name in qatkit.quant.formats.table.FORMATS")
    return spec.form


class FormatFakeQuantize(FakeQuantize):
    """Fake quantization of an activation to a number format; `scale` is the tensor's scale, or 1 without one."""

    def qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        form, largest = _form(self.spec), torch.maximum(-low, high).float()
        scale = tensor_scale(largest, form) if form.has_tensor_scale else torch.ones_like(largest)
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    def follow_range(self, low: Tensor, high: Tensor) -> None:
        self.scale.copy_(torch.where(low <= high, self.qparams(low, high)[0], self.scale))

    def shipped(self) -> tuple[Tensor, Tensor]:
        return self.scale.detach().clone(), self.zero_point.detach().clone()

    def range_record(self) -> dict[str, float | int | str]:
        """Returns a record with the observed or fixed range, since each block represents another range."""
        low, high = (
            self.bounds if self.observer is None else (self.observer.low.item(), self.observer.high.item())
        )
        return {"low": low or 0.0, "high": high or 0.0, "scale": self.scale.item(), "zero_point": 0,
                "dtype": self.spec.dtype}  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            self.observe(x)
        x = self.clamp_bounds(x)
        return round_to_format(x, self.scale, self.spec) if self.enabled else x


class FormatWeightFakeQuantize(WeightFakeQuantize):
    """Fake quantization of a weight to a number format; there are no integers and no zero points.

    Attributes:
        rounding: the values that an algorithm adds to the weight before rounding to the nearest, in the
            weight's shape. They stay the same while the weight is trained. None: nothing is added.
    """

    def __init__(self, spec: QuantSpec, shape: Sequence[int]) -> None:
        super().__init__(spec, shape)
        self.clip = torch.ones(())  # only the format clips

    @property
    def by_rows(self) -> bool:
        return False

    def clip_to_least_error(self, weight: Tensor) -> None:
        """Does nothing: the definition of a format gives its scales."""

    @torch.no_grad()
    def tensor_scale(self, weight: Tensor) -> Tensor:
        """Returns the scale [] of the tensor, or 1 if its format has none."""
        form = _form(self.spec)
        return tensor_scale(largest_finite(weight), form) if form.has_tensor_scale else weight.new_ones(())

    @torch.no_grad()
    def scale(self, weight: Tensor) -> Tensor:
        """Returns the factors of the elements, in the granularity's shape; 1 if the format has no scale."""
        if self.fixed_scale is not None:
            return self.fixed_scale
        given = weight.float(), _form(self.spec), self.spec.granularity, self.tensor_scale(weight)
        found = scales(*given)
        return weight.new_ones(()) if found is None else found

    @torch.no_grad()
    def fix_values(self, weight: Tensor, values: Tensor, scale: Tensor) -> None:
        """Freezes the scales and the values that a weight is rounded to.

        Args:
            weight: the weight as inference uses it.
            values: numbers of the format with these scales, in the weight's shape.
            scale: scales as `scale` returns them.
        """
        self.fixed_scale = scale.detach().clone()
        self.rounding = (values - weight).detach().clone()

    def rounded(self, weight: Tensor, scale: Tensor) -> Tensor:
        return _by(weight if self.rounding is None else weight + self.rounding, scale, self.spec)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.enabled:
            return self.rounded(weight, self.scale(weight)), bias
        return weight, bias if bias is None or self.bias_shift is None else bias - self.bias_shift

    def integers(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor) -> Integers:
        raise TypeError(f"dtype={self.spec.dtype}: a number format has no integers")
