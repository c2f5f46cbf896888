"""Switches between quantized and float: one for the weight and bias of an operator, one for each activation.

kind         site                            if it is on
weight       site of the operator            weight and bias are quantized (in a recurrent layer: all weights)
activation   site of the tensor's producer   the FakeQuantize on the edge quantizes
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from qatkit.graph.nodes import module_of, site
from qatkit.graph.quantizers import QUANTIZES
from qatkit.quant.fake_quantize import FakeQuantize, Quantizer
from qatkit.quant.qat_layers import QATOperator
from qatkit.records.analysis import ACTIVATION, WEIGHT
from qatkit_verify.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Switch:
    """A switch that turns the quantization of one weight or activation on and off.

    Attributes:
        site: the path of the operator, or of the producer of the activation.
        kind: "weight" or "activation".
        node: the node that computes the quantized value: the operator, or the FakeQuantize.
        quantizers: the quantizers that it turns on and off.
    """

    site: str
    kind: str
    node: fx.Node
    quantizers: tuple[Quantizer, ...]

    @property
    def key(self) -> str:
        """The name as one string, such as "weight conv1"."""
        return f"{self.kind} {self.site}"

    @property
    def operator(self) -> QATOperator | None:
        """The operator whose weight is switched; None for an activation, an embedding or a recurrent layer."""
        module = module_of(self.node)
        return module if isinstance(module, QATOperator) else None

    def turn(self, on: bool) -> None:
        """Sets whether the next forward passes quantize this weight or activation."""
        for quantizer in self.quantizers:
            quantizer.enabled = on


def switches(graph_module: fx.GraphModule, patterns: Iterable[str] = ("*",)) -> list[Switch]:
    """Returns the switches whose site matches one of `patterns` (names or globs), in graph order.

    Raises:
        ConfigError: a pattern matches no site; the message suggests the nearest names.
    """
    found = list(_all(graph_module))
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {s.site for s in found if s.site == pattern or fnmatch.fnmatchcase(s.site, pattern)}
        if not matched:
            near = did_you_mean(pattern, (s.site for s in found))
            raise ConfigError(
                "analysis.layers",
                pattern,
                reason=f"the pattern matches no quantized weight or activation{near}",
            )
        chosen |= matched
    return [switch for switch in found if switch.site in chosen]


def _all(graph_module: fx.GraphModule) -> Iterator[Switch]:
    for node in graph_module.graph.nodes:
        if node.op != "call_module":
            continue
        module = module_of(node)
        if isinstance(module, FakeQuantize):
            yield Switch(str(node.meta[QUANTIZES]), ACTIVATION, node, (module,))
            continue
        own = tuple(one for one in module.modules() if isinstance(one, Quantizer) and not _on_edge(one))
        if own:
            yield Switch(site(node), WEIGHT, node, own)


def _on_edge(quantizer: Quantizer) -> bool:
    """Returns whether a quantizer is for activations; a recurrent layer contains such quantizers for its results."""
    return isinstance(quantizer, FakeQuantize)


def turn_all(which: Sequence[Switch], on: bool) -> None:
    """Turns several switches on or off."""
    for switch in which:
        switch.turn(on)
