"""The specification of a quantized tensor: number type, symmetry, granularity; plain data without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from qatkit.quant.formats.table import FORMATS, Format
from qatkit.quant.granularity import Granularity, PerTensor
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    import torch

# The reason for an operator that computes in float although its weights are bytes in the file.
WEIGHT_ONLY = "weight-only int8"
# Reasons for operators that compute in float between pairs, which is not a mistake in the file.
SIXTEEN_BITS = "it reads or makes 16-bit values, which ONNX Runtime computes in float and rounds"
NARROW_BIAS = (
    "its bias has fewer than 32 bits, for which ONNX Runtime has no kernel (it has one for bias_dtype=int32)"
)
COMPUTED_IN_FLOAT = (SIXTEEN_BITS, NARROW_BIAS)
RECURRENT_WEIGHTS = f"{WEIGHT_ONLY}: ONNX Runtime has no int8 kernel for it"


class Kind(StrEnum):
    """The spacing of the values of a number type."""

    INTEGER = "integer"  # evenly, one scale apart


@dataclass(frozen=True)
class NumberType:
    """A number type and its properties.

    Attributes:
        low, high: the smallest and largest value, at which quantization saturates.
        storage: the name of the PyTorch type that holds its values. The integers may fill only a part of this
            type; a QuantizeLinear saturates at the ends of its output type, so such an activation is clipped
            first.
        kind: the spacing of its values.
    """

    low: int
    high: int
    storage: str
    kind: Kind

    @property
    def signed(self) -> bool:
        """Returns whether the type has negative values."""
        return self.low < 0

    @property
    def wide(self) -> bool:
        """Returns whether the type has more than 8 bits, which no kernel multiplies."""
        return self.high - self.low > 255


DTYPES = {
    "uint8": NumberType(0, 255, "uint8", Kind.INTEGER),
    "int8": NumberType(-128, 127, "int8", Kind.INTEGER),
    "int4": NumberType(-8, 7, "int8", Kind.INTEGER),
    "int3": NumberType(-4, 3, "int8", Kind.INTEGER),
    "int2": NumberType(-2, 1, "int8", Kind.INTEGER),
    "uint4": NumberType(0, 15, "uint8", Kind.INTEGER),
    "int16": NumberType(-32768, 32767, "int16", Kind.INTEGER),
    "uint16": NumberType(0, 65535, "uint16", Kind.INTEGER),
}
_HELD = tuple(name for name, row in DTYPES.items() if row.kind is Kind.INTEGER and row.storage == name)
# Types that kernels compute with; they have the name of their storage.
WHOLE = tuple(name for name in _HELD if not DTYPES[name].wide)
# Integers of 16 bits: the file holds and rounds to them, and ONNX Runtime multiplies the dequantized floats.
WIDE = tuple(name for name in _HELD if DTYPES[name].wide)
# Types of weights with at most 4 bits; they are stored in bytes, so that the kernels for `WHOLE` can read
# them.
FEW_BITS = tuple(name for name in DTYPES if name not in _HELD)
# Types of activations. uint4 is simulated in float, wherever the file runs.
ACTIVATIONS = (*WHOLE, "uint4", *WIDE)
# Types of weights that an override may name.
SIGNED = tuple(name for name, row in DTYPES.items() if row.signed)
# Number formats other than integers, in blocks or not (`qatkit.quant.formats`).
FORMAT_NAMES = tuple(FORMATS)
# Types that hold scales of weights; uint8 has a scale of its own for each output channel
# (`qatkit.quant.held_scales`).
SCALE_TYPES = ("float32", "float16", "uint8")
# Restrictions on the values of scales (`qatkit.quant.scale_types`).
SCALE_VALUES = ("float", "pow2", "float16", "int16")
# Types that hold biases (`qatkit.quant.bias_types`).
BIAS_TYPES = ("int32", "int16", "int8", "float")
# Types of biases with a scale of their own, which no kernel of ONNX Runtime supports.
NARROW_BIASES = ("int16", "int8")
# Largest sum of two weights of one sign whose products with uint8 activations fit into 16 bits: 255 · 128 <
# 2¹⁵.
PAIR_LIMIT = 128


@dataclass(frozen=True)
class QuantSpec:
    """The specification of the quantization of one tensor.

    Attributes:
        dtype: a name in `DTYPES`, or in `FORMATS` of `qatkit.quant.formats.table`; formats have no integers,
            so that of the other attributes only `granularity` applies to them.
        symmetric: whether zero is the middle of the range, equally far from both ends. For a signed type the
            range is then narrow (int8: -127..127; int2: -1, 0 and 1), and zero_point is 0.
        granularity: the granularity, which defines the elements that share a scale; an activation has one
            scale.
        reduce_range: whether the type loses one bit (0..127, -64..63, symmetric -63..63). On x86 without VNNI
            the int8 kernels add pairs of products in 16 bits and may saturate; with 7-bit weights they cannot.
        pairs: whether the scales of a weight are chosen so that no pair of products can saturate in such a
            kernel, with any activations (`qatkit.quant.pairs`), as with `backend.reduce_range=auto`.
            Asymmetric weights that `may_saturate` are refused.
        scale_dtype: the type in `SCALE_TYPES` that holds the scales of a weight.
        scale_type: the values that scales may have: "float" (any), or for integers only "pow2" (powers of
            two), "float16" (numbers of float16) or "int16" (15-bit integers times powers of two).
        bias_dtype: the type in `BIAS_TYPES` that holds the bias of a weight's operator.

    Raises:
        ValueError: a name is unknown, the granularity is of another type, or `scale_type` does not fit the types.
        ConfigError: `pairs` is set for asymmetric weights that may saturate.
    """

    dtype: str = "uint8"
    symmetric: bool = False
    granularity: Granularity = field(default_factory=PerTensor)
    reduce_range: bool = False
    pairs: bool = False
    scale_dtype: str = "float32"
    scale_type: str = "float"
    bias_dtype: str = "int32"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, (*DTYPES, *FORMAT_NAMES)),
            ("scale_dtype", self.scale_dtype, SCALE_TYPES),
            ("scale_type", self.scale_type, SCALE_VALUES),
            ("bias_dtype", self.bias_dtype, BIAS_TYPES),
        ):
            if value not in known:
                raise ValueError(f"{name}={value}: expected one of {', '.join(known)}")
        if not isinstance(self.granularity, Granularity):
            allowed = "PerTensor(), PerChannel(axis) or PerBlock(size) of qatkit.quant.granularity"
            raise ValueError(f"granularity={self.granularity!r}: expected {allowed}")
        if not self.any_scale and (self.form is not None or self.scale_dtype == "uint8"):
            value = self.dtype if self.form is not None else f"scale_dtype={self.scale_dtype}"
            allowed = f"float with {value}, which has its own type of scales"
            raise ValueError(f"scale_type={self.scale_type}: expected {allowed}")
        if self.guards_pairs and not self.symmetric:
            allowed = f"false or true (7 bits), since auto cannot guard asymmetric {self.dtype} weights"
            raise ConfigError("backend.reduce_range", "auto", allowed)

    @property
    def any_scale(self) -> bool:
        """Returns whether scales may be any float32."""
        return self.scale_type == "float"

    @property
    def powers_of_two(self) -> bool:
        """Returns whether all scales are powers of two."""
        return self.scale_type == "pow2"

    @property
    def narrow_bias(self) -> bool:
        """Returns whether biases are integers of fewer bits than the accumulator, with a scale of their own."""
        return self.bias_dtype in NARROW_BIASES

    @property
    def form(self) -> Format | None:
        """The number format; None for integers."""
        return FORMATS.get(self.dtype)

    def along(self, axis: int) -> QuantSpec:
        """Returns the spec of a tensor whose blocks lie along `axis`; a spec of integers unchanged."""
        return self if self.form is None else replace(self, granularity=self.form.granularity(axis))

    @property
    def number_type(self) -> NumberType:
        """The row of `DTYPES`."""
        return DTYPES[self.dtype]

    @property
    def wide(self) -> bool:
        """Returns whether its integers have more than 8 bits, which no kernel multiplies."""
        return self.form is None and self.number_type.wide

    @property
    def bits(self) -> int:
        """The number of bits that an integer of the type takes."""
        return (self.number_type.high - self.number_type.low).bit_length()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the tensors that hold the integers."""
        import torch

        found: torch.dtype = getattr(torch, self.number_type.storage)
        return found

    @property
    def differences(self) -> torch.dtype:
        """The smallest tensor type that holds the difference of any two integers."""
        import torch

        kinds = (torch.int8, torch.int16, torch.int32)
        return next(k for k in kinds if self.quant_max - self.quant_min <= torch.iinfo(k).max)

    @property
    def counted(self) -> torch.dtype:
        """The smallest tensor type that holds integers counted from a zero point."""
        import torch

        smallest = torch.int16 if self.wide else torch.int8
        return (torch.int32 if self.wide else torch.int16) if self.has_zero_point else smallest

    @property
    def type_range(self) -> tuple[int, int]:
        """The ends of the type, at which quantization saturates whatever the chosen range."""
        return self.number_type.low, self.number_type.high

    @property
    def quant_min(self) -> int:
        row = self.number_type
        if self.symmetric and row.signed:
            return -self.quant_max
        return row.low // 2 if self.reduce_range else row.low

    @property
    def quant_max(self) -> int:
        high = self.number_type.high
        return high // 2 if self.reduce_range else high

    @property
    def has_zero_point(self) -> bool:
        """Returns whether integers are counted from a zero point that may differ from 0."""
        return self.form is None and not (self.symmetric and self.number_type.signed)

    @property
    def may_saturate(self) -> bool:
        """Returns whether the sum of two products can saturate if both weights are the largest integer.

        Kernels for unsigned or 16-bit weights do not add such pairs in 16 bits.
        """
        narrow = self.form is None and not self.wide
        return narrow and self.number_type.signed and 2 * self.quant_max > PAIR_LIMIT

    @property
    def guards_pairs(self) -> bool:
        """Returns whether `pairs` is set and pairs could saturate."""
        return self.pairs and self.may_saturate
