"""Modules of a converted graph for values in number formats (`qatkit.quant.formats`).

Weights are float32 numbers that their format can represent, and a Conv or Linear computes with them in float. An
activation is rounded by a function that is defined in the file, in the domain `qatkit` and with the name of the format
(`qatkit.export.format_functions`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qatkit.quant.formats.blocks import quantized
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize
from qatkit.quant.formats.table import FORMATS, Format
from qatkit.quant.qat_layers import QATOperator, plain_operator

DOMAIN = "qatkit"  # domain of the functions in the file


class RoundToFormat(nn.Module):
    """Rounds x to the numbers of a format.

    Buffers:
        scale: the scale [] of the whole tensor; None if the format has none.
    """

    scale: Tensor | None

    def __init__(self, quantizer: FormatFakeQuantize) -> None:
        super().__init__()
        spec = quantizer.spec
        assert spec.form is not None
        self.dtype, self.form, self.granularity = spec.dtype, spec.form, spec.granularity
        self.axis = getattr(spec.granularity, "axis", None)
        self.register_buffer("scale", quantizer.shipped()[0] if spec.form.has_tensor_scale else None)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            scale = torch.ones((), device=x.device) if self.scale is None else self.scale
            return quantized(x, self.form, self.granularity, scale)[0]
        given = [x] if self.scale is None else [x, self.scale]
        settings = {} if self.axis is None else {"axis": self.axis}
        name = f"{DOMAIN}::{self.dtype}"
        return torch.onnx.ops.symbolic(name, given, settings, dtype=x.dtype, shape=x.shape, version=1)


@dataclass(frozen=True)
class HeldWeight:
    """The parts of a rounded weight, for a file that packs it.

    Attributes:
        dtype: the name of its format in `FORMATS`.
        axis: the axis along which its blocks lie; 0 without blocks.
        values: the rounded weight, float32.
        scale: the factors that the elements are multiplied by, one per block, channel or tensor.
        of_tensor: the factor [] of the whole tensor, which `scale` includes; 1 if the format has none.
    """

    dtype: str
    axis: int
    values: Tensor
    scale: Tensor
    of_tensor: Tensor

    @property
    def form(self) -> Format:
        """The number format of the weight."""
        return FORMATS[self.dtype]


def with_rounded_weight(operator: QATOperator, fake: FormatWeightFakeQuantize) -> nn.Module:
    """Returns the float operator of inference with a rounded weight and a `HeldWeight` as its attribute `held`."""
    plain = plain_operator(operator)
    with torch.no_grad():
        weight = plain.get_parameter("weight")
        scale = fake.scale(weight)
        values = fake.rounded(weight, scale).detach()
        axis = getattr(fake.spec.granularity, "axis", 0)
        held = HeldWeight(fake.spec.dtype, axis, values, scale.clone(), fake.tensor_scale(weight))
        plain.register_parameter("weight", nn.Parameter(values))
    plain.held = held  # type: ignore[assignment]  # no tensor of the module
    return plain
