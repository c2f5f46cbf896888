"""Conv and Linear layers with a quantized weight, and with a BatchNorm if it is kept during training.

`QATConv2d` is a `Conv2d` with the same parameters under the same names. Its `weight_fake_quant` is None
until `prepare_qat` decides that this operator runs in int8. Its `bn`, if any, is the BatchNorm that followed:

    frozen:   y = conv(x, q(w·f), β - μ·f + b·f)        f = γ / sqrt(σ² + ε), running μ, σ²
    training: y = bn(conv(x, q(w·f)) / f + b)            batch μ, σ²; the weight is quantized as exported

Source for the training form: Krishnamoorthi, "Quantizing deep convolutional networks", 2018, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.quant import numerics
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

# A smaller |f| (a γ at zero) would turn the division of the training form into 0/0.
_SMALLEST_FACTOR = 1e-6
_Module = TypeVar("_Module", bound=nn.Module)


class QATOperator(nn.Module):
    """The base class of quantized Conv and Linear layers."""

    weight: Tensor
    bias: Tensor | None
    weight_fake_quant: WeightFakeQuantize | None
    bn: nn.Module | None
    bn_frozen: bool

    @classmethod
    def from_float(cls, module: nn.Module, bn: nn.Module | None = None, frozen: bool = False) -> Self:
        """Returns a layer with the parameters (not copies) and settings of `module`.

        Args:
            module: the float layer.
            bn: the BatchNorm after it, if the layer keeps it during training.
            frozen: whether that BatchNorm normalizes with its running statistics.
        """
        new = with_the_same_parameters(module, cls)
        new.weight_fake_quant, new.bn, new.bn_frozen = None, bn, frozen
        return new

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight (not yet quantized) and bias for inference: with the BatchNorm, if any, folded in."""
        if self.bn is None:
            return self.weight, self.bias
        return fold_batch_norm(self.weight, self.bias, self.bn)

    def quantized(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias after fake quantization; unchanged if the layer is not quantized."""
        if self.weight_fake_quant is None:
            return weight, bias
        return cast("tuple[Tensor, Tensor | None]", self.weight_fake_quant(weight, bias))

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Runs the plain operator with the given weight and bias instead of its own."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.bn is not None and self.bn_frozen:
            self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.bn is None or not self.bn.training:
            return self.run(x, *self.quantized(*self.effective()))
        # The forward pass moves the statistics, so a compiler must not recompute this factor in the backward
        # pass.
        factor = _factor(self.bn, numerics.computed_once)
        factor = torch.where(factor.abs() < _SMALLEST_FACTOR, _SMALLEST_FACTOR, factor)
        plain, bias = self.weight, self.bias  # read once: some operators compute them at every read
        weight, _ = self.quantized(plain * _column(factor, plain), None)
        y = self.run(x, weight, None)
        y = y / factor.view(1, -1, *[1] * (y.ndim - 2))
        if bias is not None:
            y = y + bias.view(1, -1, *[1] * (y.ndim - 2))
        return cast(Tensor, self.bn(y))


class _Conv(QATOperator):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return cast(Tensor, cast(Any, self)._conv_forward(x, weight, bias))


class QATConv1d(_Conv, nn.Conv1d):
    """Conv1d with a quantized weight."""


class QATConv2d(_Conv, nn.Conv2d):
    """Conv2d with a quantized weight."""


class QATConv3d(_Conv, nn.Conv3d):
    """Conv3d with a quantized weight."""


class QATLinear(QATOperator, nn.Linear):  # type: ignore[misc]  # Linear's bias may be None, undeclared
    """Linear with a quantized weight."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


QAT_TYPES: dict[type[nn.Module], type[QATOperator]] = {
    nn.Conv1d: QATConv1d,
    nn.Conv2d: QATConv2d,
    nn.Conv3d: QATConv3d,
    nn.Linear: QATLinear,
}


class QATEmbedding(nn.Embedding):
    """Embedding with a quantized table [rows, values], one scale per row; its outputs are float."""

    weight_fake_quant: WeightFakeQuantize

    def forward(self, rows: Tensor) -> Tensor:
        fake = self.weight_fake_quant
        apart = fake.enabled and fake.by_rows and not torch.is_grad_enabled()
        if apart and rows.numel() < len(self.weight):  # most of a large table is not read
            rows, places = torch.unique(rows, return_inverse=True)
            return F.embedding(places, fake.of_rows(rows)(self.weight[rows])[0])
        table, _ = fake(self.weight)
        return F.embedding(rows, table, self.padding_idx)


def with_the_same_parameters(module: nn.Module, kind: type[_Module] | None = None) -> _Module:
    """Returns a module with the settings of `module` and the same parameters; of type `kind` if that is given."""
    chosen = cast("type[_Module]", kind or type(module))
    new = chosen.__new__(chosen)
    new.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()}
    return new


def plain_operator(operator: QATOperator) -> nn.Module:
    """Returns a float operator of the original type with the weight and bias of `operator`, BatchNorm folded in."""
    weight, bias = operator.effective()
    base: Any = next(t for t in type(operator).__mro__ if t.__module__.startswith("torch.nn"))
    plain: nn.Module = base.__new__(base)
    plain.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in operator.__dict__.items()}
    plain._modules.clear()
    plain._parameters["weight"] = nn.Parameter(weight.detach())
    plain._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach())
    return plain


def _factor(bn: nn.Module, taken: Callable[[Tensor], Tensor] = lambda variance: variance) -> Tensor:
    bn = cast(nn.BatchNorm2d, bn)
    inverse = torch.rsqrt(taken(cast(Tensor, bn.running_var)) + bn.eps)
    return inverse if bn.weight is None else inverse * bn.weight


def _column(values: Tensor, weight: Tensor) -> Tensor:
    return values.view(-1, *[1] * (weight.ndim - 1))


def fold_batch_norm(weight: Tensor, bias: Tensor | None, bn: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns weight [out, ...] and bias [out] of the operator equal to `bn(op(x))` with running statistics."""
    factor = _factor(bn)
    bn = cast(nn.BatchNorm2d, bn)
    mean = cast(Tensor, bn.running_mean)
    shift = (-mean if bias is None else bias - mean) * factor
    return weight * _column(factor, weight), shift if bn.bias is None else shift + bn.bias
