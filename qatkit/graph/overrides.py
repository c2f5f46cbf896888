"""Per-operator overrides: a module path, a glob over paths, or `op/CLASS`, and what it changes.

An override that would change nothing is refused, with the operator to name instead: a ReLU that a Conv absorbs,
or a pooling, has no range of its own.

A slash and no colon: Hydra's command line takes `op/linear` as a key without quotes, and no path holds one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from qatkit.config.schema import OverrideConfig
from qatkit.graph import operators
from qatkit.graph.nodes import facts, op_class, site
from qatkit.graph.placement import Placement
from qatkit.quant.backends import Backend
from qatkit.quant.granularity import PerBlock, granularity_of
from qatkit.quant.spec import WHOLE, QuantSpec
from qatkit_verify.errors import ConfigError, did_you_mean

OVERRIDDEN = "overridden"  # in the meta of a prepared graph: the sites that some override says something of


class Overrides:
    """The overrides of one run, resolved to nodes. Later patterns win over earlier ones.

    Raises:
        ConfigError: a pattern that matches no operator, with the nearest names that exist.
    """

    def __init__(self, graph: fx.Graph, patterns: Mapping[str, OverrideConfig]) -> None:
        self.by_node: dict[fx.Node, tuple[str, OverrideConfig]] = {}
        for pattern, override in patterns.items():
            if not override.int8:  # `stub` has done these
                self.by_node.update(dict.fromkeys(matched(graph, pattern), (pattern, override)))

    def check_effect(self, placement: Placement) -> None:
        """Refuses a pattern with a setting that changes nothing on any of the operators it matches.

        Raises:
            ConfigError: says why, and which operator to name instead where there is one.
        """
        points = {p.node: p for p in placement.points}
        for pattern in dict.fromkeys(pattern for pattern, _ in self.by_node.values()):
            nodes = [n for n, (last, _) in self.by_node.items() if last == pattern]
            override = self.by_node[nodes[0]][1]
            of_weights = _sets(override, "weight_") or override.reduce_range is not None
            of_weights = of_weights or override.bias_dtype is not None
            if of_weights and not any(n in placement.weighted for n in nodes):
                raise _without_effect(pattern, "weight", "it has no quantized weight")
            ranges = [points[n] for n in nodes if n in points]
            if _sets(override, "activation_") and not ranges:
                raise _without_effect(pattern, "activation", _whose_range(nodes[0], placement))
            alone = override.activation_symmetric and override.activation_dtype is None
            if alone and all(p.bounds[0] == 0.0 for p in ranges):
                reason = "its range starts at zero, where the activation after it ends"
                raise _without_effect(pattern, "activation_symmetric", reason)

    @property
    def forced_float(self) -> dict[fx.Node, str]:
        return {n: pattern for n, (pattern, override) in self.by_node.items() if override.float}

    def weight(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """The weight spec of an operator."""
        override = self._of(node)
        spec = backend.weight
        if override.weight_granularity is not None:
            granularity = granularity_of(override.weight_granularity)
            if isinstance(granularity, PerBlock) and not backend.weights_alone:
                value = f"{self.by_node[node][0]} (weight_granularity={granularity})"
                allowed = (
                    "per_tensor or per_channel, which int8 kernels know (backend=weight_only has blocks)"
                )
                raise ConfigError("backend.overrides", value, allowed)
            spec = replace(spec, granularity=granularity)
        if override.weight_scale_dtype is not None:
            if override.weight_scale_dtype != "float32" and not backend.weights_alone:
                value = f"{self.by_node[node][0]} (weight_scale_dtype={override.weight_scale_dtype})"
                allowed = "float32, which int8 kernels take (backend=weight_only has others)"
                raise ConfigError("backend.overrides", value, allowed)
            spec = replace(spec, scale_dtype=override.weight_scale_dtype)
        if override.weight_symmetric is not None:
            spec = replace(spec, symmetric=override.weight_symmetric)
        if override.reduce_range is not None:
            eight_bits = backend.reduced(False)  # an override has the last word on the backend's own bits
            spec = replace(eight_bits.reduced(override.reduce_range).weight, granularity=spec.granularity)
        if override.scale_type is not None:
            spec = replace(spec, scale_type=override.scale_type)
        if override.bias_dtype is not None:
            spec = replace(spec, bias_dtype=override.bias_dtype)
        dtype = override.weight_dtype or spec.dtype
        # What has fewer bits saturates nowhere: `backend.reduce_range` has nothing to take from it.
        return replace(spec, dtype=dtype, reduce_range=spec.reduce_range and dtype in WHOLE)

    def activation(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """The spec of an operator's output."""
        override = self._of(node)
        spec = backend.activation
        if override.activation_symmetric is not None:
            spec = replace(spec, symmetric=override.activation_symmetric)
        if override.scale_type is not None:
            spec = replace(spec, scale_type=override.scale_type)
        return spec if override.activation_dtype is None else replace(spec, dtype=override.activation_dtype)

    def _of(self, node: fx.Node) -> OverrideConfig:
        return self.by_node[node][1] if node in self.by_node else OverrideConfig()


def matched(graph: fx.Graph, pattern: str, kind: str | None = None) -> list[fx.Node]:
    """The operators that a pattern means, of one class or of all.

    Raises:
        ConfigError: there is none; it names the nearest that there are.
    """
    calls = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    calls = [n for n in calls if kind in (None, op_class(n))]
    found = [n for n in calls if _matches(n, pattern)]
    if not found:
        names = [site(n) for n in calls] + [f"op/{c}" for c in sorted({op_class(n) for n in calls})]
        reason = f"the pattern matches no {kind or 'operator'}{did_you_mean(pattern, names)}"
        raise ConfigError("backend.overrides", pattern, reason=reason)
    return found


def _matches(node: fx.Node, pattern: str) -> bool:
    if pattern.startswith("op/"):
        return op_class(node) == pattern[3:] and pattern[3:] in {
            known.name for known in operators.operators()
        }
    return site(node) == pattern or fnmatch.fnmatchcase(site(node), pattern)


def _sets(override: OverrideConfig, prefix: str) -> bool:
    return any(v is not None for k, v in vars(override).items() if k.startswith(prefix))


def _without_effect(pattern: str, what: str, reason: str) -> ConfigError:
    return ConfigError("backend.overrides", pattern, reason=f"its {what} settings have no effect: {reason}")


def _whose_range(node: fx.Node, placement: Placement) -> str:
    """Why an operator has no range of its own."""
    givers = {p.absorbed or p.node: p.node for p in placement.points}
    giver = node
    while giver not in givers:
        if not facts(giver).keeps_range:
            return "its output is not quantized"
        giver = giver.all_input_nodes[0]
    if givers[giver].op == "placeholder":
        return "its range is the model's input's, which no override changes"
    return f"its range is that of {site(givers[giver])}, name that instead"
