"""Rewrites modules of torch.nn whose weight is computed outside of forward: by parametrizations or by hooks.

    torch.nn.utils.parametrize, parametrizations.weight_norm, ...    a property of a class made only for this module
    torch.nn.utils.weight_norm, spectral_norm, prune                 a hook that sets the attribute before each call

Both kinds of modules become operators with a program that computes the weight, as if it were computed in `forward`
(`qatkit.graph.weights.lift`). The program is the parametrization or the hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from qatkit.graph.nodes import facts, known_type, module_of
from qatkit.quant.computed_weights import COMPUTED, Computed
from qatkit.quant.qat_layers import with_the_same_parameters


class Hook(nn.Module):
    """A program that runs a hook, which sets a weight or bias.

    Args:
        hook: a hook that reads some tensors of a module and sets an attribute of it.
        name: the name of this attribute.
        reads: names of the tensors, in the order of the program's arguments.
    """

    def __init__(self, hook: Any, name: str, reads: Sequence[str]) -> None:
        super().__init__()
        self.holder, self.hook, self.name, self.reads = nn.Module(), hook, name, tuple(reads)

    def forward(self, *tensors: Tensor) -> Tensor:
        held = self.holder.__dict__
        held.update(zip(self.reads, tensors, strict=True))
        self.hook(self.holder, ())
        for name in self.reads:
            del held[name]
        return cast(Tensor, held.pop(self.name))


def open_held(graph_module: fx.GraphModule) -> int:
    """Replaces modules whose weight or bias is computed outside of forward, in place; returns their number.

    Args:
        graph_module: a traced graph.
    """
    opened = 0
    called = [n for n in graph_module.graph.nodes if n.op == "call_module" and facts(n).weighted]
    for path, node in {str(n.target): n for n in called}.items():
        new = _operator(module_of(node))
        if new is not None:
            graph_module.set_submodule(path, new)
            opened += 1
    return opened


def is_held(module: nn.Module) -> bool:
    """Returns whether `open_held` replaces a module, and no other hooks run when it is called."""
    hooks = list(module._forward_pre_hooks.values())
    known = not hooks if parametrize.is_parametrized(module) else all(map(_sets, hooks))
    return bool(_computed(module)) and not module._forward_hooks and known


def _computed(module: nn.Module) -> list[str]:
    """Returns which of "weight" and "bias" are computed by a parametrization or a hook."""
    names = [name for name in ("weight", "bias") if name not in module._parameters]
    if known_type(module) not in COMPUTED or not names or isinstance(module, Computed):
        return []
    if parametrize.is_parametrized(module):
        return names
    return names if {_sets(hook) for hook in module._forward_pre_hooks.values()} >= set(names) else []


def _operator(module: nn.Module) -> nn.Module | None:
    """Returns the module as an operator with programs; None if it computes neither weight nor bias."""
    kind, names = known_type(module), _computed(module)
    if kind is None or not names:
        return None
    parametrized = parametrize.is_parametrized(module)
    hooks = {} if parametrized else {_sets(hook): hook for hook in module._forward_pre_hooks.values()}
    new: Any = with_the_same_parameters(module, COMPUTED[kind])
    new.leaves = dict.fromkeys(names, ())
    if not parametrized:
        _take_hooks(new, {name: hooks[name] for name in names})
    return cast(nn.Module, new)


def _sets(hook: Any) -> str:
    """Returns the attribute that a hook sets; "" for a hook that does something else."""
    if isinstance(hook, (WeightNorm, SpectralNorm)):
        return str(hook.name)
    return str(hook._tensor_name) if isinstance(hook, prune.BasePruningMethod) else ""


def _take_hooks(new: Any, hooks: Mapping[str, Any]) -> None:
    """Turns the hooks of `new` that compute tensors into its programs."""
    new._forward_pre_hooks = type(new._forward_pre_hooks)(
        {key: hook for key, hook in new._forward_pre_hooks.items() if hook not in hooks.values()}
    )
    for name, hook in hooks.items():
        new.__dict__.pop(name, None)
        held = [n for n in (*new._parameters, *new._buffers) if n.startswith(f"{name}_")]
        new.leaves[name] = tuple(held)
        new.add_module(f"{name}_program", Hook(hook, name, held).train(new.training))
