"""Modules of a converted graph whose numbers are of formats (`qatkit.quant.formats`).

Weights are float32 numbers that their format holds; a Conv or Linear computes with them in float. An activation is
rounded by one function of the file, in the domain `qatkit` and named after the format, whose body is in the file
(`qatkit.export.format_functions`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qatkit.quant.formats.blocks import quantized
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize
from qatkit.quant.qat_layers import QATOperator, plain_operator

DOMAIN = "qatkit"  # of the functions


class RoundToFormat(nn.Module):
    """x as its format holds it.

    Buffers: scale [], the tensor's, where the format has one.
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


def with_rounded_weight(operator: QATOperator, fake: FormatWeightFakeQuantize) -> nn.Module:
    """Returns the float operator that inference runs, its weight rounded to its format."""
    plain = plain_operator(operator)
    with torch.no_grad():
        weight = plain.get_parameter("weight")
        plain.register_parameter("weight", nn.Parameter(fake.rounded(weight, fake.scale(weight))))
    return plain
