"""Copies modules that share large tensors with the original, since a second copy of the weights costs much memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_LARGE = (
    2**16
)  # number of values; smaller tensors (biases, norms, scales) are copied, since corrections write into them


def large_parameters(module: nn.Module) -> dict[int, Any]:
    """Returns the memo with which `copy.deepcopy` makes a copy whose large parameters share their memory.

    The copy has parameters of its own, so it can be moved to another device or get other parameters. Writing into a
    shared parameter in place also changes the original.
    """
    return {
        id(one): nn.Parameter(one.data, one.requires_grad)
        for one in module.parameters()
        if one.numel() >= _LARGE and type(one) is nn.Parameter
    }


def large_tensors(module: nn.Module) -> dict[int, Any]:
    """Returns the memo for a copy that is only read: large buffers are shared, too."""
    return large_parameters(module) | {id(one): one for one in module.buffers() if one.numel() >= _LARGE}


def own_unlike(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Gives a module memory of its own for the parameters whose values are about to change.

    Args:
        module: a module that shares its parameters with another one.
        others: the new values by the names of the parameters, as in a state_dict.
    """
    for name, one in module.named_parameters():
        other = others.get(name)
        if other is not None and not (other.shape == one.shape and one.data.equal(other.to(one))):
            one.data = one.data.clone()
