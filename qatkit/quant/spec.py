"""What a quantized tensor is: number type, symmetry, granularity. Plain data; neither tensors nor PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NumberType:
    """An integer type.

    Attributes:
        low, high: its ends, at which a quantization saturates.
        storage: the PyTorch type that holds it, by name. Its integers may fill a part of it; a QuantizeLinear
            saturates at the ends of what it yields, so an activation of such a type is clipped before it.
    """

    low: int
    high: int
    storage: str


DTYPES = {
    "uint8": NumberType(0, 255, "uint8"),
    "int8": NumberType(-128, 127, "int8"),
    "int4": NumberType(-8, 7, "int8"),
    "int3": NumberType(-4, 3, "int8"),
    "int2": NumberType(-2, 1, "int8"),
    "uint4": NumberType(0, 15, "uint8"),
}
# Those that kernels compute with: named as what holds them.
WHOLE = tuple(name for name, kind in DTYPES.items() if kind.storage == name)
# Of weights that fit into 4 bits and are kept in bytes, which those kernels take.
FEW_BITS = tuple(name for name, kind in DTYPES.items() if kind.storage == "int8" and name not in WHOLE)
# Of activations: these, and what is simulated, in float, wherever the file runs.
ACTIVATIONS = (*WHOLE, "uint4")
# Of weights: symmetric around zero, as ONNX Runtime's kernels want them.
SIGNED = tuple(name for name, kind in DTYPES.items() if kind.low < 0)
# The largest sum of two weights of one sign whose products with uint8 activations fit into 16 bits: 255 · 128 < 2¹⁵.
PAIR_LIMIT = 128
GRANULARITIES = ("per_tensor", "per_channel")


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized.

    Attributes:
        dtype: a name in `DTYPES`.
        symmetric: real zero sits at the middle of the range and the two ends are equally far from it. For a
            signed type the range is then narrow (int8: -127..127; int2: -1, 0 and 1), and zero_point is 0.
        granularity: "per_tensor", or "per_channel" along the operator's output-channel axis (weights).
        reduce_range: give up one bit (0..127, -64..63). On x86 without VNNI the int8 kernels add pairs of
            products in 16 bits and saturate; 7-bit weights cannot.
        pairs: of a weight: no two integers that such a kernel adds up can saturate, whatever their activations
            (`qatkit.quant.pairs`). 7 bits or fewer cannot anyway.
    """

    dtype: str = "uint8"
    symmetric: bool = False
    granularity: str = "per_tensor"
    reduce_range: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: expected one of {', '.join(DTYPES)}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity}: expected one of {', '.join(GRANULARITIES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the tensors that hold it."""
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype].storage)
        return found

    @property
    def type_range(self) -> tuple[int, int]:
        """The ends of the type, at which a quantization saturates whatever the range chosen."""
        return DTYPES[self.dtype].low, DTYPES[self.dtype].high

    @property
    def quant_min(self) -> int:
        low, _ = self.type_range
        if self.symmetric and low < 0:
            return -self.quant_max
        return low // 2 if self.reduce_range else low

    @property
    def quant_max(self) -> int:
        _, high = self.type_range
        return high // 2 if self.reduce_range else high

    @property
    def guards_pairs(self) -> bool:
        """Whether there are pairs to keep from saturating: two of the largest integers would."""
        return self.pairs and 2 * self.quant_max > PAIR_LIMIT

    @property
    def per_channel(self) -> bool:
        return self.granularity == "per_channel"
