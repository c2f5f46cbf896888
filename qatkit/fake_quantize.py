"""FakeQuantize: the module on an edge of the graph, for activations and for weights.

A ReLU or ReLU6 before the edge is absorbed as the edge's `bounds`: quantizing to a range that starts at
zero is the activation, in the simulation (one pass less forward and backward) as in the exported file
(where ONNX Runtime wants no activation between an operator and its QuantizeLinear).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qatkit import numerics
from qatkit.observers import Observer
from qatkit.spec import QuantSpec

Bounds = tuple[float | None, float | None]


class FakeQuantize(nn.Module):
    """Per-tensor fake quantization of an activation.

    Args:
        spec: dtype and symmetry.
        observer: finds the range; None when `bounds` fixes it (a sigmoid's 0..1).
        bounds: values are clamped to these before they are observed and quantized (None: open end).

    Attributes:
        observing: the next forward passes update the range.
        enabled: the next forward passes quantize; else they only clamp to `bounds`.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, spec: QuantSpec, observer: Observer | None, bounds: Bounds = (None, None)) -> None:
        super().__init__()
        self.spec, self.observer, self.bounds = spec, observer, bounds
        self.observing, self.enabled = False, False
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
            self.update_qparams()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends calibration: the range of what all ranks have seen."""
        if self.observer is not None:
            self.observer.all_reduce()
            self.observer.finish(self.spec)

    @torch.no_grad()
    def update_qparams(self) -> None:
        """Recomputes scale and zero_point from the observer's range, if it has seen any."""
        if self.observer is not None and self.observer.seen:
            self._set_range(self.observer.low, self.observer.high)

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            self.observe(x)
        if not self.enabled:
            return self.clamp_bounds(x)
        return numerics.fake_quantize(x, self.scale, self.zero_point, self.spec)

    def extra_repr(self) -> str:
        return f"{self.spec.dtype}, symmetric={self.spec.symmetric}, bounds={self.bounds}"


class WeightFakeQuantize(nn.Module):
    """Symmetric fake quantization of a weight; the scale follows the weight's largest value at each step.

    With it goes the bias, to steps of input scale times weight scale, as it will be in the file.

    Args:
        spec: symmetric; per tensor or per channel.
        channels: size of the weight along `axis`.
        axis: the output-channel axis of the weight (0 for Conv and Linear).

    Attributes:
        clip: [] or [channels], which share of the largest value the range ends at; beyond it the weight is
            clipped and gets no gradient.
        source, target: FakeQuantize of the operator's input and of its output; None where there is none, or
            more than one. No submodules: they live on the graph's edges.
    """

    clip: Tensor

    def __init__(self, spec: QuantSpec, channels: int, axis: int = 0) -> None:
        super().__init__()
        if not spec.symmetric:
            raise ValueError("weights are quantized symmetrically: ONNX Runtime's kernels want zero_point 0")
        self.spec, self.axis, self.enabled = spec, axis, False
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

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._clips = bool((self.clip < 1).any())

    def scale(self, weight: Tensor) -> Tensor:
        """[] or [channels]; between two quantized tensors such that the requantization has no near-ties
        (`qatkit.graph.align_scales`), at most 1 % above `clip` times the largest value / 127.
        """
        scale = numerics.weight_scale(weight, self.spec, self.axis) * self.clip
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
        return numerics.fake_quantize_weight(weight, scale, self.spec, self.axis), bias

    def extra_repr(self) -> str:
        return f"{self.spec.dtype}, {self.spec.granularity}"
