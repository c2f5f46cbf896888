"""The arithmetic of affine quantization, on tensors only.

    q = clamp(round(x / scale) + zero_point, quant_min, quant_max)        x' = (q - zero_point) * scale

Division is a true divide and rounding is half to even, as ONNX QuantizeLinear (opset 13) defines it, so
that the simulation, the converted module and ONNX Runtime agree bit for bit.
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", 2018; the straight-through estimator: Bengio et al., 2013.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from qatkit.quant.granularity import along
from qatkit.quant.pairs import fitted, least_scale
from qatkit.quant.spec import QuantSpec

# The smallest and the largest integer, of a tensor or of each of its elements.
Ends = tuple[int | Tensor, int | Tensor]
# A smaller float32 scale would make x / scale overflow for ordinary x; so small a channel is practically
# zero.
MIN_SCALE = 1e-12
_PIECE = 2**17  # values per thread that all passes process together, so that they stay in a core's cache


def choose_qparams(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Returns scale (float32) and zero_point (int32) that represent [low, high], widened to hold 0.

    Args:
        low, high: the ends of the range, float tensors of the same shape, [] or [channels].
        spec: spec of the tensor.
    """
    low = torch.clamp(low.float(), max=0.0)
    high = torch.clamp(high.float(), min=0.0)
    levels = spec.quant_max - spec.quant_min
    if spec.symmetric:
        # Half of the levels lie on each side: 127 for int8, 127.5 for uint8 around 128.
        middle = (spec.quant_max + spec.quant_min + 1) // 2
        scale = torch.maximum(-low, high) / (spec.quant_max - middle)
        return scale.clamp(min=MIN_SCALE), torch.full_like(scale, middle, dtype=torch.int32)
    # Computed from halves (exact in binary), since high - low may exceed float32's range.
    scale = ((high / 2 - low / 2) / levels * 2).clamp(min=MIN_SCALE)
    zero_point = torch.clamp(spec.quant_min - torch.round(low / scale), spec.quant_min, spec.quant_max)
    return scale, zero_point.to(torch.int32)


def flat(x: Tensor) -> Tensor | None:
    """Returns all values in memory order, if the memory format is contiguous or channels-last; else None."""
    if x.is_contiguous():
        return x.view(-1)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).view(-1)
    return None


def to_steps(x: Tensor, scale: float, low: int, high: int, *, in_place: bool = False) -> Tensor:
    """Returns clamp(round(x / scale), low, high)·scale on the CPU, without a gradient.

    Four passes over a large tensor would read memory four times. The tensor is processed piece by piece, so
    that memory is read once.

    Args:
        x: the tensor.
        scale: the scale.
        low, high: the smallest and the largest integer, counted from the zero point.
        in_place: whether `x` may be overwritten.
    """
    x = x.detach()
    made = x if in_place else torch.empty_like(x)
    given, into = flat(x), flat(made)
    if given is None or into is None:
        return x.div(scale).round_().clamp_(low, high).mul_(scale)
    piece = _PIECE * torch.get_num_threads()
    for source, target in zip(given.split(piece), into.split(piece), strict=True):
        torch.div(source, scale, out=target).round_().clamp_(low, high).mul_(scale)
    return made


class _FakeQuantizePerTensor(torch.autograd.Function):
    """Fake quantization on the CPU with a straight-through gradient inside the representable range.

    ATen's fake_quantize kernels on the CPU are scalar code, so four vectorized passes replace them
    (figures: decision 1). The backward pass is hardtanh's kernel. For a range that starts at zero, its
    gradient at the lower end is exactly that of ReLU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = ((qmin - zero_point) * scale, (qmax - zero_point) * scale)
        return to_steps(x, scale, qmin - zero_point, qmax - zero_point)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grads[0], x, *ctx.bounds), None, None, None, None


@torch.library.custom_op("qatkit::known_behind", mutates_args=())
def _known_behind(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns a copy of `x` that a compiler can only make in the backward pass, because it depends on a gradient.

    Comparisons with `x` are then computed in the backward pass. Otherwise a compiler stores their results,
    one bool per value, in the forward pass. That would take a quarter of the memory, but on the CPU Inductor
    writes bools one by one (torch 2.13).
    """
    return x.clone()


@_known_behind.register_fake
def _(x: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(x)


def within(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Returns `gradient` where `x` lies between `ends` [2], else 0: hardtanh's gradient, for compilers."""
    low, high = _known_behind(ends, gradient) if x.device.type == "cpu" else ends
    return torch.where((x > low) & (x < high), gradient, 0.0)


class _FakeQuantizeTraced(torch.autograd.Function):
    """Fake quantization on tensors only: `torch.compile` makes one kernel per direction, without host transfers.

    Without compilation it takes seven times as long on the CPU (64x32x32x32, one thread: 11.6 ms against
    1.6).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        low, high = qmin - zero_point.float(), qmax - zero_point.float()
        ctx.save_for_backward(x, torch.stack([low * scale, high * scale]))
        return torch.round(x / scale).clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, ends = ctx.saved_tensors
        return within(grads[0], x, ends), None, None, None, None


class _FakeQuantizeOnDevice(torch.autograd.Function):
    """Fake quantization on an accelerator by torch's fused kernel, with the same gradient as on the CPU.

    The kernel's own gradient also passes up to half a step outside of the range, where the ReLU of a range
    that starts at zero has no gradient. Like the kernel, this keeps one byte per value for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        low, high = (qmin - zero_point) * scale, (qmax - zero_point) * scale
        ctx.save_for_backward((x > low).logical_and_(x < high))
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, qmin, qmax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None, None, None


class _RoundWeight(torch.autograd.Function):
    """Fake quantization of a weight within its range.

    Nothing is clipped, so the straight-through gradient is the identity, and nothing is stored for it.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, scale: Tensor, qmin: Any, qmax: Any) -> Tensor:
        return w.div(scale).round_().clamp_(qmin, qmax).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """Applies per-tensor fake quantization with a straight-through gradient; `scale`, `zero_point` are rank 0.

    Saturates at the ends of the type, as QuantizeLinear does, even if the range of `spec` is narrower.
    """
    qmin, qmax = spec.type_range
    if x.dtype != torch.float32:  # bfloat16 holds neither the scale nor q·scale
        return fake_quantize(x.float(), scale, zero_point, spec).to(x.dtype)
    # Without training an accelerator has to divide by the scale, as the file does; its fused kernel
    # multiplies by 1/scale.
    if torch.compiler.is_compiling() or (x.device.type != "cpu" and not torch.is_grad_enabled()):
        traced: Tensor = _FakeQuantizeTraced.apply(x, scale, zero_point, qmin, qmax)  # type: ignore[no-untyped-call]
        return traced
    if x.device.type != "cpu":
        # This kernel reads the scale on the device, without a transfer to the host.
        fused: Tensor = _FakeQuantizeOnDevice.apply(x, scale, zero_point, qmin, qmax)  # type: ignore[no-untyped-call]
        return fused
    apply: Any = _FakeQuantizePerTensor.apply
    # The scale is read directly, since on the CPU there is no device to wait for.
    result: Tensor = apply(x, float(scale.numpy()), int(zero_point.numpy()), qmin, qmax)
    return result


@torch.library.custom_op("qatkit::computed_once", mutates_args=())
def _computed_once(x: Tensor) -> Tensor:
    return x.clone()


@_computed_once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def computed_once(x: Tensor) -> Tensor:
    """Returns `x` without a gradient, so that a compiler computes it once, at this place.

    A compiler otherwise inlines `x` into the kernels that read it. The scale of a channel, in float64, would
    then be computed for each of the channel's weights, and again in the backward pass.
    """
    return cast(Tensor, _computed_once(x.detach())) if torch.compiler.is_compiling() else x.detach()


def fake_quantize_weight(w: Tensor, scale: Tensor, spec: QuantSpec, ends: Ends | None = None) -> Tensor:
    """Applies fake quantization to a weight that lies within its range, so that nothing is clipped.

    Args:
        w: the weight, [out, ...].
        scale: the scales, in the granularity's shape.
        spec: spec of the weight.
        ends: the smallest and the largest integer; None: `weight_ends` of `w`.
    """
    apply: Any = _RoundWeight.apply
    column = spec.granularity.spread(computed_once(scale), w.shape)
    result: Tensor = apply(w, column, *(weight_ends(w, spec) if ends is None else ends))
    return result


def weight_scale(w: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the scales of a weight, in the granularity's shape, from the ranges of the values that share a scale.

    Scales are larger where `spec.pairs` requires it (`guarded_scale`).
    """
    return guarded_scale(choose_qparams(*_weight_range(w, spec), spec)[0], w, spec)


def weight_zero_point(w: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the zero points of a weight, int32, in the granularity's shape.

    They do not change if a scale is multiplied by a factor, since this multiplies both ends of its range.
    """
    return choose_qparams(*_weight_range(w, spec), spec)[1]


def weight_ends(w: Tensor, spec: QuantSpec, zero_point: Tensor | None = None) -> Ends:
    """Returns the smallest and largest integer of a weight, counted from its zero point, shaped to broadcast.

    Args:
        w: the weight.
        spec: spec of the weight.
        zero_point: the zero points in the granularity's shape; None: `weight_zero_point`.
    """
    if not spec.has_zero_point:
        return spec.quant_min, spec.quant_max
    zero = weight_zero_point(w, spec) if zero_point is None else zero_point
    column = spec.granularity.spread(computed_once(zero.to(w.dtype)), w.shape)
    return spec.quant_min - column, spec.quant_max - column


def clamped(x: Tensor, ends: Ends) -> Tensor:
    """Returns `x` clamped to `ends`, with the gradient of `torch.clamp`."""
    low, high = cast("tuple[Tensor, Tensor]", ends)
    return torch.clamp(x, low, high)


def _weight_range(w: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest value for each scale, equally far from zero where `spec` is symmetric."""
    w = w.detach()
    values, dims = spec.granularity.grouped(w.abs() if spec.symmetric else w)
    largest = values.amax(dims)
    return (-largest if spec.symmetric else values.amin(dims)), largest


def guarded_scale(scale: Tensor, w: Tensor, spec: QuantSpec) -> Tensor:
    """Returns `scale`; if `spec` guards pairs, raised so that no pair of `w` can saturate (`qatkit.quant.pairs`)."""
    if not spec.guards_pairs:
        return scale
    least = least_scale(w.detach(), per_channel=spec.granularity.separates(0))
    return torch.maximum(scale, along(least.float(), 0, scale.ndim))


def mse_clip(w: Tensor, spec: QuantSpec, *, least: float = 0.4, steps: int = 31) -> Tensor:
    """Returns factors of a weight's `weight_scale` with the least squared error of rounding and clipping.

    With factors below `least`, 2-bit weights have an even smaller error, but clipped weights have no gradient, so
    that training gets worse.

    Args:
        w: the weight, [out, ...].
        spec: spec of the weight.
        least: the smallest factor.
        steps: the number of factors that are tried.

    Returns:
        For each scale one of `steps` factors from 1 to `least`, in the scales' shape.
    """
    w = w.detach()
    full, ends = weight_scale(w, spec), weight_ends(w, spec)
    best, lowest = torch.ones_like(full), torch.full_like(full, torch.inf)
    for factor in torch.linspace(1.0, least, steps).tolist():
        scale = spec.granularity.spread(full * factor, w.shape)
        q = clamped(torch.round(w / scale), ends)
        q = fitted(q, w / scale) if spec.guards_pairs else q
        values, dims = spec.granularity.grouped((q * scale).sub_(w).square_())
        error = values.sum(dims)
        best = torch.where(error < lowest, factor, best)
        lowest = torch.minimum(error, lowest)
    return best


def odd_fraction(multiplier: Tensor, *, up: bool) -> Tensor:
    """Returns a fraction p/q with odd q near `multiplier`, not below it (`up`) or not above it, within 1 %, float64.

    An integer times p/q is at least 1/(2q) away from every k + 1/2, so that small errors do not change its
    rounding (`qatkit.graph.scales.align`). p is 1 for multipliers up to 1/256.
    """
    m = multiplier.double().clamp(min=1e-30)
    p = torch.ceil(256 * m)
    q = p / m
    q = torch.floor((q - 1) / 2 + 1e-6) * 2 + 1 if up else torch.ceil((q - 1) / 2 - 1e-6) * 2 + 1
    return p / q


@torch.library.custom_op("qatkit::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Computes ONNX QuantizeLinear per tensor; the result has the dtype of `zero_point` and saturates at its ends."""
    info = torch.iinfo(zero_point.dtype)
    q = x.div(scale).round_().add_(zero_point.to(x.dtype))
    return q.clamp_(info.min, info.max).to(zero_point.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("qatkit::dequantize", mutates_args=())
def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    """Computes ONNX DequantizeLinear: `scale` and `zero_point` have shape [], or [channels] along `axis`."""
    centred = q.to(scale.dtype) - along(zero_point, axis, q.ndim).to(scale.dtype)
    return centred.mul_(along(scale, axis, q.ndim))


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)
