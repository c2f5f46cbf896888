"""Per-operator overrides: a module path, a glob over paths, or `op/CLASS`, and what it changes.

A slash and no colon: Hydra's command line takes `op/linear` as a key without quotes, and no path holds one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from qatkit.backends import Backend
from qatkit.config import OverrideConfig
from qatkit.errors import ConfigError, near_matches
from qatkit.graph.ops import CLASSES, op_class, site
from qatkit.spec import QuantSpec


class Overrides:
    """The overrides of one run, resolved to nodes. Later patterns win over earlier ones.

    Raises:
        ConfigError: a pattern that matches no operator, with the nearest names that exist.
    """

    def __init__(self, graph: fx.Graph, patterns: Mapping[str, OverrideConfig]) -> None:
        self.by_node: dict[fx.Node, tuple[str, OverrideConfig]] = {}
        operators = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
        for pattern, override in patterns.items():
            matched = [n for n in operators if _matches(n, pattern)]
            if not matched:
                names = [site(n) for n in operators] + [
                    f"op/{c}" for c in sorted({op_class(n) for n in operators})
                ]
                raise ConfigError(
                    "backend.overrides", pattern, f"matches no operator; near: {near_matches(pattern, names)}"
                )
            self.by_node.update(dict.fromkeys(matched, (pattern, override)))

    @property
    def forced_float(self) -> dict[fx.Node, str]:
        return {n: pattern for n, (pattern, override) in self.by_node.items() if override.float}

    def weight(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """The weight spec of an operator."""
        override = self._of(node)
        spec = backend.weight
        if override.weight_granularity is not None:
            spec = replace(spec, granularity=override.weight_granularity)
        return spec if override.weight_dtype is None else replace(spec, dtype=override.weight_dtype)

    def activation(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """The spec of an operator's output."""
        override = self._of(node)
        spec = backend.activation
        if override.activation_symmetric is not None:
            spec = replace(spec, symmetric=override.activation_symmetric)
        return spec if override.activation_dtype is None else replace(spec, dtype=override.activation_dtype)

    def _of(self, node: fx.Node) -> OverrideConfig:
        return self.by_node[node][1] if node in self.by_node else OverrideConfig()


def _matches(node: fx.Node, pattern: str) -> bool:
    if pattern.startswith("op/"):
        return op_class(node) == pattern[3:] and pattern[3:] in CLASSES
    return site(node) == pattern or fnmatch.fnmatchcase(site(node), pattern)
