"""Conv and Linear whose weight or bias is computed from parameters: weight_norm, LoRA, a pruning mask.

    weight = g · v / |v|        the arithmetic is a program, a module whose inputs are the parameters

`weight` and `bias` are properties, so that every reader (the float forward, `QATOperator`, the weight's
quantizer, conversion) gets the current value, and gradients reach the parameters. They cannot be assigned:
code that changes weights skips these operators. For inference the values are computed once (`settled`).
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
    """A mixin that computes the weight or bias of a Conv or Linear.

    Attributes:
        leaves: for "weight" and "bias", if computed, the names of the tensors that the program reads,
            relative to this module. They are parameters and buffers of this module or of its children.
    """

    leaves: dict[str, tuple[str, ...]]

    def program(self, name: str) -> nn.Module | None:
        """Returns the module that computes "weight" or "bias"; None if this is a parameter or missing."""
        # A ModuleDict, or a plain Module in a graph's own hierarchy.
        parametrized = self._modules.get("parametrizations")
        given = None if parametrized is None else parametrized._modules.get(name)
        return self._modules.get(f"{name}_program") or given

    def _value(self, name: str) -> Tensor | None:
        program = self.program(name)
        if program is None:
            return self._parameters.get(name)
        return cast(Tensor, program(*[tensor_at(self, leaf) for leaf in self.leaves[name]]))

    # Properties, declared with the type that the other base's attributes may have.
    weight: Any = property(lambda self: self._value("weight"), doc="The current weight.")
    bias: Any = property(lambda self: self._value("bias"), doc="The current bias, or None.")


class ComputedConv1d(Computed, nn.Conv1d):
    """Conv1d with a computed weight or bias."""


class ComputedConv2d(Computed, nn.Conv2d):
    """Conv2d with a computed weight or bias."""


class ComputedConv3d(Computed, nn.Conv3d):
    """Conv3d with a computed weight or bias."""


class ComputedLinear(Computed, nn.Linear):
    """Linear with a computed weight or bias."""


class QATComputedConv1d(Computed, QATConv1d):
    """Conv1d with a computed weight or bias, quantized."""


class QATComputedConv2d(Computed, QATConv2d):
    """Conv2d with a computed weight or bias, quantized."""


class QATComputedConv3d(Computed, QATConv3d):
    """Conv3d with a computed weight or bias, quantized."""


class QATComputedLinear(Computed, QATLinear):
    """Linear with a computed weight or bias, quantized."""


# The type with `Computed` for each type without it.
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
    """Returns a parameter or buffer of a module by its name, never the value of a property of that name."""
    owner, _, name = path.rpartition(".")
    home = module.get_submodule(owner)
    found = home._parameters.get(name)
    return cast(Tensor, home._buffers[name] if found is None else found)


def settled(module: nn.Module) -> nn.Module:
    """Returns a plain module with the current weight and bias of a `Computed` one; any other module unchanged."""
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
    """Returns a key of an operator's "weight" or "bias"; two operators have equal keys exactly if they share it."""
    program = module.program(name) if isinstance(module, Computed) else None
    return id(program) if program is not None else id(getattr(module, name))
