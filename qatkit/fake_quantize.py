"""Quantizers: the modules on the edges of the graph and on its weights, and what everybody else asks of them.

    FakeQuantize         an activation: scale and zero point from an observer's range
    WeightFakeQuantize   a weight, with its bias: a scale that follows the largest values, nearest rounding

Alignment, conversion, the cache and the report ask a quantizer for its scale and its integers and compute neither anew,
so that a scale or a rounding that was found in another way reaches the file: learned (LSQ), solved for (GPTQ, AdaRound)
or given. `fix` ends the following of whatever the scale came from; a quantizer that learns its own is a subclass which
says what it wants (`settle`, `wanted_scale`), and `Quantizers` hands it to `prepare_qat`.

A ReLU or ReLU6 before the edge is absorbed as the edge's `bounds`: quantizing to a range that starts at
zero is the activation, in the simulation (one pass less forward and backward) as in the exported file
(where ONNX Runtime wants no activation between an operator and its QuantizeLinear).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qatkit import numerics
from qatkit.observers import MovingAverageMinMaxObserver, Observer
from qatkit.spec import QuantSpec

Bounds = tuple[float | None, float | None]
_INT32_MAX = 2**31 - 1


class Quantizer(nn.Module):
    """What an activation's and a weight's quantizer have in common.

    Attributes:
        spec: dtype, symmetry and granularity.
        enabled: the next forward passes quantize.
        fixed_scale: the scale that stands, [] or [channels]; None while it follows its source. It is part of a
            checkpoint where it is set, and only there.
    """

    _optional: ClassVar[tuple[str, ...]] = ("fixed_scale",)
    spec: QuantSpec
    enabled: bool
    fixed_scale: Tensor | None

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        self.spec, self.enabled = spec, False
        for name in self._optional:
            self.register_buffer(name, None)

    @property
    def frozen(self) -> bool:
        """Whether the scale stands: neither observers, nor training, nor alignment move it."""
        return self.fixed_scale is not None

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        """What the next forward passes do.

        Args:
            observe: ranges follow what passes.
            quantize: values are quantized.
            calibrating: also those ranges follow that fine-tuning does not move.
        """
        self.enabled = quantize

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        device = next(self.buffers()).device
        for name in self._optional:
            stored = state_dict.get(prefix + name)
            setattr(self, name, None if stored is None else torch.empty_like(stored, device=device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.spec.dtype}, {self.spec.granularity}, symmetric={self.spec.symmetric}"


class FakeQuantize(Quantizer):
    """Per-tensor fake quantization of an activation.

    Args:
        spec: dtype and symmetry.
        observer: finds the range; None when `bounds` fixes it (a sigmoid's 0..1).
        bounds: values are clamped to these before they are observed and quantized (None: open end).

    Attributes:
        scale, zero_point: rank 0, float32 and int32, as they will ship.
        observing: the next forward passes update the range.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__(spec)
        self.observer, self.bounds, self.observing = observer, bounds, False
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))
        if observer is None:
            low, high = bounds
            if low is None or high is None:
                raise ValueError("a FakeQuantize without an observer needs both bounds")
            self._set_range(torch.tensor(low), torch.tensor(high))

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        scale, zero_point = numerics.choose_qparams(low, high, self.spec)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        follows = calibrating or self.observer is None or self.observer.follows_training
        self.observing, self.enabled = observe and follows, quantize

    def clamp_bounds(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        if low == 0.0 and high is None:
            return torch.relu(x)
        return x if low is None and high is None else torch.clamp(x, low, high)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Updates the range from one batch."""
        if self.observer is None or not x.numel():
            return
        low, high = torch.aminmax(x.detach().float())
        self.observer.update(self.clamp_bounds(low), self.clamp_bounds(high), x.detach())
        if self.observer.follows_training:
            self.settle()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends calibration: the range of what all ranks have seen."""
        if self.observer is not None:
            self.observer.all_reduce()
            self.observer.finish(self.spec)

    @torch.no_grad()
    def settle(self) -> None:
        """Scale and zero point as their source has them, before alignment: the observer's range, if it has seen any."""
        if not self.frozen and self.observer is not None and self.observer.seen:
            self._set_range(self.observer.low, self.observer.high)

    @property
    def movable(self) -> bool:
        """Whether alignment may move the scale: it has a source, and does not stand."""
        return not self.frozen and self.observer is not None and self.observer.seen

    @torch.no_grad()
    def fix(self, scale: Tensor, zero_point: Tensor) -> None:
        """Scale and zero point, rank 0, that stand from now on."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        self.fixed_scale = self.scale.clone()

    def shipped(self) -> tuple[Tensor, Tensor]:
        """Scale (float32) and zero point (of the quantized type), rank 0, as the file will hold them."""
        return self.scale.detach().clone(), self.zero_point.detach().to(self.spec.torch_dtype)

    def range_record(self) -> dict[str, float | int | str]:
        """What there is to tell people: the range that the type can hold, its scale and zero point."""
        scale, zero = self.scale.item(), int(self.zero_point.item())
        low, high = ((end - zero) * scale for end in self.spec.type_range)
        return {"low": low, "high": high, "scale": scale, "zero_point": zero, "dtype": self.spec.dtype}

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            self.observe(x)
        if not self.enabled:
            return self.clamp_bounds(x)
        return numerics.fake_quantize(x, self.scale, self.zero_point, self.spec)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bounds={self.bounds}"


@dataclass(frozen=True)
class Integers:
    """A weight and its bias as they ship.

    Attributes:
        weight: of the quantized type, in the weight's shape.
        scale: [] or [out]; the zero point is 0.
        bias: [out] in steps of `bias_scale`, whole numbers in float64; None without a bias.
        bias_scale: input scale times `scale`.
        repaired: channels whose scale was raised so that the bias fits int32.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    bias_scale: Tensor
    repaired: int


class WeightFakeQuantize(Quantizer):
    """Symmetric fake quantization of a weight; the scale follows the weight's largest value at each step.

    With it goes the bias, to steps of input scale times weight scale, as it will be in the file.

    Args:
        spec: symmetric; per tensor or per channel.
        channels: size of the weight along `axis`.
        axis: the output-channel axis of the weight (0 for Conv and Linear).

    Attributes:
        clip: [] or [channels], which share of the largest value the range ends at; beyond it the weight is
            clipped and gets no gradient.
        rounds_up: of the weight's shape, which weights are rounded up rather than down; None: to the nearest.
        source, target: FakeQuantize of the operator's input and of its output; None where there is none, or
            more than one. No submodules: they live on the graph's edges.
    """

    _optional = ("fixed_scale", "rounds_up")
    clip: Tensor
    rounds_up: Tensor | None

    def __init__(self, spec: QuantSpec, channels: int, axis: int = 0) -> None:
        if not spec.symmetric:
            raise ValueError("weights are quantized symmetrically: ONNX Runtime's kernels want zero_point 0")
        super().__init__(spec)
        self.axis = axis
        self.register_buffer("clip", torch.ones((channels,) if spec.per_channel else ()))
        self._clips = False  # `clip` as a plain bool: asking a GPU at each step would wait for it
        self._edges: tuple[FakeQuantize | None, FakeQuantize | None] = (None, None)

    def between(self, source: FakeQuantize | None, target: FakeQuantize | None) -> None:
        """Says which tensors the operator stands between."""
        self._edges = (source, target)

    def clip_to_least_error(self, weight: Tensor) -> None:
        """Sets `clip` such that `weight` has the least squared error; it stays as `weight` is trained."""
        self.clip.copy_(numerics.mse_clip(weight, self.spec, self.axis))
        self._clips = bool((self.clip < 1).any())

    @torch.no_grad()
    def fix(self, scale: Tensor, rounds_up: Tensor | None = None) -> None:
        """A scale, [] or [channels], and a rounding that stand from now on, whatever becomes of the weight.

        Args:
            scale: above 0; weights beyond it times the largest integer are clipped.
            rounds_up: bool, of the weight's shape.
        """
        self.fixed_scale = scale.detach().clone()
        self.rounds_up = None if rounds_up is None else rounds_up.detach().clone()
        self._clips = True

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._clips = self.frozen or bool((self.clip < 1).any())

    def wanted_scale(self, weight: Tensor) -> Tensor:
        """[] or [channels], before alignment: `clip` times the largest value / 127."""
        return numerics.weight_scale(weight, self.spec, self.axis) * self.clip

    def scale(self, weight: Tensor) -> Tensor:
        """[] or [channels]; between two quantized tensors such that the requantization has no near-ties
        (`qatkit.graph.align_scales`), at most 1 % above the scale that is wanted.
        """
        if self.fixed_scale is not None:
            return self.fixed_scale
        scale = self.wanted_scale(weight)
        source, target = self._edges
        if source is None or target is None:
            return scale
        per_step = target.scale.double() / source.scale.double()
        return (numerics.odd_fraction(scale / per_step, up=True) * per_step).to(scale.dtype)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias [out] as they will ship."""
        if not self.enabled:
            return weight, bias
        scale = self.scale(weight)
        source = self._edges[0]
        if bias is not None and source is not None:
            bias = numerics.fake_quantize_bias(bias, scale * source.scale)
        if self._clips:
            end = numerics.along(scale * self.spec.quant_max, self.axis, weight.ndim)
            weight = torch.clamp(weight, -end, end)
        if self.rounds_up is not None:
            steps = self._steps(weight, scale) * numerics.along(scale, self.axis, weight.ndim)
            return weight + (steps - weight).detach(), bias
        return numerics.fake_quantize_weight(weight, scale, self.spec, self.axis), bias

    def _steps(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Whole numbers of `weight` / `scale`, in float."""
        steps = weight.detach() / numerics.along(scale, self.axis, weight.ndim)
        rounded = torch.round(steps) if self.rounds_up is None else torch.floor(steps) + self.rounds_up
        return rounded.clamp(self.spec.quant_min, self.spec.quant_max)

    @torch.no_grad()
    def integers(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor) -> Integers:
        """What the file will hold of a float weight and bias [out].

        Args:
            weight, bias: as inference uses them, a BatchNorm folded in.
            input_scale: of the operator's input, [].
        """
        scale, repaired = _avoid_overflow(self.scale(weight), bias, input_scale)
        bias_scale = scale * input_scale
        steps = None if bias is None else numerics.to_bias(bias, bias_scale)
        whole = self._steps(weight, scale).to(self.spec.torch_dtype)
        return Integers(whole, scale, steps, bias_scale, repaired)


def _avoid_overflow(scale: Tensor, bias: Tensor | None, input_scale: Tensor) -> tuple[Tensor, int]:
    """Raises the scale of channels whose bias would not fit int32: near-dead or masked ones, so nothing is lost.

    One scale for the tensor becomes one a channel where that is needed: the others keep theirs.
    """
    if bias is None:
        return scale, 0
    needed = bias.abs().double() / (input_scale.double() * (_INT32_MAX // 2))
    too_small = scale.double() < needed
    if not too_small.any():
        return scale, 0
    return torch.where(too_small, needed.to(scale.dtype), scale), int(too_small.sum())


@dataclass(frozen=True)
class Quantizers:
    """What `prepare_qat` makes the quantizers with.

    Attributes:
        observer: makes the observer of each activation.
        activation: from spec, observer (None: `bounds` is the range) and bounds.
        weight: from spec and the number of output channels.
    """

    observer: Callable[[], Observer] = MovingAverageMinMaxObserver

    activation: Callable[[QuantSpec, Observer | None, Bounds], FakeQuantize] = FakeQuantize
    weight: Callable[[QuantSpec, int], WeightFakeQuantize] = WeightFakeQuantize
