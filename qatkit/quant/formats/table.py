"""The table of number formats, as plain data without tensors or PyTorch.

A format is an element type together with the way in which elements share scales. An element has a sign,
exponent bits and mantissa bits; with biased exponent e and mantissa m its value is

    e > 0    ± 2^(e - bias) · (1 + m / 2^mantissa_bits)
    e = 0    ± 2^(1 - bias) · m / 2^mantissa_bits            (denormal)

An 8-bit integer with steps of 1/64, as in MXINT8, has exactly these values with one exponent bit, six
mantissa bits and a bias of 1, except that it has -2 and no negative zero.

Sources: IEEE 754-2019 (float16); OCP "8-bit Floating Point Specification (OFP8)" 1.0, 2023 (float8); OCP "Microscaling
Formats (MX) Specification" 1.0, 2023 (element types of 6, 4 and 8 bits, E8M0, MX formats); AMD Quark's operator
BFPQuantizeDequantize (BFP16: bit_width 16, block_size 8); NVIDIA, "Pretraining Large Language Models with NVFP4", 2025.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from qatkit.quant.granularity import AlongAxis, Granularity, PerTensor


class Specials(StrEnum):
    """The bit patterns that are not numbers."""

    IEEE = "ieee"  # the highest exponent: infinities (mantissa 0) and NaNs
    NAN = "nan"  # only the pattern of all ones
    NONE = "none"


class Scale(StrEnum):
    """The type of the scale of an element."""

    NONE = "none"
    FLOAT32 = "float32"  # one scale for the tensor
    E8M0 = "e8m0"  # one scale for each block: a power of two from 2^-127 to 2^127, or NaN
    E4M3 = "float8_e4m3fn"  # one scale for each block, and a float32 scale for the tensor


@dataclass(frozen=True)
class Element:
    """A number type of a few bits.

    Attributes:
        exponent_bits, mantissa_bits: numbers of bits, without the sign.
        bias: bias of the exponent.
        specials: the bit patterns that are not numbers.
        saturates: whether a number beyond the largest becomes the largest; if not, it becomes infinity, as in IEEE
            754. OFP8 allows both, and saturation is that of ONNX's QuantizeLinear, where infinities saturate
            too. MX requires saturation.
        integer: whether elements are stored in two's complement, where zero has no sign. The negative number
            without a positive counterpart is not used, as the MX specification allows (5.3.4).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = Specials.NONE
    saturates: bool = True
    integer: bool = False

    @property
    def bits(self) -> int:
        """The number of bits of an element, including its sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest normal number; denormals have its spacing."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        """The exponent of `maximum`, called emax in the MX specification."""
        return (1 << self.exponent_bits) - 1 - (self.specials is Specials.IEEE) - self.bias

    @property
    def maximum(self) -> float:
        """The largest finite number."""
        mantissa = (1 << self.mantissa_bits) - 1 - (self.specials is Specials.NAN)
        return math.ldexp(1 + mantissa / (1 << self.mantissa_bits), self.largest_exponent)

    @property
    def limit(self) -> float:
        """The smallest absolute value that saturates: half a step above the largest number."""
        return self.maximum + math.ldexp(1.0, self.largest_exponent - self.mantissa_bits - 1)

    @property
    def least(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.least_exponent - self.mantissa_bits)


@dataclass(frozen=True)
class Format:
    """A number format of a tensor's values.

    Attributes:
        element: the type of each value.
        scale: the type of the scales.
        block: number of elements that share a scale; None: one scale for the tensor, or no scale.
    """

    element: Element
    scale: Scale = Scale.NONE
    block: int | None = None

    @property
    def has_tensor_scale(self) -> bool:
        """Returns whether the tensor has a float32 scale of its own."""
        return self.scale in (Scale.FLOAT32, Scale.E4M3)

    @property
    def bits(self) -> float:
        """The number of bits per element, including its share of the 8-bit scale of its block."""
        return self.element.bits + (0 if self.block is None else 8 / self.block)

    def granularity(self, axis: int) -> Granularity:
        """Returns the granularity, with blocks along `axis`."""
        return PerTensor() if self.block is None else AlongAxis(self.block, axis)

    @property
    def reach(self) -> float:
        """The largest number that a format with a tensor scale can represent if that scale is 1."""
        return self.element.maximum * (E4M3.maximum if self.scale is Scale.E4M3 else 1.0)


FLOAT16 = Element(5, 10, 15, Specials.IEEE, saturates=False)
BFLOAT16 = Element(8, 7, 127, Specials.IEEE, saturates=False)
E4M3 = Element(4, 3, 7, Specials.NAN)
E5M2 = Element(5, 2, 15, Specials.IEEE)
E2M3 = Element(2, 3, 1)
E3M2 = Element(3, 2, 3)
E2M1 = Element(2, 1, 1)
INT8 = Element(1, 6, 1, integer=True)

FORMATS = {
    "float16": Format(FLOAT16),
    "bfloat16": Format(BFLOAT16),
    "float8_e4m3fn": Format(E4M3, Scale.FLOAT32),
    "float8_e5m2": Format(E5M2, Scale.FLOAT32),
    "bfp16": Format(INT8, Scale.E8M0, 8),
    "mxint8": Format(INT8, Scale.E8M0, 32),
    "mxfp8_e4m3": Format(E4M3, Scale.E8M0, 32),
    "mxfp8_e5m2": Format(E5M2, Scale.E8M0, 32),
    "mxfp6_e2m3": Format(E2M3, Scale.E8M0, 32),
    "mxfp6_e3m2": Format(E3M2, Scale.E8M0, 32),
    "mxfp4": Format(E2M1, Scale.E8M0, 32),
    "nvfp4": Format(E2M1, Scale.E4M3, 16),
}

# Formats without a scale, and formats that ONNX Runtime's DequantizeLinear accepts, with their first opset.
UNSCALED = tuple(name for name, form in FORMATS.items() if form.scale is Scale.NONE)
DEQUANTIZED = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 19),
    **dict.fromkeys(("mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "bfp16"), 21),
}
