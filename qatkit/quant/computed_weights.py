"""Conv and Linear whose weight, bias or both are computed from parameters: weight_norm, LoRA, a pruning mask.

    weight = g · v / |v|        the arithmetic is a program, a module whose inputs are the parameters

`weight` and `bias` are properties, so that whoever reads them (the float forward, `QATOperator`, the quantizer of
the weight, conversion) gets the value as it is now, and gradients reach the parameters. Nobody can assign them:
what moves weights leaves these operators alone. For inference the values are computed once (`settled`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from qatkit.quant.qat_layers import (
    QATConv1d,
    QATConv2d,
    QATConv3d,
    QATLinear,
    QATOperator,
    with_the_same_parameters,
)


class Computed(nn.Module):
    """What a Conv or Linear gets in front of its own type.

    Attributes:
        leaves: by "weight" and "bias", where they are computed: the names, from this module on, of the tensors
            that the program takes. They are this module's own parameters and buffers, or those of its children.
    """

    leaves: dict[str, tuple[str, ...]]

    def program(self, name: str) -> nn.Module | None:
        """What computes "weight" or "bias"; None where that is a parameter or missing."""
        # A ModuleDict, or a plain Module in a graph's own hierarchy.
        parametrized = self._modules.get("parametrizations")
        given = None if parametrized is None else parametrized._modules.get(name)
        return self._modules.get(f"{name}_program") or given

    def _value(self, name: str) -> Tensor | None:
        program = self.program(name)
        if program is None:
            return self._parameters.get(name)
        return cast(Tensor, program(*[tensor_at(self, leaf) for leaf in self.leaves[name]]))

    # Properties, declared as what the other base's attributes may be.
    weight: Any = property(lambda self: self._value("weight"), doc="As it is now.")
    bias: Any = property(lambda self: self._value("bias"), doc="As it is now, or None.")


class ComputedConv1d(Computed, nn.Conv1d):
    """Conv1d with a computed weight or bias."""


class ComputedConv2d(Computed, nn.Conv2d):
    """Conv2d with a computed weight or bias."""


class ComputedConv3d(Computed, nn.Conv3d):
    """Conv3d with a computed weight or bias."""


class ComputedLinear(Computed, nn.Linear):
    """Linear with a computed weight or bias."""


class QATComputedConv1d(Computed, QATConv1d):
    """The same, quantized."""


class QATComputedConv2d(Computed, QATConv2d):
    """The same, quantized."""


class QATComputedConv3d(Computed, QATConv3d):
    """The same, quantized."""


class QATComputedLinear(Computed, QATLinear):
    """The same, quantized."""


# By the type without `Computed`: the one with it.
COMPUTED: dict[type[nn.Module], type[Computed]] = {
    nn.Conv1d: ComputedConv1d,
    nn.Conv2d: ComputedConv2d,
    nn.Conv3d: ComputedConv3d,
    nn.Linear: ComputedLinear,
    QATConv1d: QATComputedConv1d,
    QATConv2d: QATComputedConv2d,
    QATConv3d: QATComputedConv3d,
    QATLinear: QATComputedLinear,
}
_PLAIN = {computed: plain for plain, computed in COMPUTED.items()}


def tensor_at(module: nn.Module, path: str) -> Tensor:
    """A parameter or buffer of a module by its name; not what a property of that name gives."""
    owner, _, name = path.rpartition(".")
    home = module.get_submodule(owner)
    found = home._parameters.get(name)
    return cast(Tensor, home._buffers[name] if found is None else found)


def settled(module: nn.Module) -> nn.Module:
    """A module without programs, whose weight and bias are parameters with the values of now; others as they are."""
    if not isinstance(module, Computed):
        return module
    with torch.no_grad():
        values = {name: getattr(module, name) for name in ("weight", "bias")}
    new: Any = with_the_same_parameters(cast(nn.Module, module), _PLAIN[type(module)])
    new._parameters = {k: None if v is None else nn.Parameter(v.detach().clone()) for k, v in values.items()}
    own = ("bn", "weight_fake_quant") if isinstance(module, QATOperator) else ()
    new._modules = {name: child for name, child in module._modules.items() if name in own}
    new._buffers = {}
    del new.leaves
    return cast(nn.Module, new)


def identity_of(module: nn.Module, name: str) -> int:
    """What is the same for two operators that share their weight ("weight") or bias ("bias"), and only then."""
    program = module.program(name) if isinstance(module, Computed) else None
    return id(program) if program is not None else id(getattr(module, name))
