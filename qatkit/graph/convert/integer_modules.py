"""The modules of a converted graph.

Each module does the same computation in two ways. When it is called, it computes in float32 and float64 exactly what
ONNX Runtime's 8-bit kernel computes, so that the file can be compared with it bit by bit. When it is exported
(`torch.compiler.is_exporting`), it is written as dequantize → operator, which is QDQ.

Source of the kernels' arithmetic: docs/onnxruntime-qdq.md, section 5.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.quant import numerics
from qatkit.quant.granularity import along
from qatkit.quant.qat_layers import QATEmbedding, QATOperator

# From this bias on, the bias plus a sum of products may exceed 2²⁴, the last of float32's exact integers.
_EXACT = 2**22
# Values that a pair computes at once: its intermediate results are float64, several times as large as its inputs.
_PIECE = 2**18


@torch.library.custom_op("qatkit::barrier", mutates_args=())
def barrier(x: Tensor) -> Tensor:
    """Returns x; it is exported as a Sum with one input, which ends ONNX Runtime's QDQ fusions."""
    return x.clone()


@barrier.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class QuantizeDequantize(nn.Module):
    """A quantize and a dequantize with fixed parameters.

    Args:
        scale: [].
        zero_point: [], in the type of the integers.
        ends: the least and the largest integer, to which x is clipped first; None if they are the type's own.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor, ends: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.ends = None if ends is None else tuple(float((end - int(zero_point)) * scale) for end in ends)

    def forward(self, x: Tensor) -> Tensor:
        if self.ends is not None:
            x = torch.clamp(x, *self.ends)
        if x.device.type == "cpu" and not torch.compiler.is_exporting():  # computes the same in one pass
            info, zero = torch.iinfo(self.zero_point.dtype), int(self.zero_point)
            return numerics.to_steps(x, float(self.scale), info.min - zero, info.max - zero)
        q = torch.ops.qatkit.quantize(x, self.scale, self.zero_point)
        return cast(Tensor, torch.ops.qatkit.dequantize(q, self.scale, self.zero_point, 0))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes a·b + c with one rounding to float32; the product of two float32 numbers is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


class QuantizedPair(nn.Module):
    """An operator on two 8-bit tensors; its result is rounded to the steps of the quantizer after it.

    Each intermediate sum and product is rounded as in ONNX Runtime's x86 kernels. The results were the same
    as theirs for all pairs of bytes with 300 sets of parameters.
    """

    scales: Tensor
    zero_points: Tensor

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Stores the parameters.

        Args:
            pairs: (scale [], zero_point []) of a, of b and of the result.
        """
        super().__init__()
        self.register_buffer("scales", torch.stack([scale for scale, _ in pairs]))
        self.register_buffer("zero_points", torch.stack([zero.float() for _, zero in pairs]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self.plain(a, b)
        a, b = torch.broadcast_tensors(a, b)
        made = torch.empty_like(a)
        if made.ndim == 0:
            return self._quantized(a, b)
        axis, count = max(range(made.ndim), key=made.size), made.numel() // _PIECE + 1
        for target, *given in zip(*(x.chunk(count, axis) for x in (made, a, b)), strict=True):
            target.copy_(self._quantized(*given))
        return made

    def _quantized(self, a: Tensor, b: Tensor) -> Tensor:
        """Computes the result of `forward` for one piece of the operands."""
        integers = [torch.round(x / scale) for x, scale in zip((a, b), self.scales, strict=False)]
        steps: Tensor = torch.round(self.kernel(*integers)) - self.zero_points[2]
        return steps * self.scales[2]

    def plain(self, a: Tensor, b: Tensor) -> Tensor:
        """Computes the float operator."""
        raise NotImplementedError

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the unrounded integers of the result from the operands' integers minus zero points."""
        raise NotImplementedError


class QuantizedAdd(QuantizedPair):
    """Add: fma(q_a, r, fma(q_b, t, z_c - fma(r, z_a, t·z_b))) with r = s_a/s_c, t = s_b/s_c."""

    def plain(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        (s_a, s_b, s_c), (z_a, z_b, z_c) = self.scales, self.zero_points
        r, t = s_a / s_c, s_b / s_c
        return _fma(a + z_a, r, _fma(b + z_b, t, z_c - _fma(r, z_a, t * z_b)))


class QuantizedMul(QuantizedPair):
    """Mul: (q_a - z_a)·(q_b - z_b)·(s_a·s_b / s_c) + z_c."""

    def plain(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        s_a, s_b, s_c = self.scales
        product: Tensor = a * b * (s_a * s_b / s_c)
        return product + self.zero_points[2]


class QuantizedHardSigmoid(nn.Module):
    """hardsigmoid(x) = clamp(x + 3, 0, 6) / 6, quantized as x + 3 at scale 6/255 and dequantized at 1/255.

    The two scales contain the division, and the 8-bit range is the clamp. Only an Add remains, which has an 8-bit
    kernel. x = 0, a frequent value, would be a tie (3 / (6/255) = 127.5), which kernels round up or down. The constant
    is therefore 4e-6 smaller than 3, so that they round down like the simulation (float32's 1/255 is above 1/255).
    """

    three: Tensor
    three_scale: Tensor
    three_zero_point: Tensor
    sum_scale: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, input_pair: tuple[Tensor, Tensor], scale: Tensor, zero_point: Tensor) -> None:
        """Stores the parameters.

        Args:
            input_pair: scale [] and zero_point [] of x.
            scale: scale [] of the result.
            zero_point: zero_point [] of the result.
        """
        super().__init__()
        info = torch.iinfo(zero_point.dtype)
        self.register_buffer("three", torch.tensor(info.max, dtype=zero_point.dtype))
        self.register_buffer("three_scale", torch.tensor(3.0 * (1 - 2**-18) / (info.max - info.min)))
        self.register_buffer("three_zero_point", torch.tensor(info.min, dtype=zero_point.dtype))
        self.register_buffer("sum_scale", scale * 6)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        three = (self.three_scale, self.three_zero_point)
        self.add = QuantizedAdd([three, input_pair, (self.sum_scale, zero_point)])

    def forward(self, x: Tensor) -> Tensor:
        dequantize = torch.ops.qatkit.dequantize
        three = dequantize(self.three, self.three_scale, self.three_zero_point, 0)
        # For x + scalar, ONNX Runtime's kernel uses the scalar as the first operand.
        total = x + three if torch.compiler.is_exporting() else self.add(three, x)
        q = torch.ops.qatkit.quantize(total, self.sum_scale, self.zero_point)
        return cast(Tensor, dequantize(q, self.scale, self.zero_point, 0))


class Quantized(nn.Module):
    """A Conv or Linear with an integer weight and an int32, int16 or int8 bias; the bias may be float in the file.

    When called, it sums integers exactly: in float64 if a sum may exceed 2²⁴, as with 16-bit integers, else
    in float32. Each sum is then multiplied once: by s_x·s_w, or by s_x·s_w / s_y before it is rounded to the
    steps of the output.

    Buffers:
        weight: the integers.
        weight_scale, weight_zero_point: [] or [out].
        bias: the integers, [out]; None without a bias.
        bias_scale, bias_zero_point: in the shape of weight_scale; only with a bias.
        bias_multiplier: int32, bias_scale as a multiple of the scale of the sums; None if the two are equal.
        float_bias: the bias in the file if it is float there, [out]; else None.
        input_scale, output_scale: as given.

    Args:
        operator: the prepared operator.
        input_scale: scale [] of the FakeQuantize before it.
        output_scale: scale [] of the FakeQuantize after it; None if the output stays float.
        float_bias: whether the file has a float bias (whose values are still integer multiples of bias_scale).
        input_steps: the largest integer that the input's type can have, minus the smallest.

    Attributes:
        repaired: number of channels whose scale was raised so that the bias fits int32.
        spec: the `QuantSpec` of the weight.
        lost: the largest possible change of a result due to these raised scales, as a fraction of the bias.
        dtype: the type of the weight's integers, a name in `qatkit.quant.spec.DTYPES`.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    bias: Tensor | None
    bias_scale: Tensor
    bias_zero_point: Tensor
    bias_multiplier: Tensor | None
    input_scale: Tensor
    output_scale: Tensor | None
    float_bias: Tensor | None

    def __init__(
        self,
        operator: QATOperator,
        input_scale: Tensor,
        output_scale: Tensor | None,
        *,
        float_bias: bool = False,
        input_steps: int = 255,
    ) -> None:
        super().__init__()
        assert operator.weight_fake_quant is not None
        weight, bias = (None if t is None else t.detach().float() for t in operator.effective())
        assert weight is not None
        found, spec = (
            operator.weight_fake_quant.integers(weight, bias, input_scale),
            operator.weight_fake_quant.spec,
        )
        self.spec, self.lost = spec, found.lost * input_steps
        self.repaired, self.dtype, self.has_zero_point = found.repaired, spec.dtype, spec.has_zero_point
        self.operator, self.is_linear = Settings(operator), isinstance(operator, nn.Linear)
        self.input_steps, self._wide = input_steps, spec.wide or input_steps > 255
        self.register_buffer("input_scale", input_scale.clone())
        self.register_buffer("output_scale", None if output_scale is None else output_scale.clone())
        self.register_buffer("weight", found.weight)
        self.register_buffer("weight_scale", found.scale)
        self.register_buffer("weight_zero_point", found.zero_point)
        self.register_buffer("bias", None)
        self.register_buffer("float_bias", None)
        self.register_buffer("bias_multiplier", None)
        if found.bias is not None:
            kind = getattr(torch, spec.bias_dtype) if spec.narrow_bias else torch.int32
            self.register_buffer("bias", found.bias.to(kind))
            self.register_buffer("bias_scale", found.bias_scale)
            self.register_buffer("bias_zero_point", torch.zeros_like(found.bias_scale, dtype=kind))
            if spec.narrow_bias:
                self.bias_multiplier = found.bias_multiplier.to(torch.int32)
            elif float_bias or spec.bias_dtype == "float":
                self.float_bias = (found.bias * found.bias_scale.double()).float()

    def forward(self, x: Tensor) -> Tensor:
        return self._explicit(x) if torch.compiler.is_exporting() else self._integer(x)

    def widen(self, inputs: int, outputs: int) -> None:
        """Appends channels with weights and biases of 0 to a convolution; the other results stay the same.

        Args:
            inputs, outputs: numbers of channels to append; equal for a depthwise convolution.
        """
        settings: Any = self.operator.bare
        settings.in_channels += inputs
        settings.out_channels += outputs
        if settings.groups > 1:
            settings.groups, inputs = settings.in_channels, 0
        around, kind, counted = [0, 0] * (self.weight.ndim - 2), self.weight.dtype, self._counted(torch.int32)
        for name in ("bias", "float_bias"):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, F.pad(given, [0, outputs]))
        for name in ("weight_scale", "weight_zero_point", "bias_scale", "bias_zero_point", "bias_multiplier"):
            given = getattr(self, name, None)
            if given is not None and given.ndim:  # zeros may have any scale
                setattr(self, name, torch.cat([given, given[-1:].expand(outputs)]))
        counted = F.pad(counted, [*around, 0, inputs, 0, outputs])
        self.weight = (counted + along(self.weight_zero_point, 0, counted.ndim)).to(kind)

    def _counted(self, kind: torch.dtype) -> Tensor:
        """Returns the integers of the weight minus the zero point, in type `kind`."""
        weight = self.weight.to(kind)
        return weight - along(self.weight_zero_point, 0, weight.ndim) if self.has_zero_point else weight

    def _integer(self, x: Tensor) -> Tensor:
        channel = -1 if self.is_linear else 1
        whole, weight = x.div(self.input_scale).round_(), self._counted(x.dtype)
        # Sums of 16-bit products, or of products with weights of one sign, may exceed float32's exact integers.
        wide = self.has_zero_point or self._wide
        wide = wide and float(weight.abs().flatten(1).sum(1).max()) * self.input_steps >= 2**24
        kind = torch.float64 if wide else x.dtype
        total = self.operator.infer(
            whole.to(kind), weight.to(kind), None
        )  # nothing else reads it, so it may be changed in place
        if self.bias is not None:
            steps = self.bias.to(torch.int32)
            steps = steps if self.bias_multiplier is None else steps * self.bias_multiplier
            bias = along(steps, channel, total.ndim)
            wide = wide or bool(steps.abs().max() >= _EXACT)
            total = total.double() + bias if wide else total.add_(bias)
        total = total.to(x.dtype)
        scale = self.weight_scale * self.input_scale
        if self.output_scale is None:
            return total.mul_(along(scale, channel, total.ndim))
        # Round here, after a single multiplication as in ONNX Runtime; the pair after the operator clamps.
        steps = total.mul_(along(scale / self.output_scale, channel, total.ndim)).round_()
        return steps.mul_(self.output_scale)

    def _explicit(self, x: Tensor) -> Tensor:
        dequantize = torch.ops.qatkit.dequantize
        weight = dequantize(self.weight, self.weight_scale, self.weight_zero_point, 0)
        bias = self.float_bias
        if bias is None and self.bias is not None:
            bias = dequantize(self.bias, self.bias_scale, self.bias_zero_point, 0)
        return self.operator(x, weight, bias)


class QuantizedEmbedding(nn.Module):
    """An Embedding with a table of integers: rows of bytes are looked up, and each is multiplied by its scale.

    Buffers:
        weight: the integers in bytes, [rows, values].
        weight_scale: [rows, 1].
        weight_zero_point: [rows, 1]; None if the type has no zero points.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None

    def __init__(self, embedding: QATEmbedding) -> None:
        super().__init__()
        table = embedding.weight.detach().float()
        found = embedding.weight_fake_quant.integers(table, None, torch.ones(()))
        of_rows = [one.expand(len(table)).clone()[:, None] for one in (found.scale, found.zero_point)]
        self.register_buffer("weight", found.weight)
        self.register_buffer("weight_scale", of_rows[0])
        has_zero_point = embedding.weight_fake_quant.spec.has_zero_point
        self.register_buffer("weight_zero_point", of_rows[1] if has_zero_point else None)

    def forward(self, rows: Tensor) -> Tensor:
        looked_up = F.embedding(rows, self.weight).float()
        if self.weight_zero_point is not None:
            looked_up = looked_up - F.embedding(rows, self.weight_zero_point).float()
        return looked_up * F.embedding(rows, self.weight_scale)


class Settings:
    """An operator's settings without its parameters.

    This is no nn.Module, so that it adds no names and no state to the module that has it.
    """

    def __init__(self, operator: QATOperator) -> None:
        self.bare = copy.copy(operator)
        self.bare._parameters, self.bare._modules = {"weight": None, "bias": None}, {}
        self.bare.bn = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.bare.run(x, weight, bias)

    def infer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the operator for inference; float32 2-D convolutions padded with zeros use oneDNN on the CPU.

        With one thread, a 1x1 kernel and fewer than 16 images, torch would choose an implementation that takes
        twice as long.
        """
        bare: Any = self.bare
        plain = (
            isinstance(bare, nn.Conv2d) and bare.padding_mode == "zeros" and isinstance(bare.padding, tuple)
        )
        known = x.ndim == 4 and x.numel() and x.dtype == torch.float32 and x.device.type == "cpu"
        if not (plain and known and torch.backends.mkldnn.is_available()):
            return self(x, weight, bias)
        return torch.mkldnn_convolution(
            x, weight, bias, bare.padding, bare.stride, bare.dilation, bare.groups
        )
