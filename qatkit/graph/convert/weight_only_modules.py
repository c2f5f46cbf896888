"""Operators of a converted graph with quantized weights and float activations; the weights are packed in the file.

    Linear, 4 bits or fewer    com.microsoft MatMulNBits, whose kernel multiplies by the packed weight
    Embedding                  rows of the packed table are looked up, and unpacked by operators of opset 13
    all others                 the weight is unpacked by these operators; their inputs are constants, so ONNX Runtime
                               computes them once, when it loads the file

A weight [out, inputs] is stored as unsigned integers, block by block: u = q + 2^(bits - 1), where q is the integer of
`WeightFakeQuantize`. The lowest bits of a byte come first. A shorter last block is padded with zeros. A row shorter
than a block keeps its length unless MatMulNBits reads it.

3 bits are stored in 4, since MatMulNBits has no kernel for them. For MatMulNBits, scales per output channel are
repeated for blocks of 128. It is not used for 8 bits, with which it takes many times as long as float. Scales in other
types than float32 (`qatkit.quant.held_scales`) are converted by a Cast and a Mul of constants, which ONNX Runtime
computes when it loads the file.

Source: the definition of MatMulNBits in onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.convert.integer_modules import Settings
from qatkit.quant.granularity import PerBlock
from qatkit.quant.held_scales import decoded, encoded
from qatkit.quant.qat_layers import QATEmbedding, QATOperator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

HELD_IN = {"int8": 8, "int4": 4, "int3": 4, "int2": 2}  # bits in the file
_REPEATED = 128  # size of the blocks for which the scale of a channel is repeated


def packed(integers: Tensor, bits: int) -> Tensor:
    """Packs unsigned integers [..., n] of `bits` bits into bytes [..., ceil(n · bits / 8)], lowest bits first."""
    each = 8 // bits
    filled = F.pad(integers, [0, -integers.shape[-1] % each]).unflatten(-1, (-1, each)).to(torch.int32)
    places = torch.arange(each, dtype=torch.int32) * bits
    joined: Tensor = (filled << places).sum(-1)
    return joined.to(torch.uint8)


def unpacked(held: Tensor, bits: int) -> Tensor:
    """Returns the integers that `packed` stored, in float32, including the zeros that fill the last byte."""
    each = 8 // bits
    places = torch.arange(each, dtype=torch.int32) * bits
    found: Tensor = (held.to(torch.int32)[..., None] >> places) & (2**bits - 1)
    return found.flatten(-2).float()


class _Packed(nn.Module):
    """A weight as packed integers.

    Buffers:
        weight: the packed integers, [out, blocks, bytes of a block].
        weight_scale: [out, blocks], in the type of the file.
        weight_scale_unit: the unit of uint8 scales, [out, 1] or [1, 1]; None for other types.
        weight_zero_point: the packed zero points, [out, bytes]; None if the weight has none.

    Args:
        weight: the weight [out, ...] that inference uses.
        fake: its quantizer, with scales per tensor, per output channel or per block.
        repeats: whether scales per tensor or channel are repeated for the blocks of MatMulNBits.

    Attributes:
        dtype: the type of the integers, a name in `qatkit.quant.spec.DTYPES`.
        bits: the bits of an integer in the file.
        shape: the shape of the weight.
        inputs: number of values of an output channel.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_unit: Tensor | None
    weight_zero_point: Tensor | None

    def __init__(self, weight: Tensor, fake: WeightFakeQuantize, *, repeats: bool = False) -> None:
        super().__init__()
        spec, found = fake.spec, fake.integers(weight, None, torch.ones(()))
        self.dtype, self.bits, self.shape = spec.dtype, HELD_IN[spec.dtype], tuple(weight.shape)
        self.inputs = math.prod(self.shape[1:])
        blocks = isinstance(spec.granularity, PerBlock)
        size = spec.granularity.size if isinstance(spec.granularity, PerBlock) else self.inputs
        if not repeats:
            size = min(size, self.inputs)  # a row shorter than a block is not padded
        elif not blocks:
            size = _REPEATED
        count, middle = -(-self.inputs // size), 2 ** (self.bits - 1)

        def by_block(of_rows: Tensor) -> Tensor:
            return of_rows if blocks else of_rows.reshape(-1, 1).expand(len(weight), count).clone()

        codes = found.weight.flatten(1).to(torch.int32) + middle
        codes = F.pad(codes, [0, count * size - self.inputs], value=middle)
        self.register_buffer("weight", packed(codes.unflatten(1, (count, size)), self.bits))
        scale, unit = encoded(found.scale.float(), spec.scale_dtype)
        self.register_buffer("weight_scale", by_block(scale))
        self.register_buffer("weight_scale_unit", None if unit is None else unit.reshape(-1, 1))
        zero = by_block(found.zero_point).to(torch.int32) + middle
        self.register_buffer("weight_zero_point", packed(zero, self.bits) if spec.has_zero_point else None)

    def rows(self, weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """Returns some output channels of the weight in float32, [..., inputs].

        Args:
            weight: the rows of the buffer `weight` for these channels.
            scale: the scales of these rows in float32, [..., blocks].
            zero_point: the packed zero points of these rows, or None.
        """
        exporting = torch.compiler.is_exporting()
        unpack = torch.ops.qatkit.unpack if exporting else unpacked
        zero: Tensor | float = float(2 ** (self.bits - 1))
        if zero_point is not None:
            zero = unpack(zero_point, self.bits)[..., : self.weight.shape[1], None]
        counted = (unpack(weight, self.bits) - zero) * scale[..., None]
        return counted.flatten(-2)[..., : self.inputs]

    def scales(self) -> Tensor:
        """Returns the scales in float32, [out, blocks]."""
        return decoded(self.weight_scale, self.weight_scale_unit)

    def values(self) -> Tensor:
        """Returns the weight in float32, in its original shape."""
        return self.rows(self.weight, self.scales(), self.weight_zero_point).reshape(self.shape)


class WeightOnly(_Packed):
    """A Conv or Linear with an integer weight, float activations and a float bias [out], which is a buffer.

    Args:
        operator: the prepared operator, without a FakeQuantize before it.

    Attributes:
        multiplies_packed: whether the file multiplies by the packed weight (MatMulNBits).
    """

    bias: Tensor | None

    def __init__(self, operator: QATOperator) -> None:
        fake = operator.weight_fake_quant
        assert fake is not None
        weight, bias = (None if t is None else t.detach().float() for t in operator.effective())
        assert weight is not None
        multiplies_packed = isinstance(operator, nn.Linear) and HELD_IN[fake.spec.dtype] < 8
        super().__init__(weight, fake, repeats=multiplies_packed)
        self.operator, self.multiplies_packed = Settings(operator), multiplies_packed
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return self.operator.infer(x, self.values(), self.bias)
        if not self.multiplies_packed:
            return self.operator(x, self.values(), self.bias)
        given = [x, self.weight, self.scales()]
        if self.weight_zero_point is not None:
            given.append(self.weight_zero_point)
        settings: dict[str, Any] = {
            "K": self.inputs,
            "N": len(self.weight),
            "bits": self.bits,
            "block_size": self.weight.shape[2] * 8 // self.bits,
        }
        shape = (*x.shape[:-1], len(self.weight))
        y = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits", given, settings, dtype=x.dtype, shape=shape, version=1
        )
        return y if self.bias is None else y + self.bias


class PackedEmbedding(_Packed):
    """An Embedding whose table [rows, values] is packed: rows of bytes are looked up, then unpacked."""

    def __init__(self, embedding: QATEmbedding) -> None:
        super().__init__(embedding.weight.detach().float(), embedding.weight_fake_quant)

    def forward(self, places: Tensor) -> Tensor:
        zero = None if self.weight_zero_point is None else self.weight_zero_point[places]
        unit = self.weight_scale_unit
        if unit is not None and len(unit) > 1:
            unit = unit[places]
        return self.rows(self.weight[places], decoded(self.weight_scale[places], unit), zero)


@torch.library.custom_op("qatkit::unpack", mutates_args=())
def unpack(held: Tensor, bits: int) -> Tensor:
    """Computes `unpacked`; the file has a Cast for 8 bits and a lookup in a table of 256 rows for fewer bits."""
    return unpacked(held, bits)


@unpack.register_fake
def _(held: Tensor, bits: int) -> Tensor:
    return held.new_empty((*held.shape[:-1], held.shape[-1] * 8 // bits), dtype=torch.float32)


def table(bits: int) -> Tensor:
    """Returns the integers that are packed in each byte, float32 [256, 8 / bits]."""
    return unpacked(torch.arange(256, dtype=torch.uint8)[:, None], bits)
