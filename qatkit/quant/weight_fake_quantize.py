"""The quantizer of a weight and its bias, and the factories with which `prepare_qat` creates all quantizers.

The scale follows the largest values and weights are rounded to the nearest, unless an algorithm has set scale
and rounding (`WeightFakeQuantize.fix`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qatkit.quant import numerics, scale_types
from qatkit.quant.backends import Shifts
from qatkit.quant.bias_types import rounded_bias, whole_bias
from qatkit.quant.fake_quantize import Bounds, FakeQuantize
from qatkit.quant.granularity import PerBlock, PerChannel, along
from qatkit.quant.held_scales import avoid_overflow, held
from qatkit.quant.observers import MovingAverageMinMaxObserver, Observer
from qatkit.quant.pairs import fitted
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_quantizer_state import WeightQuantizerState, floor
from qatkit_verify.errors import ConfigError


@dataclass(frozen=True)
class Integers:
    """The integers of a weight and its bias, as exported.

    Attributes:
        weight: the integers of the weight, of the quantized type, in the weight's shape.
        scale: the scales, in the granularity's shape, or [out] if a per-tensor scale was raised for some
            channels.
        zero_point: the zero points, in the scale's shape and of the weight's type; 0 for a symmetric spec of
            a signed type.
        bias: the bias [out] in steps of `bias_scale`, whole numbers in float64; None without a bias.
        bias_scale: input scale times `scale` times the multiplier.
        bias_multiplier: the multiplier, whole numbers in float64, in the shape of `scale`; always 1 unless
            biases have 8 or 16 bits.
        repaired: number of channels whose scale was raised so that the bias fits int32.
        lost: the largest error of a result in these channels relative to the bias, if every input value is one
            step of the input's scale; 0 without such channels.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None
    bias_scale: Tensor
    bias_multiplier: Tensor
    repaired: int
    lost: float


class WeightFakeQuantize(WeightQuantizerState):
    """Fake quantization of a weight; scale and zero point follow the weight's range at each step.

    The bias is quantized with it, as it will be in the file (`qatkit.quant.bias_types`). Methods count integers
    from the zero point, so that their product with the scale is the weight; only `integers` returns them with the
    zero point added, as in the file.

    Args:
        spec: spec of the weight. With a symmetric spec of a signed type, the zero point is 0, which most of ONNX
            Runtime's kernels prefer.
        shape: shape of the weight; its first axis holds the output channels.

    Attributes:
        takes_zero_points: whether the class supports weights with zero points.

    `WeightQuantizerState` documents the other attributes.

    Raises:
        ConfigError: this class cannot quantize a weight by `spec`.
    """

    takes_zero_points: ClassVar[bool] = True

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        """Raises a ConfigError if this class cannot quantize a weight by `spec`."""
        if spec.has_zero_point and not cls.takes_zero_points:
            known = f"{WeightFakeQuantize.__module__}.{WeightFakeQuantize.__qualname__}"
            allowed = f"a quantizer that supports weights with zero points, such as {known}"
            raise ConfigError("quantizer.weight", f"{cls.__module__}.{cls.__qualname__}", allowed)

    def __init__(self, spec: QuantSpec, shape: Sequence[int]) -> None:
        self.check(spec)
        super().__init__(spec, shape)
        self._edges: tuple[FakeQuantize | None, FakeQuantize | None] = (None, None)
        self._shifts: Shifts | None = None

    def between(
        self,
        source: FakeQuantize | None,
        target: FakeQuantize | None,
        shifts: Shifts | None = None,
    ) -> None:
        """Sets the quantizers of the operator's input and output, and the bounds of the hardware's shifts.

        Args:
            source, target: the quantizers; None if there is none, or more than one. They do not become submodules,
                since they belong to the graph's edges.
            shifts: the bounds; None if any shift is allowed.
        """
        self._edges, self._shifts = (source, target), shifts

    @property
    def _bias_shift(self) -> int | None:
        """The largest shift of the hardware for a bias; None if any shift is allowed."""
        return None if self._shifts is None else self._shifts.bias

    def bounded(self, scale: Tensor) -> Tensor:
        """Returns `scale`, moved so that the shift to the output is within its bounds.

        It is unchanged without such bounds, if scales need not be powers of two, or if the quantizer of the input or
        output is missing.
        """
        source, target = self._edges
        if self._shifts is None or source is None or target is None or not self.spec.powers_of_two:
            return scale
        least, most = self._shifts.cut
        ratio = target.scale / source.scale  # scale = ratio · 2^-cut
        return scale.clamp(ratio * 2.0**-most, ratio * 2.0**-least)

    def share(self, other: WeightFakeQuantize) -> None:
        """Shares the learned parameters of `other`, which quantizes the same weight; this class has none."""

    def clip_to_least_error(self, weight: Tensor) -> None:
        """Sets `clip` to the factors with the least squared error (`mse_clip`); training does not change `clip`.

        Does nothing where the scale is frozen.
        """
        self.clip_to(numerics.mse_clip(weight, self.spec))

    @torch.no_grad()
    def times(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Multiplies the output channels of `weight` by `factors` [out]; its scales must be per channel.

        A frozen scale is multiplied too, so that the integers stay the same except for their sign. Restricted scales
        (`QuantSpec.scale_type`) are an exception, since a product is not always an allowed scale: the rounded weight
        is multiplied, and its scale is no longer frozen.
        """
        rows = along(factors, 0, weight.ndim)
        if self.fixed_scale is None:
            return weight * rows
        if not self.spec.any_scale:  # the products are not allowed scales, so frozen values are rounded again
            weight = self._shipped(weight, self.fixed_scale) * rows
            self.fixed_scale = self.fixed_zero_point = self.rounding = None
            return weight
        steps = self._steps(weight, self._spread(self.fixed_scale, weight))
        factors = along(factors, 0, self.fixed_scale.ndim)
        scale, zero = (self.fixed_scale * factors.abs()).clamp(min=numerics.MIN_SCALE), self.fixed_zero_point
        if zero is not None:  # a reversed range begins where it ended
            zero = torch.where(factors < 0, self.spec.quant_min + self.spec.quant_max - zero, zero)
        self.fix(scale, zero_point=zero)
        return steps * self._spread(scale, weight) * rows.sign()

    def wanted_scale(self, weight: Tensor) -> Tensor:
        """Returns the scales before alignment: `clip` times the scale at which the whole weight is in range."""
        return numerics.weight_scale(weight, self.spec) * self.clip

    def unbounded(self, weight: Tensor) -> Tensor:
        """Returns the scales before bounds and alignment, rounded to values that the file can store."""
        wanted = self.wanted_scale(weight)
        if not self.spec.any_scale:
            wanted = scale_types.weight_scale(weight, wanted, self.spec, self.ends(weight))
        return held(wanted, self.spec)

    def scale(self, weight: Tensor) -> Tensor:
        """Returns the scales, in the shape of `clip`.

        Scales that are not frozen and may have any value are raised by up to 1 % if the input and the output are
        quantized to at most 8 bits, so that the requantization has no near-ties (`qatkit.graph.scales.align`).
        """
        if self.fixed_scale is not None:
            return self.bounded(self.fixed_scale)
        scale = self.bounded(self.unbounded(weight))
        source, target = self._edges
        if (
            not self.spec.any_scale
            or source is None
            or target is None
            or source.spec.wide
            or target.spec.wide
        ):
            return scale
        per_step = target.scale.double() / source.scale.double()
        return (numerics.odd_fraction(scale / per_step, up=True) * per_step).to(scale.dtype)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias [out] with the values that they will have in the file.

        If quantization is off, the weight is unchanged, and the bias lacks `bias_shift`.
        """
        if not self.enabled:
            return weight, bias if bias is None or self.bias_shift is None else bias - self.bias_shift
        scale = self.scale(weight)
        source = self._edges[0]
        if bias is not None and source is not None:
            bias = rounded_bias(bias, self._by_outputs(scale) * source.scale, self.spec, self._bias_shift)
        rounded = self.rounded(weight, scale)
        if self.oscillation is not None:  # a frozen weight only follows its scale
            spread = self._spread(self.trained(scale, weight), weight)
            whole = numerics.clamped(self.oscillation.whole, self.ends(weight))
            rounded = torch.where(self.oscillation.frozen, whole * spread, rounded)
            if self.spec.guards_pairs:  # next to frozen weights others may have to round differently
                rounded = rounded + (self._shipped(weight, scale) - rounded).detach()
        return rounded, bias

    def trained(self, scale: Tensor, weight: Tensor) -> Tensor:
        """Returns `scale` with the gradient that trains it; here the scale follows the weight and has none."""
        return scale

    def rounded(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Returns the weight rounded to whole steps of `scale`, with the gradient that trains it."""
        given, ends = weight, self.ends(weight)
        if self._clips:
            weight = numerics.clamped(weight, self._reach(scale, weight))
        # Rounds the weight before clipping, since the floor of a weight clipped to the range's end may be one
        # step lower. If the scale does not follow the weight, pairs may have to be moved.
        if self.rounding is not None or (self._clips and self.spec.guards_pairs):
            return weight + (self._shipped(given, scale) - weight).detach()
        return numerics.fake_quantize_weight(weight, scale, self.spec, ends)

    def _reach(self, scale: Tensor, weight: Tensor) -> numerics.Ends:
        """Returns the values at which the weight is clipped."""
        spread, (low, high) = self._spread(scale, weight), self.ends(weight)
        return low * spread, high * spread

    def _shipped(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Returns the values of `weight` in the file, without a gradient."""
        spread = self._spread(scale, weight)
        return self._steps(weight, spread) * spread

    @torch.no_grad()
    def whole(self, weight: Tensor) -> Tensor:
        """Returns the current integers of `weight`, in float, in its shape."""
        return self._steps(weight, self._spread(self.scale(weight), weight))

    def dampening(self, weight: Tensor) -> Tensor:
        """Returns Σ (ŵ - w)² over the weights that are not clipped, rank 0; ŵ is w rounded, without a gradient."""
        scale = self.scale(weight)
        target = self._shipped(weight, scale).detach()
        return (target - numerics.clamped(weight, self._reach(scale, weight))).square().sum()

    def _by_outputs(self, scale: Tensor) -> Tensor:
        """Returns `scale` as [] or [out], as a quantized bias needs it; raises ValueError for scales of blocks."""
        if isinstance(self.spec.granularity, PerBlock):
            allowed = (
                "per_tensor or per_channel where a bias is quantized, which has one scale per output channel"
            )
            raise ValueError(f"granularity={self.spec.granularity}: expected {allowed}")
        return scale

    def _steps(self, weight: Tensor, spread: Tensor) -> Tensor:
        """Returns the integers of `weight`, in float; `spread` holds the scales, in a shape that broadcasts."""
        steps, ends = weight.detach() / spread, self.ends(weight)
        if self.rounding is None and self.oscillation is None:
            return self._nearest(steps, ends)
        rounded = torch.round(steps) if self.rounding is None else floor(steps, ends) + self.rounding
        if self.oscillation is not None:
            rounded = self.oscillation.held(rounded)
        rounded = numerics.clamped(rounded, ends)
        return fitted(rounded, steps) if self.spec.guards_pairs else rounded

    def _nearest(self, steps: Tensor, ends: numerics.Ends) -> Tensor:
        """Returns the integers nearest to `steps`, in float, within `ends` and, if pairs are guarded, their limit."""
        rounded = numerics.clamped(torch.round(steps), ends)
        return fitted(rounded, steps) if self.spec.guards_pairs else rounded

    @torch.no_grad()
    def integers(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor) -> Integers:
        """Returns the integers that the file will hold for a float weight and bias [out].

        Args:
            weight, bias: the parameters as inference uses them, with a BatchNorm folded in.
            input_scale: scale [] of the operator's input.

        Raises:
            ValueError: there is a bias, and the weight has one scale per block.
        """
        scale, raised, lost = self.scale(weight), None, 0.0
        if bias is not None:
            scale, raised = avoid_overflow(self._by_outputs(scale), bias, input_scale, self.spec)
        granularity = self.spec.granularity if raised is None else PerChannel(0)
        zero = self.zero_point(weight).expand(scale.shape).clone()
        whole = torch.empty_like(weight, dtype=self.spec.torch_dtype)
        for rows in self.pieces(weight):
            part, one = weight[rows], self.of_rows(rows)
            of_part = scale if scale.ndim == 0 else scale[rows]
            steps = one._steps(part, granularity.spread(of_part, part.shape))
            zeros = granularity.spread(zero if zero.ndim == 0 else zero[rows], part.shape)
            whole[rows] = (steps + zeros).to(whole.dtype)
        if bias is not None and raised is not None:
            spread = granularity.spread(scale, weight.shape)
            steps = self._nearest(weight / spread, self.ends(weight))  # frozen rounding has another scale
            found = (steps + granularity.spread(zero, weight.shape)).to(whole.dtype)
            whole = torch.where(along(raised, 0, weight.ndim), found, whole)
            errors = (steps * spread - weight).abs().flatten(1).sum(1) * input_scale
            lost = float((errors[raised] / bias[raised].abs()).max())
        step = scale * input_scale
        held_bias, times = None, torch.ones_like(step)
        if bias is not None:
            held_bias, times = whole_bias(bias, step, self.spec, self._bias_shift)
        bias_scale = step * times.to(step.dtype)
        repaired = 0 if raised is None else int(raised.sum())
        return Integers(whole, scale, zero.to(whole.dtype), held_bias, bias_scale, times, repaired, lost)


@dataclass(frozen=True)
class Quantizers:
    """The factories with which `prepare_qat` creates observers and quantizers.

    Attributes:
        observer: a function that creates the observer of an activation.
        activation: a function that creates a quantizer from spec, observer (None: `bounds` is the range) and
            bounds.
        weight: a function that creates a quantizer from spec and the shape of the weight.
    """

    observer: Callable[[], Observer] = MovingAverageMinMaxObserver

    activation: Callable[[QuantSpec, Observer | None, Bounds], FakeQuantize] = FakeQuantize
    weight: Callable[[QuantSpec, Sequence[int]], WeightFakeQuantize] = WeightFakeQuantize
