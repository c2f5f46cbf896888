"""Substitutes equivalent modules with the same parameters for modules that can't be traced or hide their products.

    TransformerEncoderLayer   its fast path in inference branches on the input; becomes attention, norms and Linears
    TransformerEncoder        it has such a fast path too; becomes a loop over its layers
    FrozenBatchNorm2d         arithmetic on buffers (in detection backbones); becomes a frozen BatchNorm2d
    other BatchNorms          see `qatkit.graph.norms`
    Bilinear, LSTMCell, ...   products inside a leaf; see `qatkit.graph.open_modules`

Paths and names of parameters stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from qatkit.graph.norms import as_batch_norm
from qatkit.graph.open_modules import OpenBilinear, OpenGRUCell, OpenLSTMCell, OpenRNNCell
from qatkit.quant.qat_layers import with_the_same_parameters


class _EncoderLayer(nn.TransformerEncoderLayer):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        return cast(Tensor, self.norm2(x + self._ff_block(x)))


class _Encoder(nn.TransformerEncoder):
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        for layer in self.layers:
            # `is_causal` is only a hint about the mask, so it can be left out.
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        return src if self.norm is None else cast(Tensor, self.norm(src))


def _with_forward_of(twin: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Returns a rule that gives a module the forward of `twin` and keeps its type's other methods."""

    def replace(module: nn.Module) -> nn.Module:
        kind = type(type(module).__name__, (twin, type(module)), {"__module__": twin.__module__})
        return with_the_same_parameters(module, kind)

    return replace


def _thaw(module: nn.Module) -> nn.Module:
    frozen = cast(FrozenBatchNorm2d, module)
    norm = nn.BatchNorm2d(len(frozen.weight), frozen.eps)
    norm.load_state_dict(frozen.state_dict(), strict=False)
    return norm.requires_grad_(False).eval()


# Rules by the type whose forward is replaced; a subclass with another forward is not changed.
_RULES: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    nn.TransformerEncoderLayer: _with_forward_of(_EncoderLayer),
    nn.TransformerEncoder: _with_forward_of(_Encoder),
    FrozenBatchNorm2d: _thaw,
    nn.Bilinear: _with_forward_of(OpenBilinear),
    nn.LSTMCell: _with_forward_of(OpenLSTMCell),
    nn.GRUCell: _with_forward_of(OpenGRUCell),
    nn.RNNCell: _with_forward_of(OpenRNNCell),
}


def with_twins(model: nn.Module) -> nn.Module:
    """Substitutes the equivalent modules that this file lists for modules of `model`, in place.

    Returns the model, or its equivalent if the model itself is such a module.
    """
    for path, module in list(model.named_modules()):
        rule = next(
            (r for t, r in _RULES.items() if isinstance(module, t) and _plain(module, t)), as_batch_norm
        )
        twin = rule(module)
        if twin is not None and path:
            model.set_submodule(path, twin)
        elif twin is not None:
            model = twin
    return model


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module).forward is kind.forward
