"""Quantizers: the interface of all of them, and the fake quantization of activations.

`Quantizer` is what the rest of the code sees of the modules on the graph's edges and on its weights.
`FakeQuantize` is the quantizer of an edge: its scale and zero point come from an observer's range. The
quantizer of a weight is in `qatkit.quant.weight_fake_quantize`.

Alignment, conversion, the calibration cache and the report get the scale and the integers from a quantizer and compute
neither. Scales and roundings that are learned (LSQ), solved for (GPTQ, AdaRound) or given by the user
therefore reach the file. `fix` freezes a scale, so that it no longer follows its source. A quantizer that
learns its scale is a subclass that sets or returns the scale before alignment (`settle`, `wanted_scale`). The
settings `quantizer.activation` and `quantizer.weight` choose the classes.

A ReLU or ReLU6 before the edge is absorbed as the edge's `bounds`: quantizing to a range that starts at zero (and
ends at 6 or below) implements the activation. This saves a pass forward and backward in training. In the exported file,
ONNX Runtime's int8 kernels need an operator to be followed by its QuantizeLinear directly.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.quant import numerics, scale_types
from qatkit.quant.observers import MovingAverageMinMaxObserver, Observer
from qatkit.quant.observers.base import ends_of_all_ranks
from qatkit.quant.spec import SCALE_VALUES, QuantSpec

Bounds = tuple[float | None, float | None]


class Quantizer(nn.Module):
    """The base class of the quantizers of activations and weights.

    Attributes:
        spec: the specification of the quantization.
        enabled: whether the next forward passes quantize.
        fixed_scale: the frozen scale; None while the scale follows its source. A checkpoint holds it only
            if it is set.
    """

    _optional: ClassVar[tuple[str, ...]] = ("fixed_scale",)
    decayed: ClassVar[bool] = False  # whether weight decay is applied to the learned parameters
    scale_types: ClassVar[tuple[str, ...]] = SCALE_VALUES  # accepted values of `QuantSpec.scale_type`
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
        """Returns whether the scale is frozen: neither observers, nor training, nor alignment move it."""
        return self.fixed_scale is not None

    @property
    def learns(self) -> bool:
        """Returns whether the scale is trained: fine-tuning has begun, and the scale is not frozen."""
        return False

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        """Sets what the next forward passes do.

        Args:
            observe: whether ranges follow the values.
            quantize: whether values are quantized.
            calibrating: whether ranges that fine-tuning does not move follow the values as well.
        """
        self.enabled = quantize

    def begin(self, weight: Tensor | None = None) -> None:
        """Initializes learned parameters from calibration; called before the optimizer is created.

        Args:
            weight: the weight as inference uses it, for a weight's quantizer.
        """

    def begin_anew(self, weight: Tensor | None = None) -> None:
        """Initializes learned parameters again, from the current range and weight, before quantization starts."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        device = next(self.buffers()).device
        if not any(key.startswith(prefix) for key in state_dict):
            return super()._load_from_state_dict(state_dict, prefix, *args)  # not in the checkpoint
        for name in self._optional:
            stored = state_dict.get(prefix + name)
            setattr(self, name, None if stored is None else torch.empty_like(stored, device=device))
        return super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.spec.dtype}, {self.spec.granularity}, symmetric={self.spec.symmetric}"


class FakeQuantize(Quantizer):
    """Per-tensor fake quantization of an activation.

    Args:
        spec: spec of the tensor.
        observer: the observer that finds the range; None if `bounds` fixes it (a sigmoid's 0..1).
        bounds: the lower and the upper bound to which values are clamped before they are observed and quantized;
            None for no bound.

    Attributes:
        scale, zero_point: the current scale and zero point, rank 0, float32 and int32, as in the exported
            file.
        observing: whether the next forward passes update the range.
        range_limits: the ends to which ranges are cut, [2], since no reader distinguishes values beyond them
            (`qatkit.calibration.limits`); None if there are none.
        features: number of values of the tensor for one image.

    Raises:
        ValueError: there is no observer, and a bound is missing.
    """

    _optional: ClassVar[tuple[str, ...]] = (*Quantizer._optional, "range_limits")
    scale: Tensor
    zero_point: Tensor
    range_limits: Tensor | None
    features = 1

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__(spec)
        self.observer, self.bounds, self.observing = observer, bounds, False
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))
        if bounds[0] == 0:  # so that a file exported before calibration has the zero point of its ReLUs
            self.zero_point.copy_(self.qparams(torch.zeros(()), torch.ones(()))[1])
        if observer is None:
            low, high = bounds
            if low is None or high is None:
                raise ValueError("a FakeQuantize without an observer needs both bounds")
            self._set_range(torch.tensor(low), torch.tensor(high))

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        scale, zero_point = self.qparams(low, high)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int32), rank 0, of a range that is first cut to `range_limits`."""
        if self.range_limits is not None:
            low, high = (
                low.clamp(self.range_limits[0], self.range_limits[1]),
                high.clamp(self.range_limits[0], self.range_limits[1]),
            )
        if not self.spec.any_scale:
            return scale_types.qparams(low, high, self.spec, fixed=self.observer is None)
        return numerics.choose_qparams(low, high, self.spec)

    def follow_range(self, low: Tensor, high: Tensor) -> None:
        """Sets scale and zero point from a range, without waiting for a device; if low > high, it changes nothing.

        If the range contains only zero, the zero point becomes the middle integer unless a ReLU cuts off negative
        values. At an end of the range a value has no gradient, so a branch that begins at zero (an adapter, a
        BatchNorm whose γ is 0) would otherwise stay at zero.
        """
        scale, zero_point = self.qparams(low, high)
        if self.bounds[0] != 0.0:
            middle = (self.spec.quant_min + self.spec.quant_max + 1) // 2
            zero_point = torch.where((low == 0) & (high == 0), middle, zero_point)
        seen = low <= high
        self.scale.copy_(torch.where(seen, scale, self.scale))
        self.zero_point.copy_(torch.where(seen, zero_point, self.zero_point))

    @torch.no_grad()
    def begin(self, weight: Tensor | None = None) -> None:
        """Replaces the observer by one that follows the values in training, if calibration observed only zeros.

        The empty range would clip all other values.
        """
        if not self.frozen and self._is_empty:
            self._observe_anew()

    @property
    def _is_empty(self) -> bool:
        """Returns whether calibration has observed only zeros."""
        return self.observer is not None and bool((self.observer.low == 0) & (self.observer.high == 0))

    def _observe_anew(self) -> None:
        if self.observer is not None and not self.observer.follows_training:
            observer = MovingAverageMinMaxObserver().to(self.scale.device)
            observer.low.zero_()
            observer.high.zero_()
            self.observer = observer

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        follows = calibrating or self.observer is None or self.observer.follows_training
        self.observing, self.enabled = observe and follows, quantize

    def clamp_bounds(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        if low == 0.0 and high is None:
            return torch.relu(x)
        if low is not None and high is not None:
            return F.hardtanh(x, low, high)  # its backward takes one pass, that of clamp five
        return x if low is None and high is None else torch.clamp(x, low, high)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Updates the range from one batch, and the scale and zero point if the observer follows training."""
        if self.observer is None or not x.numel():
            return
        low, high = torch.aminmax(x.detach().float())
        if self.training:  # the range of all ranks; in inference every rank sees the same values
            low, high = ends_of_all_ranks(low, high)
        self.observer.update(self.clamp_bounds(low), self.clamp_bounds(high), x.detach())
        if self.observer.follows_training:
            self.settle()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends calibration: reduces the observer's range over all ranks and makes it final."""
        if self.observer is not None:
            self.observer.all_reduce()
            self.observer.finish(self.spec)

    @torch.no_grad()
    def settle(self) -> None:
        """Sets scale and zero point from the observer's range unless they are frozen; called before alignment."""
        if not self.frozen and self.observer is not None:
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Does what `settle` does for a scale that is not frozen; copies no value from the device to the host."""
        assert self.observer is not None
        self.follow_range(self.observer.low, self.observer.high)

    def own_scale(self) -> Tensor | None:
        """Returns the scale of the range before any alignment; None if it is frozen or no values were observed."""
        if self.frozen or (self.observer is not None and not self.observer.seen):
            return None
        if self.observer is None:
            return self.qparams(*(torch.tensor(end, device=self.scale.device) for end in self.bounds))[0]
        return self.qparams(self.observer.low, self.observer.high)[0]

    @property
    def movable(self) -> bool:
        """Returns whether alignment may move the scale: it comes from observed values and is not frozen."""
        return not self.frozen and self.observer is not None and self.observer.seen

    @torch.no_grad()
    def fix(self, scale: Tensor, zero_point: Tensor) -> None:
        """Freezes scale and zero point, rank 0; the scale is rounded to the nearest one of the spec's scale type."""
        self.scale.copy_(scale_types.nearest(scale, self.spec))
        self.zero_point.copy_(zero_point)
        self.fixed_scale = self.scale.clone()

    def shipped(self) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (of the quantized type), rank 0, as the file will hold them."""
        return self.scale.detach().clone(), self.zero_point.detach().to(self.spec.torch_dtype)

    def range_record(self) -> dict[str, float | int | str]:
        """Returns a record for reports: the range that can be represented, scale, zero point and number type."""
        scale, zero = self.scale.item(), int(self.zero_point.item())
        low, high = ((end - zero) * scale for end in self.spec.type_range)
        return {"low": low, "high": high, "scale": scale, "zero_point": zero, "dtype": self.spec.dtype}

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            self.observe(x)
        if not self.enabled:
            return self.clamp_bounds(x)
        return numerics.fake_quantize(x, self.scale, self.zero_point, self.spec)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}observer.batches" in state_dict:
            self._observe_anew()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bounds={self.bounds}"
