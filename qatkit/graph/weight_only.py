"""Quantizes large weights of operators without an int8 kernel in ONNX Runtime.

In the file these weights are int8 with one scale per row, and the operators compute in float:

    Embedding          its table; rows of bytes are looked up (a backend with `weights_alone` also packs tables with
                       fewer bits or scales per block)
    LSTM, GRU, RNN     the weights of every layer and direction

In training these weights have the values that they will have in the file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import cast

from torch import fx, nn

from qatkit.graph.fixed_scales import fix_weights
from qatkit.graph.nodes import module_of, op_class, site
from qatkit.graph.overrides import Overrides
from qatkit.graph.placement import constants
from qatkit.graph.quantizers import quantized_weights
from qatkit.quant.backends import Backend
from qatkit.quant.computed_weights import identity_of
from qatkit.quant.granularity import PerChannel
from qatkit.quant.qat_layers import QATEmbedding, with_the_same_parameters
from qatkit.quant.recurrent_layers import RECURRENT_TYPES, weight_names
from qatkit.quant.spec import RECURRENT_WEIGHTS, WEIGHT_ONLY, QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize

_TYPES: dict[str, type[nn.Module]] = {"embedding": QATEmbedding, **RECURRENT_TYPES}
_SAID = {
    "embedding": f"{WEIGHT_ONLY}: its table is int8, and the rows that are read are float",
    **dict.fromkeys(RECURRENT_TYPES, RECURRENT_WEIGHTS),
}


def quantize_weights_alone(
    graph_module: fx.GraphModule, chosen: Overrides, backend: Backend, quantizers: Quantizers
) -> list[tuple[str, str]]:
    """Quantizes the weights of Embeddings, LSTMs, GRUs and RNNs, unless an override keeps them float.

    Returns:
        (site, note) for each operator to report: that only its weights are quantized, or why it stays float.

    Raises:
        ConfigError: the values of an override do not fit the weight.
    """
    notes, known = [], constants(graph_module.graph)
    guarded = {
        identity_of(operator, "weight")
        for _, operator, fake in quantized_weights(graph_module)
        if fake.spec.guards_pairs
    }
    for node in graph_module.graph.nodes:
        kind = op_class(node)
        if kind not in _TYPES or node in chosen.forced_float or node in known:
            continue
        module = module_of(node)
        reason = _why_not(module, backend)
        if reason:
            notes.append((site(node), reason))
            continue
        if not isinstance(module, _TYPES[kind]):
            spec = _spec(module, chosen.weight(node, backend), backend, guarded)
            new = _quantized(module, _TYPES[kind], spec, quantizers)
            fix_weights(new, *chosen.of_weight(node))
            graph_module.set_submodule(str(node.target), new)
        if not backend.weights_alone or kind != "embedding":  # with `weights_alone` all tables are packed
            notes.append((site(node), _SAID[kind]))
    return notes


def _spec(module: nn.Module, spec: QuantSpec, backend: Backend, guarded: Collection[object]) -> QuantSpec:
    """Returns the spec of the weights of `module`: one scale per row, or for a packed table the usual spec."""
    if not backend.weights_alone:
        return replace(spec, granularity=PerChannel(0), pairs=_shares_guarded(module, guarded))
    if isinstance(module, nn.Embedding):
        return spec
    # Weights with fewer bits would be stored in bytes too.
    return QuantSpec("int8", symmetric=True, granularity=PerChannel(0))


def is_recurrent(node: fx.Node) -> bool:
    """Returns whether a node is an LSTM, GRU or RNN."""
    return op_class(node) in RECURRENT_TYPES


def _shares_guarded(module: nn.Module, guarded: Collection[object]) -> bool:
    """Returns whether the table of an Embedding is the weight of an operator whose products must not saturate."""
    return isinstance(module, nn.Embedding) and identity_of(module, "weight") in guarded


def _why_not(module: nn.Module, backend: Backend) -> str:
    if backend.simulated:
        return f"{type(module).__name__} stays float: number formats are supported for Conv and Linear only"
    if isinstance(module, nn.Embedding) and (not backend.for_onnxruntime or module.max_norm is not None):
        return "Embedding stays float: int8 tables need a backend for ONNX Runtime and no max_norm"
    if isinstance(module, nn.RNNBase) and not backend.for_onnxruntime:
        return f"{type(module).__name__} stays float: the backend does not support it with int8 weights"
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "LSTM stays float: the LSTM of ONNX has no projection (proj_size)"
    return ""


def _quantized(
    module: nn.Module, kind: type[nn.Module], spec: QuantSpec, quantizers: Quantizers
) -> nn.Module:
    """Returns `module` converted to type `kind`, with the same parameters and with quantizers."""
    new = with_the_same_parameters(module, kind)

    def quantizer(name: str) -> WeightFakeQuantize:
        weight = cast("nn.Parameter", getattr(module, name))
        return quantizers.weight(spec, weight.shape).to(weight.device)

    if isinstance(module, nn.RNNBase):
        del new.__dict__["_flat_weights"]  # it is a computed property of the new type
        new.weight_fake_quants = nn.ModuleDict({name: quantizer(name) for name in weight_names(module)})
    else:
        new.weight_fake_quant = quantizer("weight")
    return new
