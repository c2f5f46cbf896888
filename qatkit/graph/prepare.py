"""Prepare: inserts a FakeQuantize for each activation and weight that the backend quantizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from torch import fx

from qatkit.config.schema import OverrideConfig
from qatkit.graph.capture.free_axes import with_sizes
from qatkit.graph.fixed_scales import fix_activation, fix_weights
from qatkit.graph.guarded import adds_in_16_bits
from qatkit.graph.node_arguments import BATCH_AXIS, VARYING_AXES, shape_of
from qatkit.graph.nodes import called, facts, fused_activation, module_of, op_class, qat_type, site
from qatkit.graph.overrides import MATCHED, OVERRIDDEN, Overrides
from qatkit.graph.pass_result import PassResult
from qatkit.graph.placement import Placement, Point, constants, place
from qatkit.graph.quantizers import QUANTIZES, quantizer_after, quantizer_of
from qatkit.graph.signature import Example, batch_multiple, batch_size, flatten, graph_axes, resized
from qatkit.graph.trace import propagate, tidy
from qatkit.graph.weight_only import is_recurrent, quantize_weights_alone
from qatkit.quant.backends import Backend
from qatkit.quant.computed_weights import identity_of
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize
from qatkit.quant.qat_layers import QATOperator, with_the_same_parameters
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit_verify.errors import ConfigError

_ONLY = "stays float: only convolutions, Linear, Embedding and torch.nn's LSTM, GRU and RNN can be quantized"
# Functions that multiply by a weight and are not in the table of operators, like the modules that call them.
_WEIGHTED = (
    *("bilinear", "embedding", "embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)),
)


BY_OVERRIDE = "float by override"


def prepare_qat(
    graph_module: fx.GraphModule,
    backend: Backend,
    example: Example,
    overrides: Mapping[str, OverrideConfig] | None = None,
    quantizers: Quantizers = Quantizers(),  # noqa: B008  frozen, without state
) -> PassResult:
    """Inserts FakeQuantize modules, off and not observing yet (see `qatkit.graph.phase`).

    Args:
        graph_module: a fused and stubbed graph; changed in place.
        backend: the backend, whose rules decide what is quantized.
        example: an example batch with the real shapes and types.
        overrides: the overrides by selector (`qatkit.graph.overrides`).
        quantizers: the factories of the quantizers of activations and weights, and of the observers.

    Returns:
        The graph, the number of quantized activations, and notes on the operators that stay float or have only
        quantized weights.

    Raises:
        ConfigError: an override matches or changes nothing or has values that do not fit, or nothing in the model can
            be quantized.
    """
    graph_module.meta["backend"] = backend
    ready_to_place(graph_module, example)
    chosen = Overrides(graph_module.graph, overrides or {})
    graph_module.meta[OVERRIDDEN] = chosen.sites
    graph_module.meta[MATCHED] = chosen.records
    placement = place(graph_module.graph, backend, chosen.forced_float)
    if not placement.weighted and not any(map(is_recurrent, graph_module.graph.nodes)):
        kept = ", ".join(sorted(set(chosen.forced_float.values())))
        reason = "the model has no Conv, Linear, LSTM, GRU or RNN that could be quantized"
        reason += f"; overrides keep operators float: {kept}" if kept else ""
        raise ConfigError("model.name", type(graph_module).__name__, reason=reason)
    chosen.check_effect(placement)
    tensors = flatten(example)
    images = batch_size(tensors, graph_axes(graph_module, tensors))
    for point in placement.points:
        spec = _spec(point, chosen, backend)
        observer = None if point.fixed else quantizers.observer()
        made = quantizers.activation if spec.form is None else FormatFakeQuantize
        quantizer = made(spec, observer, point.bounds)
        fix_activation(quantizer, *chosen.of_activation(point.node))
        quantizer.features = max(1, point.node.meta["value"].numel() // images)
        _insert(graph_module, point, quantizer)
    for node, spec in _weight_specs(placement, chosen, backend).items():
        _quantize_weight(node, spec, quantizers)
        fix_weights(module_of(node), *chosen.of_weight(node))
    weight_only = quantize_weights_alone(graph_module, chosen, backend, quantizers)
    tidy(graph_module)
    _link_weights(graph_module)
    skipped = _skipped(chosen, placement, backend) + weight_only + _unknown(graph_module.graph)
    return PassResult(graph_module, len(placement.points), skipped)


def ready_to_place(graph_module: fx.GraphModule, example: Example) -> None:
    """Prepares a graph for `place`.

    Computes the shape and type of every node, and gives every call of a Conv or Linear a module of its own.
    """
    propagate(graph_module, example)
    _find_batch_axes(graph_module, example)
    _separate_calls(graph_module)


def _find_batch_axes(graph_module: fx.GraphModule, example: Example) -> None:
    """Finds the batch axis and the free axes of every Linear with leading axes, and writes them into its meta.

    They are found by a run with more images and a run with other sizes. If the capture found no batch axes, nothing is
    written for them, and the first axis counts as the batch axis.
    """
    axes, free = (graph_module.meta.get(key, ()) for key in ("batch_axes", "free_axes"))
    shapes = {n: shape_of(n) or () for n in graph_module.graph.nodes if op_class(n) == "linear"}
    batched = any(axis is not None for axis in axes)
    if not (batched or free) or all(len(shape) < 3 for shape in shapes.values()):
        return
    tensors = flatten(example)
    if batched:
        propagate(
            graph_module, resized(tensors, batch_size(tensors, axes) + batch_multiple(graph_module), axes)
        )
        for node, shape in shapes.items():
            node.meta[BATCH_AXIS] = next(iter(_differing(shape, node)), 0)
    if free:
        propagate(
            graph_module, with_sizes(tensors, {p: axis.others[0] for axis in free for p in axis.places})
        )
        for node, shape in shapes.items():
            node.meta[VARYING_AXES] = tuple(_differing(shape, node))
    propagate(graph_module, example)


def _differing(shape: tuple[int, ...], node: fx.Node) -> Iterator[int]:
    pairs = zip(shape, shape_of(node) or (), strict=True)
    return (i for i, (a, b) in enumerate(pairs) if a != b)


def _skipped(chosen: Overrides, placement: Placement, backend: Backend) -> list[tuple[str, str]]:
    named = {n: pattern for n, pattern in chosen.forced_float.items() if chosen.said(n, backend)}
    forced = [(site(n), f"{BY_OVERRIDE} '{pattern}'") for n, pattern in named.items()]
    return forced + placement.reasons


def _unknown(graph: fx.Graph) -> list[tuple[str, str]]:
    """Returns (site, reason) of the operators with weights that no rule quantizes.

    These are unknown ones, such as EmbeddingBag or `torch.lstm`, and PReLUs unless the backend has a rule for them.
    """
    found = []
    for node in graph.nodes:
        ruled = op_class(node) == "prelu" and "prelu" in _backend(node).rules
        if node.op == "call_module" and op_class(node) in ("other", "prelu") and not ruled:
            kind = type(module_of(node))
            if any(True for _ in module_of(node).parameters()):
                found.append((site(node), f"{kind.__name__} {_ONLY}"))
        elif op_class(node) == "other" and called(node) in _WEIGHTED and _reads_parameters(node):
            found.append((site(node), f"{called(node)} {_ONLY}"))
    return found


def _reads_parameters(node: fx.Node) -> bool:
    known = constants(node.graph)
    return any(n in known for n in node.all_input_nodes)


def _spec(point: Point, chosen: Overrides, backend: Backend) -> QuantSpec:
    spec = chosen.activation(point.node, backend)
    if point.bounds[0] == 0.0 and backend.activation.has_zero_point:
        # The range must end at the bound, since otherwise the clamp that it replaces (a ReLU) would be lost.
        spec = replace(spec, symmetric=False)
    return spec.along(point.axis)


def _weight_specs(placement: Placement, chosen: Overrides, backend: Backend) -> dict[fx.Node, QuantSpec]:
    """Returns the specs of the weights.

    A weight with several calls is guarded against saturation (`pairs`) if this is needed for any of them.
    """
    specs = {node: chosen.weight(node, backend).along(1) for node in placement.weighted}
    weights = {node: identity_of(module_of(node), "weight") for node in specs}
    guarded = {weights[node] for node, spec in specs.items() if spec.pairs and adds_in_16_bits(node)}
    return {node: replace(spec, pairs=weights[node] in guarded) for node, spec in specs.items()}


def _insert(graph_module: fx.GraphModule, point: Point, quantizer: FakeQuantize) -> None:
    quantizer.train(graph_module.training)
    name = point.name
    while _holds_another(graph_module, name):
        name += "_"
    graph_module.add_submodule(name, quantizer)
    last = point.absorbed or point.node
    with graph_module.graph.inserting_after(last):
        new = graph_module.graph.call_module(name, (point.node,))
    new.meta = {"site": name, QUANTIZES: point.tensor, "value": point.node.meta["value"]}
    for reader in point.readers:
        if facts(reader).name == "matmul" and reader.args[0] is reader.args[1]:
            reader.update_arg(0 if point.axis == -1 else 1, new)
        else:
            reader.replace_input_with(last, new)


def _holds_another(graph_module: fx.GraphModule, path: str) -> bool:
    """Returns whether the model has a module of its own at the path of a quantizer."""
    try:
        return not isinstance(graph_module.get_submodule(path), FakeQuantize)
    except AttributeError:
        return False


def _separate_calls(graph_module: fx.GraphModule) -> None:
    """Gives every further call of a Conv or Linear a module of its own with the same parameters.

    Each call has its own input range and therefore its own bias scale, and an override may keep a single call in float.
    """
    called: set[str] = set()
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and facts(node).weighted:
            if node.target in called:
                graph_module.add_submodule(site(node), with_the_same_parameters(module_of(node)))
                node.target = site(node)
            called.add(str(node.target))


def _quantize_weight(node: fx.Node, spec: QuantSpec, quantizers: Quantizers) -> None:
    module = module_of(node)
    if not isinstance(module, QATOperator):
        training = module.training
        module = qat_type(module).from_float(module).train(training)
        cast(fx.GraphModule, node.graph.owning_module).set_submodule(str(node.target), module)
    weight = module.weight
    made = quantizers.weight if spec.form is None else FormatWeightFakeQuantize
    module.weight_fake_quant = made(spec, weight.shape).to(weight.device)


def _link_weights(graph_module: fx.GraphModule) -> None:
    """Links every quantized weight to the activations before and after its operator.

    A weight with several calls is not linked to the activations after them. It keeps one scale, so that the file
    stores it once: aligned with the activation after each call (`qatkit.graph.scales.align`), it would become several
    weights.
    """
    calls = [n for n in graph_module.graph.nodes if n.op == "call_module" and facts(n).weighted]
    serves = Counter(identity_of(module_of(n), "weight") for n in calls)
    for node in calls:
        module = module_of(node)
        fake = getattr(module, "weight_fake_quant", None)
        if fake is not None:
            target = (
                quantizer_after(_past_activation(node))
                if serves[identity_of(module, "weight")] == 1
                else None
            )
            fake.between(_fake(quantizer_of(node.args[0])), _fake(target), _backend(node).shifts)


def _past_activation(node: fx.Node) -> fx.Node:
    """Returns the activation that is the only reader of `node` and is computed with it, else `node`.

    A ReLU or ReLU6 always counts, whatever the backend fuses. It is still a node of the graph if activations have no
    zero point, since then no quantizer absorbs it.
    """
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    if reader is not None and facts(reader).activation:
        return reader
    return fused_activation(node, _backend(node).fuses) or node


def _backend(node: fx.Node) -> Backend:
    return cast(Backend, cast(fx.GraphModule, node.graph.owning_module).meta["backend"])


def _fake(node: fx.Node | None) -> FakeQuantize | None:
    return None if node is None else cast(FakeQuantize, module_of(node))
