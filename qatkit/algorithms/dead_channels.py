"""Dead channels: outputs that are the same for every image, and inputs that no output reads.

A weight of zeros has no scale of its own. `convert` gives such an output the smallest scale with which its
bias fits int32 (`qatkit.graph.convert.integer_modules`) and reports it; no accuracy is lost, but computation
is wasted. A network with many dead channels could be narrower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, fx

# Weights below this share of the operator's largest weight contribute less than float32 rounding.
_NOTHING = 1e-7


def dead_channels(graph_module: fx.GraphModule) -> list[tuple[str, str]]:
    """Returns (site, message) for each Conv and Linear with dead outputs, and for each with dead inputs."""
    # Imported late, since the command line imports this package to check the settings of algorithms.
    from qatkit.graph.nodes import facts, module_of, site
    from qatkit.quant.computed_weights import identity_of
    from qatkit.quant.qat_layers import QATOperator

    found, seen = [], set[int]()
    for node in graph_module.graph.nodes:
        module = module_of(node) if node.op == "call_module" and facts(node).weighted else None
        if not isinstance(module, QATOperator) or identity_of(module, "weight") in seen:
            continue
        seen.add(identity_of(module, "weight"))
        outputs, inputs = _dead(module.effective()[0].detach(), int(getattr(module, "groups", 1)))
        if outputs.any():
            dead = f"{int(outputs.sum())} of {len(outputs)} output channels"
            found.append((site(node), f"dead channels: all weights are zero in {dead} (constant outputs)"))
        if inputs.any():
            dead = f"{int(inputs.sum())} of {len(inputs)} input channels"
            found.append((site(node), f"dead channels: all weights are zero in {dead} (inputs not read)"))
    return found


def _dead(weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns masks of the outputs [out] and inputs [in] whose weights are all negligible."""
    nothing = weight.abs() <= _NOTHING * weight.abs().max()
    split = nothing.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).all(3)
    return split.all(2).flatten(), split.all(1).flatten()
