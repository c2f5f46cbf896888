"""What a quantized tensor is: dtype, symmetry, granularity. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qatkit.config.fields import choices_of
from qatkit.config.schema import OverrideConfig

DTYPES: dict[str, tuple[torch.dtype, int, int]] = {
    "uint8": (torch.uint8, 0, 255),
    "int8": (torch.int8, -128, 127),
}
GRANULARITIES = choices_of(OverrideConfig, "weight_granularity")


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized.

    Attributes:
        dtype: "uint8" or "int8".
        symmetric: real zero sits at the middle of the range and the two ends are equally far from it. For
            int8 the range is then narrow, -127..127, and zero_point is 0.
        granularity: "per_tensor", or "per_channel" along the operator's output-channel axis (weights).
        reduce_range: give up one bit (0..127, -64..63). On x86 without VNNI the int8 kernels add pairs of
            products in 16 bits and saturate; 7-bit weights cannot.
    """

    dtype: str = "uint8"
    symmetric: bool = False
    granularity: str = "per_tensor"
    reduce_range: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: one of {', '.join(DTYPES)}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity}: one of {', '.join(GRANULARITIES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype][0]

    @property
    def quant_min(self) -> int:
        if self.reduce_range:
            return 0 if self.dtype == "uint8" else -63 if self.symmetric else -64
        return -127 if self.symmetric and self.dtype == "int8" else DTYPES[self.dtype][1]

    @property
    def quant_max(self) -> int:
        return (127 if self.dtype == "uint8" else 63) if self.reduce_range else DTYPES[self.dtype][2]

    @property
    def per_channel(self) -> bool:
        return self.granularity == "per_channel"
