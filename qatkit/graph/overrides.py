"""Overrides of single operators and tensors: a selector (`qatkit.graph.selectors`) and the settings that it changes.

An override without effect is rejected, and the message names the operator to select instead, if there is one. For
example, a pooling, or a ReLU that the quantization of a Conv absorbs, has no range of its own. An override of a tensor
applies to the quantizer that sets its range (its point, `qatkit.graph.placement`), even if values are moved between the
two.

Selectors use a slash and no colon: Hydra's command line accepts `op/linear` as a key without quotes, and no module
path contains a slash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from qatkit.config.schema import OverrideConfig
from qatkit.config.selectors import ONLY, shown
from qatkit.graph.nodes import facts, module_of, site
from qatkit.graph.placement import Placement, Point
from qatkit.graph.selectors import IN_INT8, chosen_tensors, file_node, is_of_tensors, matched, record_of
from qatkit.quant.backends import Backend
from qatkit.quant.granularity import PerBlock, PerChannel, granularity_of
from qatkit.quant.spec import WHOLE, QuantSpec
from qatkit_verify.errors import ConfigError

OVERRIDDEN = "overridden"  # key in the meta of a prepared graph: the sites that an override applies to
MATCHED = (
    "matched"  # key in the meta of a prepared graph: what each selector chose, as records of `record_of`
)

Chosen = tuple[str, OverrideConfig]


class Overrides:
    """The overrides of a backend, resolved to the nodes of a graph.

    Later selectors have precedence over earlier ones, and selectors of tensors over selectors of operators.

    Attributes:
        by_node: the selected operators, each with the last selector that chose it and its override.
        by_tensor: the nodes whose outputs a selector of tensors chose, likewise.
        by_weight: the operators whose weights a selector of tensors chose, likewise.
        by_point: the nodes of the points that quantize the outputs in `by_tensor`, likewise; empty before
            `check_effect`.
        records: the record of what each selector chose.

    Raises:
        ConfigError: a selector chooses nothing (the message has similar names), or has settings of activations for a
            weight or the reverse.
    """

    def __init__(self, graph: fx.Graph, patterns: Mapping[str, OverrideConfig]) -> None:
        self.by_node: dict[fx.Node, Chosen] = {}
        self.by_tensor: dict[fx.Node, Chosen] = {}
        self.by_weight: dict[fx.Node, Chosen] = {}
        self.by_point: dict[fx.Node, Chosen] = {}
        self.records: list[dict[str, Any]] = []
        for pattern, override in patterns.items():
            if override.int8:  # `stub` has applied this override
                opened = getattr(graph.owning_module, "meta", {}).get(IN_INT8, {})
                self.records.append(record_of(pattern, {"int8": True}, opened.get(pattern, ())))
            elif is_of_tensors(graph, pattern):
                self._of_tensors(graph, pattern, override)
            else:
                found = matched(graph, pattern)
                self.by_node.update(dict.fromkeys(found, (pattern, override)))
                self._record(pattern, override, found)

    def _of_tensors(self, graph: fx.Graph, pattern: str, override: OverrideConfig) -> None:
        tensors = chosen_tensors(graph, pattern)
        for prefix, nodes, others in (
            ("weight_", tensors.readers, "activation_"),
            ("activation_", tensors.makers, "weight_"),
        ):
            if _sets(override, prefix) and not nodes:
                what = "a weight" if prefix == "activation_" else "an activation"
                raise _without_effect(
                    pattern, prefix.rstrip("_"), f"it selects {what}; use keys {others}* instead"
                )
        self.by_tensor.update(dict.fromkeys(tensors.makers, (pattern, override)))
        self.by_weight.update(dict.fromkeys(tensors.readers, (pattern, override)))
        self._record(pattern, override, [*tensors.makers, *tensors.readers])

    def _record(self, pattern: str, override: OverrideConfig, nodes: list[fx.Node]) -> None:
        settings = {name: value for name, value in vars(override).items() if value not in (None, False)}
        names = [site(n) if (of_file := file_node(n)) is None else of_file.name for n in nodes]
        self.records.append(record_of(pattern, settings, names))

    @property
    def sites(self) -> set[str]:
        """The sites of operators that an override applies to."""
        return {site(node) for chosen in (self.by_node, self.by_tensor, self.by_weight) for node in chosen}

    def check_effect(self, placement: Placement) -> None:
        """Rejects overrides without effect, and finds the points of overridden tensors.

        Raises:
            ConfigError: a setting changes nothing at any operator that its selector chooses; the message has the reason
                and, if there is one, the operator to select instead.
        """
        points = {p.node: p for p in placement.points}
        for pattern in dict.fromkeys(pattern for pattern, _ in self.by_node.values()):
            nodes = [n for n, (last, _) in self.by_node.items() if last == pattern]
            override = self.by_node[nodes[0]][1]
            of_weights = _sets(override, "weight_") or override.reduce_range is not None
            of_weights = of_weights or override.bias_dtype is not None
            if of_weights and not any(n in placement.weighted or _has_table(n) for n in nodes):
                raise _without_effect(pattern, "weight", "the operator has no quantized weight")
            ranges = [points[n] for n in nodes if n in points]
            if _sets(override, "activation_") and not ranges:
                raise _without_effect(pattern, "activation", _whose_range(nodes[0], placement))
            alone = override.activation_symmetric and override.activation_dtype is None
            if alone and all(p.bounds[0] == 0.0 for p in ranges):
                reason = "the activation after it makes the range start at zero"
                raise _without_effect(pattern, "activation_symmetric", reason)
        for node, (pattern, _) in self.by_weight.items():
            if node not in placement.weighted and not _has_table(node):
                raise _without_effect(pattern, "weight", f"{site(node)} has no quantized weight")
        for node, chosen in self.by_tensor.items():
            point = _point_of(node, placement)
            if point is None:
                raise _without_effect(chosen[0], "activation", "the tensor is not quantized")
            self.by_point[point.node] = chosen

    @property
    def forced_float(self) -> dict[fx.Node, str]:
        """The operators that overrides keep float, each with its selector."""
        return {n: shown(pattern) for n, (pattern, override) in self.by_node.items() if override.float}

    def said(self, node: fx.Node, backend: Backend) -> bool:
        """Returns whether the report lists an operator as float because of an override.

        An operator that `backend.only` leaves out is not listed if no rule would quantize it anyway.
        """
        return not self.by_node[node][0].startswith(ONLY) or facts(node).name in backend.rules

    def weight(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """Returns the spec of an operator's weight, with its overrides.

        Raises:
            ConfigError: int8 kernels do not support the granularity, the type of the scales or the axis.
        """
        pattern, override = self.of_weight(node)
        spec = backend.weight
        if override.weight_granularity is not None:
            granularity = granularity_of(override.weight_granularity)
            if isinstance(granularity, PerBlock) and not backend.weights_alone:
                allowed = "per_tensor or per_channel, since int8 kernels need these (backend=weight_only allows blocks)"
                raise ConfigError(f"backend.overrides.{pattern}.weight_granularity", granularity, allowed)
            spec = replace(spec, granularity=granularity)
        if override.weight_axis is not None:
            _check_axis(pattern, node, override.weight_axis)
            spec = replace(spec, granularity=PerChannel(0))
        if override.weight_scale_dtype is not None:
            if override.weight_scale_dtype != "float32" and not backend.weights_alone:
                key = f"backend.overrides.{pattern}.weight_scale_dtype"
                allowed = "float32, since int8 kernels need it (backend=weight_only allows others)"
                raise ConfigError(key, override.weight_scale_dtype, allowed)
            spec = replace(spec, scale_dtype=override.weight_scale_dtype)
        if override.weight_symmetric is not None:
            spec = replace(spec, symmetric=override.weight_symmetric)
        if override.reduce_range is not None:
            eight_bits = backend.reduced(
                False
            )  # an override has precedence over the backend's number of bits
            spec = replace(eight_bits.reduced(override.reduce_range).weight, granularity=spec.granularity)
        if override.scale_type is not None:
            spec = replace(spec, scale_type=override.scale_type)
        if override.bias_dtype is not None:
            spec = replace(spec, bias_dtype=override.bias_dtype)
        dtype = override.weight_dtype or spec.dtype
        # `backend.reduce_range` does not apply to types with fewer bits, whose sums never saturate.
        return replace(spec, dtype=dtype, reduce_range=spec.reduce_range and dtype in WHOLE)

    def activation(self, node: fx.Node, backend: Backend) -> QuantSpec:
        """Returns the spec of an operator's output, with its overrides."""
        override = self.of_activation(node)[1]
        spec = backend.activation
        if override.activation_symmetric is not None:
            spec = replace(spec, symmetric=override.activation_symmetric)
        if override.scale_type is not None:
            spec = replace(spec, scale_type=override.scale_type)
        if override.activation_reduce_range is not None:
            spec = replace(spec, reduce_range=override.activation_reduce_range)
        return spec if override.activation_dtype is None else replace(spec, dtype=override.activation_dtype)

    def of_weight(self, node: fx.Node) -> Chosen:
        """Returns selector and override of an operator's weight; both are empty if there are none."""
        return self.by_weight.get(node) or self.by_node.get(node) or ("", OverrideConfig())

    def of_activation(self, node: fx.Node) -> Chosen:
        """Returns selector and override of the tensor quantized after an operator; both are empty if there are none."""
        return self.by_point.get(node) or self.by_node.get(node) or ("", OverrideConfig())


def _point_of(node: fx.Node, placement: Placement) -> Point | None:
    """Returns the point that quantizes the output of a node; None if there is none."""
    givers = {n: p for p in placement.points for n in (p.node, p.absorbed) if n is not None}
    while node not in givers and facts(node).keeps_range and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return givers.get(node)


def _has_table(node: fx.Node) -> bool:
    return facts(node).name in ("embedding", "lstm", "gru", "rnn")


def _check_axis(pattern: str, node: fx.Node, axis: int) -> None:
    """Rejects an axis that the weight does not have or that is not the axis of its output channels.

    Raises:
        ConfigError: the axis is not that of the output channels.
    """
    of_file, rank = file_node(node), getattr(module_of(node).weight, "ndim", 2)
    outputs = int("Transpose" in type(module_of(node)).__name__) if of_file is None else of_file.axis
    key, there = f"backend.overrides.{pattern}.weight_axis", f"the weight of {site(node)} has {rank} axes"
    if not -rank <= axis < rank:
        raise ConfigError(key, axis, f"an integer from {-rank} to {rank - 1}, because {there}")
    if axis % rank != outputs:
        allowed = f"{outputs}, the axis of the output channels, the only one that int8 kernels support"
        raise ConfigError(key, axis, allowed)


def _sets(override: OverrideConfig, prefix: str) -> bool:
    return any(v is not None for k, v in vars(override).items() if k.startswith(prefix))


def _without_effect(pattern: str, what: str, reason: str) -> ConfigError:
    subject = f"its {what} has" if "_" in what else f"its {what} settings have"
    return ConfigError("backend.overrides", shown(pattern), reason=f"{subject} no effect: {reason}")


def _whose_range(node: fx.Node, placement: Placement) -> str:
    """Returns why an operator has no range of its own, and the operator to select instead if there is one."""
    givers = {p.absorbed or p.node: p.node for p in placement.points}
    giver = node
    while giver not in givers:
        if not facts(giver).keeps_range:
            return "the output is not quantized"
        giver = giver.all_input_nodes[0]
    if givers[giver].op == "placeholder":
        return "the range is that of the model's input, which no override can change"
    return f"the range is that of {site(givers[giver])}; name that operator instead"
