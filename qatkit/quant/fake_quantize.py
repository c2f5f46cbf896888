"""Quantizers: what everybody else asks of the modules on the edges of the graph and on its weights; and the one on an
edge, whose scale and zero point come from an observer's range. A weight's: `qatkit.quant.weight_fake_quantize`.

Alignment, conversion, the cache and the report ask a quantizer for its scale and its integers and compute neither,
so that a scale or a rounding that was found in another way reaches the file: learned (LSQ), solved for (GPTQ, AdaRound)
or given. `fix` ends the following of whatever the scale came from; a quantizer that learns its own is a subclass which
says what it wants (`settle`, `wanted_scale`), named by `quantizer.activation` and `quantizer.weight`.

A ReLU or ReLU6 before the edge is absorbed as the edge's `bounds`: quantizing to a range that starts at
zero is the activation, in the simulation (one pass less forward and backward) as in the exported file
(where ONNX Runtime wants no activation between an operator and its QuantizeLinear).
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
    """What an activation's and a weight's quantizer have in common.

    Attributes:
        spec: dtype, symmetry and granularity.
        enabled: the next forward passes quantize.
        fixed_scale: the scale that stands; None while it follows its source. It is part of a
            checkpoint where it is set, and only there.
    """

    _optional: ClassVar[tuple[str, ...]] = ("fixed_scale",)
    decayed: ClassVar[bool] = False  # whether weight decay is applied to what it learns
    scale_types: ClassVar[tuple[str, ...]] = SCALE_VALUES  # those that it takes (`QuantSpec.scale_type`)
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

    @property
    def learns(self) -> bool:
        """Whether the scale is trained: fine-tuning has begun, and it does not stand."""
        return False

    def set_phase(self, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
        """What the next forward passes do.

        Args:
            observe: ranges follow what passes.
            quantize: values are quantized.
            calibrating: also those ranges follow that fine-tuning does not move.
        """
        self.enabled = quantize

    def begin(self, weight: Tensor | None = None) -> None:
        """Before the optimizer is made: what is learned starts from calibration.

        Args:
            weight: of a weight's quantizer, as inference uses it.
        """

    def begin_anew(self, weight: Tensor | None = None) -> None:
        """`begin` of what is learned already, from what range and weight have come to: nothing was quantized yet."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        device = next(self.buffers()).device
        if not any(key.startswith(prefix) for key in state_dict):
            return super()._load_from_state_dict(state_dict, prefix, *args)  # nothing of this quantizer
        for name in self._optional:
            stored = state_dict.get(prefix + name)
            setattr(self, name, None if stored is None else torch.empty_like(stored, device=device))
        return super()._load_from_state_dict(state_dict, prefix, *args)

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
        range_limits: [2], ends to which ranges are cut, since no reader tells values beyond apart
            (`qatkit.calibration.limits`); None where there are none.
        features: values of the tensor for one image.
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
        if bounds[0] == 0:  # a file that is exported before calibration has the zero point of its ReLUs
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
        """Returns scale (float32) and zero point (int32) of an observed range, rank 0, cut to the limits."""
        if self.range_limits is not None:
            low, high = (
                low.clamp(self.range_limits[0], self.range_limits[1]),
                high.clamp(self.range_limits[0], self.range_limits[1]),
            )
        if not self.spec.any_scale:
            return scale_types.qparams(low, high, self.spec, fixed=self.observer is None)
        return numerics.choose_qparams(low, high, self.spec)

    def follow_range(self, low: Tensor, high: Tensor) -> None:
        """Takes scale and zero point of a range that may be empty yet, which changes nothing; without asking a device.

        Zero alone stands in the middle, unless a ReLU cuts off what is below: at an end of its range a value has no
        gradient, so a branch that begins at zero (an adapter, a BatchNorm whose γ is 0) would stay there.
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
        """A range of zeros alone follows the training, whichever observer found it: it can hold next to nothing."""
        if not self.frozen and self._is_empty:
            self._observe_anew()

    @property
    def _is_empty(self) -> bool:
        """Whether calibration has seen nothing but zero."""
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
            return F.hardtanh(x, low, high)  # backward is one pass; clamp's five
        return x if low is None and high is None else torch.clamp(x, low, high)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Updates the range from one batch."""
        if self.observer is None or not x.numel():
            return
        low, high = torch.aminmax(x.detach().float())
        if self.training:  # of all ranks; in inference each sees what all do
            low, high = ends_of_all_ranks(low, high)
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
        if not self.frozen and self.observer is not None:
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """`settle` of one that does not stand: no value is read on the host."""
        assert self.observer is not None
        self.follow_range(self.observer.low, self.observer.high)

    def own_scale(self) -> Tensor | None:
        """Returns the scale of the range alone, before any alignment; None of one that stands, or has seen nothing."""
        if self.frozen or (self.observer is not None and not self.observer.seen):
            return None
        if self.observer is None:
            return self.qparams(*(torch.tensor(end, device=self.scale.device) for end in self.bounds))[0]
        return self.qparams(self.observer.low, self.observer.high)[0]

    @property
    def movable(self) -> bool:
        """Whether alignment may move the scale: it has a source, and does not stand."""
        return not self.frozen and self.observer is not None and self.observer.seen

    @torch.no_grad()
    def fix(self, scale: Tensor, zero_point: Tensor) -> None:
        """Scale and zero point, rank 0, that stand from now on; of a type of scales the nearest."""
        self.scale.copy_(scale_types.nearest(scale, self.spec))
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}observer.batches" in state_dict:
            self._observe_anew()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bounds={self.bounds}"
